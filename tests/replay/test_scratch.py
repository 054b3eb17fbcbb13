"""Where a replay keeps what it made."""

from diloco.replay import scratch, script
from diloco.snapshots import keys, records


def test_every_version_keeps_its_head(tmp_path):
  kept = scratch.Scratch(tmp_path)
  for version in (0, 1, 2):
    kept.write_head(
      records.Head(3, version, 0, f"payload{version}", [[4]], {}, {})
    )
  for version in (0, 1, 2):
    head = kept.read_head(3, version)
    assert (head.version, head.payload) == (version, f"payload{version}")


def test_copies_are_named_after_the_version_whose_values_they_have(tmp_path):
  kept = scratch.Scratch(tmp_path)
  payload = keys.global_prefix(3, 0, "i0.1")
  (tmp_path / "snapshots" / payload).mkdir(parents=True)
  kept.write_head(records.Head(3, 0, 0, payload, [[4]], {}, {}))
  for old, new in ((0, 5), (5, 9)):  # no merge between two returns to a cut
    kept.copy_version(script.VersionId(3, old), script.VersionId(3, new))
  payloads = [kept.read_head(3, version).payload for version in (5, 9)]
  assert len({payload, *payloads}) == 3
  # Of initial parameters a merge asks for no momentum.
  assert [keys.payload_version(p) for p in payloads] == [0, 0]
