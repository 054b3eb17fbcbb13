"""Launches an experiment.

    python -m experiments.launch --config=experiments/configs/quickstart.py \
        --workdir=runs/quickstart --config.seed=1
"""

import sys

from diloco import errors, launch, process


def main() -> int:
  """Parses flags and trains; returns the exit code."""
  try:
    return launch.main(sys.argv)
  except errors.UserError as error:
    process.print_error(error)
    return process.EXIT_USER_ERROR


if __name__ == "__main__":
  sys.exit(main())
