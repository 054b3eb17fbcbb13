"""Launches an experiment: another name of `diloco train`.

    python -m experiments.launch --config=experiments/configs/quickstart.py \
        --workdir=runs/quickstart --config.seed=1
"""

import sys

from diloco import cli

if __name__ == "__main__":
  sys.exit(cli.main(["train", *sys.argv[1:]]))
