"""Copies of saved states in a store that lies elsewhere."""

import dataclasses
import threading

import numpy as np
import pytest
from cut_builder import CutRun, save_state

from diloco import errors
from diloco.snapshots import checkpoint, records, states, store, verify
from diloco.snapshots import cuts as cuts_lib


class Failing(store.SnapshotStore):
  """Fails at its n-th write from when it is told to."""

  left = None
  lock = threading.Lock()

  def put(self, key, data):
    with self.lock:
      if self.left is not None:
        self.left -= 1
        if self.left < 0:
          raise errors.StoreError("no answer")
    super().put(key, data)


@pytest.fixture
def snapshots(tmp_path):
  return Failing((tmp_path / "there").as_uri())


@pytest.fixture
def copies(snapshots):
  return states.Copies(snapshots)


@pytest.fixture
def small_pieces(monkeypatch):
  monkeypatch.setattr(states, "_PIECE_BYTES", 100)


def folder_of(tmp_path, machine="here"):
  return checkpoint.directory(tmp_path / machine / "run", 0)


def make(folder, serial, *, incarnation=1, size=100):
  path = checkpoint.path_of(folder, 10 * serial, incarnation, serial)
  values = np.arange(size, dtype=np.float32) + serial
  fields = dict(incarnation=incarnation, serial=serial, step=10 * serial)
  save_state(path, values, **fields)
  return path


@pytest.mark.parametrize(
  ("url", "kept"),
  [
    ("file:///machine/run/snapshots/", False),
    ("file:///machine/run/", False),
    ("file:///machine/run-2/", True),
    ("file:///mnt/store", True),
    ("s3://bucket/run?endpoint=http://127.0.0.1:1", True),
    ("memory://", False),
  ],
)
def test_states_are_copied_if_the_store_is_elsewhere(url, kept):
  found = states.of_run("/machine/run", store.SnapshotStore(url))
  assert (found is not None) == kept


def test_state_comes_back_on_another_machine(tmp_path, copies, small_pieces):
  path = make(folder_of(tmp_path), 3)
  assert max(checkpoint.read_marker(path).files.values()) > 200  # pieces
  checkpoint.pin(path, 7)
  copies.keep(path, 7)
  there = folder_of(tmp_path, "other") / path.name
  assert copies.completed(there.parent) == [path.name]
  assert copies.read_marker(there) == checkpoint.read_marker(path)
  there.mkdir(parents=True)  # somebody died here, who brought something else
  (there / "another").write_bytes(b"file")
  copies.fetch(there)
  marker = checkpoint.verify(there)
  checkpoint.read_all(there, marker)
  assert marker == checkpoint.read_marker(path)


