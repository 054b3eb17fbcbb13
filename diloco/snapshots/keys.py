"""Where things are in the snapshot store.

Layout, relative to the store's root:

    plan                                  the fragment plan
    heads/<p>                             newest global version of fragment p
    globals/<p>/<version>.<token>/...     its parameters, where they are encoded
                                          their f32 master and maybe what is new
                                          in them, and what the outer
                                          optimizer keeps beside them
    contributions/<key>                   commit records, written last
    payloads/<key>/...                    outer gradients they point to
    members/<role>                        which life a role is in, and where:
                                          its signs of life
    leases/syncer                         syncer leadership
    leases/controller                     who controls the run, and which
                                          directory it is in
    leases/<name>.token                   the newest fencing token drawn
    lives/<role>.token                    the newest life drawn of a role
    initial/<p>                           what version 0 is made of, if the run
                                          was given parameters
    board                                 hint: versions and open rounds
    verdicts/<m>                          what the syncer has against island m
    cuts/<n>/...                          parts of cut n, see `cuts`
    epoch                                 timeline, and who may roll it back
    peers/...                             optimizer states for those without
    states/...                            copies of saved states, see `states`
    log/...                               the run's own files, see `logbook`
    relay/...                             lines on their way there, see `relay`
    permits/...                           of lives that relay them
"""

import functools
import re
from collections.abc import Iterable

BOARD = "board"
LIVES = "lives"
# Of a version: for all, from the version before for who has it, for the syncer.
PARAMS, DELTA, MASTER = "params", "delta", "master"
SYNCER_LEASE = "leases/syncer"
CONTROLLER_LEASE = "leases/controller"
EPOCH = "epoch"
SEEN = "log/seen"  # of the logbook
# Below a cut's prefix.
REQUEST, HEADS, CHANNEL = "request", "heads", "channel"
COMPLETE, ABANDONED = "complete", "abandoned"
DELAYED = "delayed"  # a buffer that several merges fill, and how many did:
ARRIVALS = "arrivals"

_CONTRIBUTION_NAME = re.compile(r"\d+\.\d+\.\d+\.\d+").fullmatch


@functools.cache
def head_key(fragment: int) -> str:
  """Key of a fragment's head."""
  return f"heads/{fragment:04d}"


def initial_key(fragment: int) -> str:
  """Key of a fragment that the run was given to start from."""
  return f"initial/{fragment:04d}"


@functools.cache
def member_key(role: str) -> str:
  """Key of a role's sign of life."""
  return f"members/{role}"


def lives_key(role: str) -> str:
  """What the numbers of a role's lives are drawn from; see `lease.draw`."""
  return f"{LIVES}/{role}"


def earlier_lives_key(island: int) -> str:
  """What an island's were drawn from before all roles signed in."""
  return f"{LIVES}/{island:04d}"


@functools.cache
def island_of(role: str) -> int:
  """Number of the island that a role, or a key below `members/`, is; or -1."""
  kind, _, number = role.partition("-")
  return int(number) if kind == "island" and number.isdecimal() else -1


def is_island(name: str) -> bool:
  """Whether a key below `members/` can be an island's sign of life."""
  return island_of(name) >= 0


def contribution_name(
  fragment: int, island: int, incarnation: int, step: int
) -> str:
  """Name of what a life of an island published of a fragment at a step."""
  return f"{fragment:04d}.{island:04d}.{incarnation:04d}.{step:09d}"


def contribution_key(name: str) -> str:
  """Key of a commit record, from `Contribution.key`."""
  return f"contributions/{name}"


def is_contribution_name(name: str) -> bool:
  """Whether a key below `contributions/` can be a commit record.

  File systems leave things of their own in a directory.
  """
  return _CONTRIBUTION_NAME(name) is not None


def is_member_name(name: str) -> bool:
  """Whether a key below `members/` can be a sign of life."""
  return name.isalnum() or is_island(name)


def payload_prefix(name: str) -> str:
  """Prefix of a contribution's tensors, from `Contribution.key`."""
  return f"payloads/{name}"


def global_prefix(fragment: int, version: int, writer: str) -> str:
  """Prefix of a global version; unique to the one who writes it."""
  return f"{globals_prefix(fragment)}/{version:09d}.{writer}"


@functools.cache
def globals_prefix(fragment: int) -> str:
  """Prefix of all versions of a fragment."""
  return f"globals/{fragment:04d}"


def is_global(prefix: str) -> bool:
  """Whether a payload is a global version's, and no contribution's."""
  return prefix.startswith("globals/")


@functools.cache
def verdict_key(island: int) -> str:
  """Key of what the syncer has against an island."""
  return f"verdicts/{island:04d}"


def cut_prefix(cut: int) -> str:
  """Prefix of a cut's parts."""
  return f"cuts/{cut:06d}"


def _cut_key(name: str, cut: int) -> str:
  return f"{cut_prefix(cut)}/{name}"


# Of the records of a cut, by its number; see `cuts`.
cut_request_key = functools.partial(_cut_key, REQUEST)
cut_heads_key = functools.partial(_cut_key, HEADS)
cut_channel_key = functools.partial(_cut_key, CHANNEL)
cut_complete_key = functools.partial(_cut_key, COMPLETE)
cut_abandoned_key = functools.partial(_cut_key, ABANDONED)


def cut_part_key(cut: int, island: int) -> str:
  """Key of an island's part."""
  return _cut_key(cut_part_name(island), cut)


def cut_part_name(island: int) -> str:
  """Name of an island's part below the cut's prefix."""
  return f"island-{island:04d}"


def payload_version(payload: str) -> int:
  """The version a global payload was written as; see `global_prefix`.

  After a return to a cut, the head that points to it has a larger one.
  """
  return int(payload.rpartition("/")[2].partition(".")[0])


def newest_version(names: Iterable[str]) -> int:
  """The largest version among names below `globals_prefix`; 0 if none is."""
  numbers = (name.partition(".")[0] for name in names)
  return max((int(n) for n in numbers if n.isdecimal()), default=0)


PEER_REQUESTS = "peers/requests"
PEER_STATES = "peers/states"
PEER_PAYLOADS = "peers/payloads"


def peer_request_key(island: int) -> str:
  """Key of an island's call for an optimizer state."""
  return f"{PEER_REQUESTS}/{island:04d}"


def peer_state_key(island: int, incarnation: int) -> str:
  """Key of the answer to one incarnation's call."""
  return f"{PEER_STATES}/{island:04d}.{incarnation:04d}"


def peer_payload_prefix(
  island: int, incarnation: int, server: int, life: int, step: int
) -> str:
  """Prefix of an answer's tensors, unique to who writes them and when."""
  asker = f"{island:04d}.{incarnation:04d}"
  return f"{PEER_PAYLOADS}/{asker}/{server:04d}.{life:04d}.{step:09d}"
