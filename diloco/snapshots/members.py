"""Who lives: every role's place in a run's store, and its signs of life there.

A life's number is drawn by compare-and-set, and it holds its role's place until
a later life comes. So whoever reaches the store knows which roles there are, in
which life, on which host, and when each was heard of. No merge depends on it:
heads refuse a deposed syncer, and vector clocks what was published twice.

Procedures (see `diloco.snapshots.operations`).
"""

from __future__ import annotations

from collections.abc import Callable

from diloco import errors
from diloco.snapshots import keys, operations, records

NAMES = operations.Names("members")


def beat(member: records.Member) -> operations.Procedure[bool]:
  """Writes a sign of life into a role's place among the members.

  One process has the place: the life with the highest number, and of two with
  one number (two controllers may have given it out) who came first. The others
  find out by their next beat, and leave.

  Returns:
    Whether it was written; if not, somebody else wrote meanwhile.

  Raises:
    FencedError: another process has the place.
  """
  key = keys.member_key(member.role)
  found, generation = yield from operations.sound(key, records.Member)
  if (
    found is not None
    and found.nonce != member.nonce
    and found.incarnation >= member.incarnation
  ):
    raise errors.FencedError(
      f"another process is {member.role}, life {found.incarnation}; this one is"
      f" life {member.incarnation}, and leaves"
    )
  written: bool = yield operations.CompareAndSet(key, member, generation)
  return written


def take_place(member: records.Member) -> operations.Procedure[None]:
  """Has earlier lives leave, before what they have published is read.

  Raises:
    FencedError: this is not the newest life.
  """
  while not (yield from beat(member)):
    pass


def read(
  wanted: Callable[[str], bool] = keys.is_member_name,
  each: operations.Each = operations.in_turn,
) -> operations.Procedure[list[records.Member]]:
  """Gives the members whose names are `wanted`; not those that are damaged."""
  names = filter(wanted, (yield NAMES))
  found = yield from each(
    operations.sound(keys.member_key(name), records.Member) for name in names
  )
  return [member for member, _ in found if member is not None]


def of_run(
  run: str, each: operations.Each = operations.in_turn
) -> operations.Procedure[list[records.Member]]:
  """Gives all members of a run; see `process.run_name`.

  Raises:
    UserError: there is one of another run in its store.
  """
  found = yield from read(each=each)
  for member in found:
    if member.run != run:
      raise errors.UserError(
        "the run's store",
        f"{member.role}, life {member.incarnation} on {member.host}, has signed"
        f" in there for another run (run {member.run or 'unknown'}, this one is"
        f" {run})",
        "give each run a store of its own; if that role is gone for good,"
        f" delete {keys.member_key(member.role)} in this one",
      )
  return found
