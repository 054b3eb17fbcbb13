import dataclasses
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from diloco import errors
from diloco.snapshots import records

CONTRIBUTION = records.Contribution(
  island=3,
  incarnation=2,
  fragment=7,
  base_version=11,
  first_step=100,
  step=124,
  c_tokens=24 * 2048,
  codec="bf16",
  plan_hash="abc",
  payload="payloads/x",
  chunks=[[4], [2, 2]],
  num_bytes=12,
  norms=[0.5, 1.25],
)
ALL = [
  CONTRIBUTION,
  records.Head(1, 2, 3, "globals/x", [[4]], {"0": 5}, {"fragment": 1}),
  records.Lease("host.1", 4, 9),
  records.Member("standby2", 1, 2, "n"),
  records.Board([1, 2], {"1": [0, 2]}),
  records.Verdict(1, 2, 3, 4, "not_finite", 0),  # JSON has it without a point
]


@pytest.mark.parametrize("record", ALL, ids=lambda r: type(r).__name__)
def test_record_round_trips(record):
  assert type(record).from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize("record", ALL, ids=lambda r: type(r).__name__)
def test_record_torn_anywhere_is_corrupt(record):
  data = record.to_bytes()
  for end in range(len(data)):
    with pytest.raises(errors.CorruptSnapshotError):
      type(record).from_bytes(data[:end])


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None)
def test_flipped_bit_is_never_read_as_another_value(data):
  raw = bytearray(CONTRIBUTION.to_bytes())
  place = data.draw(st.integers(0, len(raw) - 1))
  raw[place] ^= 1 << data.draw(st.integers(0, 7))
  try:
    read = records.Contribution.from_bytes(bytes(raw))
  except errors.CorruptSnapshotError:
    return
  assert read == CONTRIBUTION  # a flip in white space or in a number's form


def test_record_nested_too_deep_is_corrupt():
  with pytest.raises(errors.CorruptSnapshotError):
    records.Lease.from_bytes(b"[" * 100_000)


@pytest.mark.parametrize(
  "fields",
  [
    {},
    [],
    None,
    {**dataclasses.asdict(CONTRIBUTION), "surprise": 1},
    {**dataclasses.asdict(CONTRIBUTION), "step": "124"},
    {**dataclasses.asdict(CONTRIBUTION), "norms": 3},
  ],
  ids=["empty", "list", "null", "unknown field", "wrong type", "no list"],
)
def test_record_of_another_form_is_corrupt(fields):
  data = json.dumps({"crc32": records.checksum(fields), "record": fields})
  with pytest.raises(errors.CorruptSnapshotError):
    records.Contribution.from_bytes(data.encode())


def test_record_of_an_older_version_may_lack_a_field_with_a_default():
  fields = {"owner": "a", "token": 1, "beat": 2}
  data = json.dumps({"crc32": records.checksum(fields), "record": fields})
  assert records.Lease.from_bytes(data.encode()) == records.Lease("a", 1, 2, "")


# Every record that lies under one key only, by its content.
PLACES = [
  (CONTRIBUTION, "contributions/0007.0003.0002.000000124"),
  (ALL[1], "heads/0001"),
  (records.Member("island-5", 1, 2, "n"), "members/island-5"),
  (records.CutPart(7, 1, 2, 3, 4, "", 5, []), "cuts/000007/island-0002"),
  (records.Lease("host.1", 4, 9), ""),
]


@pytest.mark.parametrize(("record", "key"), PLACES)
def test_record_is_refused_under_another_records_key(record, key):
  assert record.key_in_store() == key
  if key:
    records.check_key(record, key)
    with pytest.raises(errors.CorruptSnapshotError, match=f"under {key}"):
      records.check_key(record, f"{key}0")
  else:
    records.check_key(record, "anywhere")


def test_checksum_is_of_the_content_whatever_the_order():
  assert records.checksum({"a": 1, "b": 2}) == records.checksum(
    {"b": 2, "a": 1}
  )
  assert records.checksum({"a": 1}) != records.checksum({"a": 2})


def test_island_without_a_merge_has_merged_nothing():
  assert [ALL[1].merged_step(m) for m in (0, 1)] == [5, 0]


def test_contribution_key_is_unique_and_sorts_by_fragment_island_and_step():
  later = dataclasses.replace(CONTRIBUTION, step=1000)
  other = dataclasses.replace(CONTRIBUTION, incarnation=3)
  keys = [CONTRIBUTION.key, later.key, other.key]
  assert sorted(keys) == keys and len(set(keys)) == 3
  assert CONTRIBUTION.c_steps == 24
