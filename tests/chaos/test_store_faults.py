"""Damage to objects of a store, and a disk that is full or shut."""

import errno
import random

import pytest

from diloco.chaos import store_faults

RECORD = "0001.0002.0003.000000004"


@pytest.fixture
def snapshots(tmp_path):
  for key in (
    f"contributions/{RECORD}",
    f"payloads/{RECORD}/w/c/0",
    f"payloads/{RECORD}/w/zarr.json",
    "payloads/0009.0002.0003.000000004/w/c/0",  # of no contribution
    "members/island-0",
    "board",
    "heads/0000",
  ):
    path = tmp_path / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"0123456789")
  return tmp_path


def _damage(snapshots, what, how):
  return store_faults.damage_one(snapshots, what, how, random.Random(0))


@pytest.mark.parametrize(
  ("what", "key"),
  [
    ("payload", f"payloads/{RECORD}/w/c/0"),
    ("record", f"contributions/{RECORD}"),
    ("member", "members/island-0"),
    ("board", "board"),
  ],
)
def test_one_object_of_the_class_is_damaged(snapshots, what, key):
  contents = {p: p.read_bytes() for p in snapshots.rglob("*") if p.is_file()}
  assert _damage(snapshots, what, "flip") == key
  changed = [p for p, data in contents.items() if p.read_bytes() != data]
  assert changed == [snapshots / key]
  assert len((snapshots / key).read_bytes()) == 10


def test_object_is_cut_in_half_or_deleted(snapshots):
  _damage(snapshots, "board", "truncate")
  assert (snapshots / "board").read_bytes() == b"01234"
  _damage(snapshots, "board", "delete")
  assert not (snapshots / "board").exists()
  assert _damage(snapshots, "board", "flip") is None


@pytest.fixture
def disk(tmp_path):
  why = store_faults.may_mount(tmp_path / "probe")
  if why:
    pytest.skip(f"no file system can be mounted: {why}")
  assert not (tmp_path / "probe").exists()
  disk = store_faults.SmallDisk(tmp_path / "disk")
  yield disk
  store_faults.keep_and_unmount(disk.path)


def test_full_disk_takes_no_byte_until_it_is_over(disk, tmp_path):
  path = tmp_path / "disk" / "file"
  with disk.full(), pytest.raises(OSError) as caught:
    path.write_bytes(b"a")
  assert caught.value.errno == errno.ENOSPC
  assert path.write_bytes(b"ab") == 2


def test_disk_is_read_only_until_it_is_over(disk, tmp_path):
  path = tmp_path / "disk" / "file"
  path.write_bytes(b"a")
  with disk.read_only():
    assert path.read_bytes() == b"a"
    with pytest.raises(OSError) as caught:
      path.write_bytes(b"b")
  assert caught.value.errno == errno.EROFS
  assert path.write_bytes(b"ab") == 2


def test_content_of_a_small_disk_stays_in_its_place(tmp_path):
  why = store_faults.may_mount(tmp_path / "probe")
  if why:
    pytest.skip(f"no file system can be mounted: {why}")
  disk = store_faults.SmallDisk(tmp_path / "disk")
  (tmp_path / "disk" / "file").write_bytes(b"a")
  store_faults.keep_and_unmount(disk.path)
  assert not (tmp_path / "disk").is_mount()
  assert (tmp_path / "disk" / "file").read_bytes() == b"a"


def test_directory_that_cannot_be_mounted_on_is_said_so(tmp_path):
  file = tmp_path / "file"
  file.write_bytes(b"")
  assert store_faults.may_mount(file)
