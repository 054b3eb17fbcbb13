import numpy as np

from diloco.fragments import partition
from diloco.snapshots import arrays, records, store
from diloco.virtual import memory


def lease(owner):
  return records.Lease(owner, 1, 0)


def test_compare_and_set_needs_the_newest_generation():
  made = memory.MemoryStore()
  found, missing = made.read_for_update("a", records.Lease)
  assert found is None
  assert made.compare_and_set("a", lease("x"), missing)
  assert not made.compare_and_set("a", lease("y"), missing)
  found, generation = made.read_for_update("a", records.Lease)
  assert found == lease("x")
  made.delete("a")
  assert not made.compare_and_set("a", lease("y"), generation)


def test_names_are_those_of_keys_and_of_what_they_lie_below():
  made = memory.MemoryStore()
  for key in ("a/b/c", "a/b/d", "a/e", "f"):
    made.write(key, lease(key))
  assert made.names("a") == ["b", "e"]
  assert made.keys("a") == ["b/c", "b/d", "e"]
  made.delete("a/b/c")
  assert made.names("a") == ["b", "e"]
  made.delete("a/b/d")
  assert made.names("a") == ["e"] and made.names("a/b") == []
  made.delete_tree("a")
  assert made.names("a") == [] and made.read("f", records.Lease)


def test_what_is_kept_can_be_opened_by_others(tmp_path):
  made = memory.MemoryStore()
  plan = partition.partition([partition.Tensor("x/w", (4,), "rda")], 1)
  made.write_plan(plan)
  made.write("syncer", lease("me"))
  values = np.arange(4, dtype=np.float32)
  made.arrays.write("p/params", [arrays.Tensor.whole("x/w", values)])
  values[:] = 0  # it has a copy
  other = store.SnapshotStore(tmp_path.as_uri())
  made.keep(other)
  assert other.read_plan() == plan
  assert other.read("syncer", records.Lease) == lease("me")
  found = other.arrays.read("p/params", "x/w")
  assert found.tolist() == [0, 1, 2, 3]
  assert made.arrays.read("p/params", "x/w").tolist() == [0, 1, 2, 3]


def test_scalar_that_was_read_can_be_written_to():
  made = memory.MemoryStore()
  values = np.float32(3).reshape(())
  made.arrays.write("p/params", [arrays.Tensor.whole("scale", values)])
  found = made.arrays.read("p/params", "scale")
  found[...] -= 1  # as an outer step does
  assert found == 2 and made.arrays.read("p/params", "scale") == 3
