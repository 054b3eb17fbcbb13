"""Where the `diloco` command begins, as does `python -m diloco`.

What it needs is imported for some tenths of a second, in which a Ctrl-C is no
error of anybody's.
"""

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130  # as of a process that SIGINT has ended


def _interrupt(number: int, frame: FrameType | None) -> None:
  """Ends a process that imports; an extension might lose the exception."""
  within = frame
  while within is not None:
    if within.f_code.co_filename.startswith("<frozen importlib"):
      os._exit(_INTERRUPTED)
    within = within.f_back
  signal.default_int_handler(number, frame)


_interrupt.ends_at_once = True  # type: ignore[attr-defined]


def main() -> int:
  """Runs one command; returns the exit code."""
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)
  from diloco import cli

  return cli.main()


if __name__ == "__main__":
  sys.exit(main())
