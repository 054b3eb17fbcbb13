import dataclasses

import numpy as np
import pytest
from cut_builder import save_state, write_leaf

from diloco import errors
from diloco.snapshots import checkpoint


def _make(folder, serial, *, incarnation=1, step=0, marked=True):
  path = checkpoint.path_of(folder, step or 10 * serial, incarnation, serial)
  values = np.full(100, serial, np.float32)
  if not marked:
    write_leaf(path, "p000000", values)
    return path
  step = step or 10 * serial
  fields = dict(incarnation=incarnation, serial=serial, step=step)
  save_state(path, values, **fields)
  return path


def test_only_what_has_a_marker_counts_and_the_newest_life_comes_first(
  tmp_path,
):
  old = _make(tmp_path, 2, step=400)
  new = _make(tmp_path, 1, incarnation=2, step=300)
  _make(tmp_path, 2, incarnation=2, step=500, marked=False)
  (tmp_path / "12").mkdir()  # as an earlier release named them
  assert checkpoint.completed(tmp_path) == [new, old]


@pytest.mark.parametrize(
  ("damage", "told"),
  [
    (lambda f: f.write_bytes(f.read_bytes()[:-1]), "is not what was saved"),
    (lambda f: f.unlink(), "is missing"),
    (lambda f: f.with_name("more").write_bytes(b""), "more is not what"),
  ],
)
def test_changed_files_are_noticed_by_name(tmp_path, damage, told):
  path = _make(tmp_path, 1)
  checkpoint.pin(path, 3)  # not part of the content
  assert checkpoint.verify(path).serial == 1
  damage(path / checkpoint.ARRAYS / "manifest.ocdbt")
  with pytest.raises(errors.CorruptSnapshotError, match=told):
    checkpoint.verify(path)


def _reverse(file):
  file.write_bytes(file.read_bytes()[::-1])


def _change_values(file):
  write_leaf(file.parent.parent, "p000000", np.full(100, 9, np.float32))


@pytest.mark.parametrize("damage", [_reverse, _change_values])
def test_changed_values_are_noticed_by_name(tmp_path, damage):
  path = _make(tmp_path, 1)
  marker = checkpoint.verify(path)
  checkpoint.read_all(path, marker)
  damage(path / checkpoint.ARRAYS / "manifest.ocdbt")
  with pytest.raises(errors.CorruptSnapshotError, match="array p000000"):
    checkpoint.read_all(path, marker)


def test_every_array_of_a_checkpoint_is_read(tmp_path):
  path = _make(tmp_path, 1)
  marker = checkpoint.verify(path)
  leaves = marker.leaves | {"p000001": marker.leaves["p000000"]}
  with pytest.raises(errors.CorruptSnapshotError, match="array p000001"):
    checkpoint.read_all(path, dataclasses.replace(marker, leaves=leaves))


def test_torn_marker_is_no_marker(tmp_path):
  path = _make(tmp_path, 1)
  marker = path / checkpoint.MARKER
  marker.write_bytes(marker.read_bytes()[:40])
  with pytest.raises(errors.CorruptSnapshotError):
    checkpoint.verify(path)


def test_marker_that_is_torn_as_it_is_written_is_none(tmp_path, monkeypatch):
  def die(path, data):
    with path.open("wb") as file:
      file.write(data[:40])
    raise KeyboardInterrupt

  monkeypatch.setattr("pathlib.Path.write_bytes", die)
  with pytest.raises(KeyboardInterrupt):
    _make(tmp_path, 1)
  assert any(tmp_path.iterdir()) and not checkpoint.completed(tmp_path)


def test_newest_and_pinned_ones_are_kept(tmp_path):
  paths = [_make(tmp_path, serial) for serial in range(1, 6)]
  torn = _make(tmp_path, 6, marked=False)
  checkpoint.pin(paths[0], 7)
  checkpoint.pin(paths[1], 8)
  checkpoint.prune(tmp_path, 2, cuts=[7, 9])  # a cut may be older than another
  assert checkpoint.completed(tmp_path) == [paths[4], paths[3], paths[0]]
  assert not torn.exists()


def test_state_stays_as_long_as_any_of_its_cuts(tmp_path):
  paths = [_make(tmp_path, serial) for serial in range(1, 7)]
  for others, path in enumerate(paths[:4]):
    for cut in (7, *range(10, 10 + 3 * others)):
      checkpoint.pin(path, cut)
  checkpoint.prune(tmp_path, 1, cuts=[7])
  assert checkpoint.completed(tmp_path) == [paths[5], *paths[3::-1]]
  checkpoint.prune(tmp_path, 1, cuts=[])
  assert checkpoint.completed(tmp_path) == [paths[5]]


def test_deletion_that_is_torn_leaves_nothing_that_counts(
  tmp_path, monkeypatch
):
  old, *new = (_make(tmp_path, serial) for serial in (1, 2, 3))

  def die(path, **_):
    raise KeyboardInterrupt

  monkeypatch.setattr(checkpoint.shutil, "rmtree", die)
  with pytest.raises(KeyboardInterrupt):
    checkpoint.prune(tmp_path, 2, cuts=[])
  assert old.exists()
  assert checkpoint.completed(tmp_path) == new[::-1]


@pytest.mark.parametrize("name", ["8.1", "8.1.2.3", "8.x.2", "8.1.-2", ""])
def test_what_is_no_name_of_a_checkpoint_has_no_life(name):
  assert checkpoint.life_of(name) == ()
  assert checkpoint.newest_first([name, "9.1.2"]) == ["9.1.2"]


def test_state_without_a_readable_marker_says_so(tmp_path):
  with pytest.raises(errors.CorruptSnapshotError, match="no readable marker"):
    checkpoint.read_marker(tmp_path / "8.1.2")
