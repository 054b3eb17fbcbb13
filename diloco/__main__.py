"""Where the `diloco` command begins, as does `python -m diloco`.

What it needs is imported for some tenths of a second, in which a Ctrl-C is no
error of anybody's.
"""

import sys

_INTERRUPTED = 130  # as of a process that SIGINT has ended


def main() -> int:
  """Runs one command; returns the exit code."""
  try:
    from diloco import cli
  except KeyboardInterrupt:
    return _INTERRUPTED
  return cli.main()


if __name__ == "__main__":
  sys.exit(main())
