"""Commands that look ahead, check and measure, and one for the shell."""

import argparse
import os
import pathlib

from diloco import arguments
from diloco.commands import entry

# By part: what is measured, and at what cost.
_BENCHES = {
  "island": (
    "step rate of an island that syncs, over the bare loop",
    "some minutes",
  ),
  "store": (
    "bandwidth of the snapshot store, over plain files",
    "half a minute and three times 256 MiB of disk",
  ),
  "merge": (
    "bandwidth of a merge, over a memory copy",
    "a minute and 1 GB of memory",
  ),
  "takeover": (
    "time from a syncer's death to its successor's work",
    "two minutes",
  ),
  "bookkeeping": (
    "what tapes, metrics and checkpoints cost an island",
    "some minutes",
  ),
  "fragments": (
    "a billion parameters, from publication to adoption",
    "two minutes, 11 GB of memory and 10 GB of disk",
  ),
  "balance": (
    "how even fragments of few large tensors are",
    "12 s of processor time and 2.8 GB of memory",
  ),
  "codec": (
    "speed and bytes of every codec",
    "half a minute and 1 GB of memory",
  ),
  "study": (
    "what a token costs in virtual time, over the bare loop",
    "two minutes of processor time and 0.6 GB of memory",
  ),
  "evaluator": (
    "step rate of an island beside an evaluator",
    "90 s of processor time",
  ),
}

AHEAD: tuple[entry.Command, ...] = (
  entry.Command(
    name="simulate",
    what="what a fleet delivers under failures",
    run="diloco.planning.fleet.command:main",
    parser="diloco.planning.fleet.flags:parser",
  ),
  entry.Command(
    name="simulate --bandwidth",
    what="what the links between sites must deliver",
    run="diloco.planning.bandwidth.command:main",
    parser="diloco.planning.bandwidth.command:parser",
  ),
  entry.Command(
    name="simulate --calibrate",
    what="fit the simulator's unpublished times",
    run="experiments.benchmarks.calibrate:main",
    parser="experiments.benchmarks.calibrate:parser",
  ),
  entry.Command(
    name="plan",
    what="propose a configuration for a fleet, or say what does not fit",
    run="diloco.planning.planner.command:main",
    parser="diloco.planning.planner.command:parser",
  ),
)

CHECK: tuple[entry.Command, ...] = (
  entry.Command(
    name="doctor",
    what="test what a run will stand on: machine, packages, store",
    run="diloco.workbench.doctor:main",
    examples=(
      "diloco doctor --quick",
      "diloco doctor --config=experiments/configs/quickstart.py:smoke",
    ),
    flags=(
      entry.flag(
        "--store=PLACE", "directory or URL where runs will be", default="."
      ),
      entry.flag("--config=FILE.py[:VARIANT]", "of the run to come"),
      entry.flag("--fleet=FILE.py", "whose links to compare with"),
      entry.flag(
        "--params=N",
        "of the model, where --config does not say",
        type=arguments.number(1),
      ),
      entry.flag(
        "--step_secs=N",
        "seconds of a step; default: the pace of --config, or measured",
        type=arguments.number(0, above=True),
      ),
      entry.flag("--quick", "try less of everything"),
    ),
    more="Works in a directory of its own below --store, which it removes. Exit"
    " code 1 if\nsomething will fail. Run it on each machine of a run.",
  ),
  entry.Command(
    name="replay",
    what="do a run again from its tape; compare every version by bits",
    run="diloco.cli:replay",
    examples=(
      "diloco replay runs/quickstart",
      "diloco replay runs/quickstart --until_version=3",
    ),
    flags=(
      entry.RUN,
      entry.flag("--until_version=V", "leave out later versions", type=int),
      entry.TASK,
    ),
  ),
  entry.Command(
    name="chaos",
    what="kill, stop and damage real runs, then check their books",
    run="diloco.cli:chaos",
    examples=(
      "diloco chaos --workdir=runs/chaos --trials=12 --seed=1",
      "diloco chaos --workdir=runs/chaos --engine=ray --kinds=sigkill",
    ),
    flags=(
      entry.flag(
        "--workdir=DIR",
        "where its runs go; new, or its own",
        type=pathlib.Path,
        required=True,
      ),
      entry.flag(
        "--trials=N", "faults in all", type=arguments.whole(1), default=40
      ),
      entry.flag("--seed=N", "of the plan", type=int, default=0),
      entry.flag("--kinds=A,B", "of faults; default: all"),
      entry.flag(
        "--faults_per_run=N",
        "faults in one run, before the next one begins",
        type=arguments.whole(1),
        default=12,
      ),
      entry.flag(
        "--engine=E",
        "process, or ray on a cluster of this machine's; default: process",
        choices=("process", "ray"),
        default="process",
      ),
    ),
  ),
  entry.Command(
    name="simulate-protocol",
    what="run the protocol under faults in a simulated world, many times",
    run="diloco.cli:simulate_protocol",
    examples=(
      "diloco simulate-protocol --schedules=200",
      "diloco simulate-protocol --seed=7 --trace",
    ),
    flags=(
      entry.flag("--seed=N", "the first seed", type=int, default=0),
      entry.flag("--schedules=N", "how many seeds", type=int, default=1000),
      entry.flag(
        "--schedule=JSON", "one schedule, as printed for a failure", default=""
      ),
      entry.flag("--trace", "show what happens in one schedule"),
      entry.flag(
        "--jobs=N", "processes", type=int, default=os.cpu_count() or 1
      ),
      entry.flag("--no-shrink", "leave a failure as it was found"),
    ),
  ),
)

MEASURE: tuple[entry.Command, ...] = (
  entry.Command(
    name="bench",
    what="measure a part against a reference in the same run",
    run="diloco.cli:bench",
    examples=("diloco bench merge", "diloco bench island --json"),
    flags=(entry.flag("part", "what to measure", choices=tuple(_BENCHES)),),
    more="'diloco bench PART --help' says what it costs.",
  ),
  *(
    entry.Command(
      name=f"bench {part}",
      what=what,
      run="diloco.cli:bench",
      examples=(f"diloco bench {part} --json > {part}.json",),
      flags=(entry.flag("part", argparse.SUPPRESS, choices=(part,)),),
      more=f"Takes about {cost}, at the size of docs/results.md.",
    )
    for part, (what, cost) in _BENCHES.items()
  ),
)

SHELL: tuple[entry.Command, ...] = (
  entry.Command(
    name="completion",
    what="print what makes a shell complete these commands",
    run="diloco.cli:completion",
    examples=(
      "source <(diloco completion bash)",
      "diloco completion zsh > ~/.diloco.zsh",
    ),
    flags=(entry.flag("shell", "which one", choices=("bash", "zsh")),),
    more="Put the line into ~/.bashrc or ~/.zshrc.",
  ),
)
