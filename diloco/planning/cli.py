"""`diloco simulate`: which simulator is asked for."""

from collections.abc import Sequence

from diloco.planning.bandwidth import command as bandwidth


def main(argv: Sequence[str]) -> int:
  """Runs the simulator that the arguments ask for; returns the exit code."""
  if "--bandwidth" in argv:
    return bandwidth.main(argv)
  # Imported here, for matplotlib takes its time.
  from diloco.planning.fleet import command as fleet

  return fleet.main(argv)