def test_copy_counts_only_once_all_of_it_is_there(
  tmp_path, copies, snapshots, small_pieces
):
  path = make(folder_of(tmp_path), 1)
  there = folder_of(tmp_path, "other") / path.name
  writes = 0
  while not copies.completed(path.parent):
    with pytest.raises(errors.CorruptSnapshotError, match="neither here nor"):
      copies.fetch(there)
    snapshots.left = writes  # dies before that write
    writes += 1
    try:
      copies.keep(path, 2)
    except OSError:
      continue
  total = sum(-(-n // 100) for n in checkpoint.read_marker(path).files.values())
  assert writes - 1 == total + 2  # and pin, and marker
  copies.fetch(there)
  assert checkpoint.verify(there)


def test_copying_ends_when_the_island_leaves(tmp_path, copies):
  path = make(folder_of(tmp_path), 1)
  with pytest.raises(OSError, match="leaves"):
    copies.keep(path, leaves=lambda: True)
  assert copies.completed(path.parent) == []


@pytest.mark.parametrize("short", [None, b"x"])
def test_piece_that_is_lost_or_short_is_told_and_nothing_counts(
  tmp_path, copies, snapshots, short
):
  path = make(folder_of(tmp_path), 1)
  copies.keep(path)
  piece = f"states/island-0/{path.name}/files/arrays/manifest.ocdbt/{0:016d}"
  assert snapshots.get(piece)
  snapshots.put(piece, short) if short else snapshots.delete(piece)
  there = folder_of(tmp_path, "other") / path.name
  with pytest.raises(errors.CorruptSnapshotError, match="ocdbt is not whole"):
    copies.fetch(there)
  assert checkpoint.completed(there.parent) == []


def test_bytes_that_changed_in_the_store_are_found_by_their_digest(
  tmp_path, copies, snapshots
):
  path = make(folder_of(tmp_path), 1)
  copies.keep(path)
  prefix = f"states/island-0/{path.name}/files"
  for key in snapshots.keys(prefix):
    data = snapshots.get(f"{prefix}/{key}")
    snapshots.put(f"{prefix}/{key}", data[::-1])
  there = folder_of(tmp_path, "other") / path.name
  copies.fetch(there)
  with pytest.raises(errors.CorruptSnapshotError):
    checkpoint.read_all(there, checkpoint.verify(there))


def test_file_outside_of_a_state_is_not_written(tmp_path, copies, snapshots):
  path = make(folder_of(tmp_path), 1)
  marker = checkpoint.read_marker(path)
  evil = dataclasses.replace(marker, files={"../../../evil": 1})
  key = f"states/island-0/{path.name}/{checkpoint.MARKER}"
  snapshots.put(key, evil.to_bytes())
  with pytest.raises(errors.CorruptSnapshotError, match="is no file of a"):
    copies.fetch(folder_of(tmp_path, "other") / path.name)
  assert not list(tmp_path.rglob("evil"))


def test_retention_is_that_of_the_disk(tmp_path, copies, snapshots):
  folder = folder_of(tmp_path)
  for serial in range(1, 6):
    path = make(folder, serial)
    if serial < 3:
      checkpoint.pin(path, serial)
    copies.keep(path, serial if serial < 3 else 0)
  late = make(folder, 1, incarnation=3)  # of a life this one knows nothing of
  copies.keep(late)
  snapshots.delete(f"states/island-0/{late.name}/{checkpoint.MARKER}")
  copies.prune(folder, 2, [2], incarnation=1)
  found = [checkpoint.life_of(n)[1] for n in copies.completed(folder)]
  assert found == [5, 4, 2]
  assert {k.split("/")[0] for k in snapshots.keys("states/island-0")} == {
    *copies.completed(folder),
    late.name,  # under way
  }


def test_copy_whose_deletion_is_torn_counts_no_more(
  tmp_path, copies, snapshots, monkeypatch
):
  folder = folder_of(tmp_path)
  for serial in (1, 2):
    copies.keep(make(folder, serial))

  def die(prefix):
    raise KeyboardInterrupt

  monkeypatch.setattr(snapshots, "delete_tree", die)
  with pytest.raises(KeyboardInterrupt):
    copies.prune(folder, 1, [], incarnation=1)
  assert [checkpoint.life_of(n)[1] for n in copies.completed(folder)] == [2]


def test_cut_is_verified_where_its_states_are_not(tmp_path):
  run = CutRun(tmp_path / "here", (tmp_path / "there").as_uri())
  cut = run.take_cut()
  parts = [
    run.store.read(f"cuts/{cut:06d}/island-{m:04d}", records.CutPart)
    for m in (0, 1)
  ]
  elsewhere = verify.Verifier(
    tmp_path / "new", run.store, run.store.read_plan(), buffers=()
  )
  with pytest.raises(errors.CorruptSnapshotError, match="neither here nor"):
    elsewhere.check_saved(parts[0])
  copies = states.of_run(run.dir, run.store)
  for part in parts:
    copies.keep(run.dir / part.checkpoint, cut)
  whole = run.perform(cuts_lib.look(cut))
  assert whole.is_complete
  for part in parts:
    elsewhere.check_saved(part)
    assert (tmp_path / "new" / part.checkpoint / checkpoint.MARKER).exists()
