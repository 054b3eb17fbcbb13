"""Where a replay keeps what it made."""

from diloco.replay import scratch
from diloco.snapshots import records


def test_every_version_keeps_its_head(tmp_path):
  kept = scratch.Scratch(tmp_path)
  for version in (0, 1, 2):
    kept.write_head(
      records.Head(3, version, 0, f"payload{version}", [[4]], {}, {})
    )
  for version in (0, 1, 2):
    head = kept.read_head(3, version)
    assert (head.version, head.payload) == (version, f"payload{version}")
