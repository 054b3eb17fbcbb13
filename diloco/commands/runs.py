"""Commands that begin a run, look at one, or take something away from it."""

import pathlib

from diloco import arguments
from diloco.commands import entry

TRAIN: tuple[entry.Command, ...] = (
  entry.Command(
    name="train",
    what="train, or go on with the run in a directory",
    run="diloco.launch:main",
    raw=True,
    examples=(
      "diloco train --config=experiments/configs/quickstart.py:smoke"
      " --workdir=runs/smoke",
      "diloco train --config=experiments/configs/quickstart.py"
      " --workdir=runs/two --config.seed=1 --config.sync.quorum=2",
    ),
    flags=(
      entry.flag(
        "--config=FILE.py[:VARIANT]",
        "a file with get_config() or get_config(variant)",
      ),
      entry.flag("--workdir=DIR", "directory of the run"),
      entry.FIELD,
      entry.flag("--quiet", "show no live view"),
    ),
    more="A first Ctrl-C drains and saves, a second one kills. The same command"
    " goes on\nwith the run.",
  ),
  entry.Command(
    name="resume",
    what="go on with the run in a directory, with its own configuration",
    run="diloco.cli:resume",
    more="A run may get other total_tokens, programs, controller, faults and"
    " ray_address,\nand what 'diloco change' may change; these are kept in its"
    " config.json and told\non its tape. On any machine it goes on by its"
    " store's URL, once nothing of it is\nalive; one that did not end in order"
    " goes back to its last cut.",
    examples=(
      "diloco resume runs/quickstart",
      "diloco resume runs/quickstart --cut=last",
      "diloco resume runs/quickstart --config.total_tokens=4.8M",
      "diloco resume s3://bucket/prefix --workdir=runs/again",
    ),
    flags=(
      entry.flag(
        "dir=RUN",
        "directory of a run, or the URL of its config.store",
        type=entry.there,
      ),
      entry.flag(
        "--workdir=NEW",
        "a new directory, in which the run at a URL goes on wherever it"
        " was begun",
        type=pathlib.Path,
      ),
      entry.FIELD,
      entry.flag("--cut=N", "set the run back to cut N, or to the 'last' one"),
      entry.TASK,
      entry.flag("--quiet", "show no live view"),
    ),
  ),
  entry.Command(
    name="sweep",
    what="do all points of a sweep file, once each and in parallel",
    run="diloco.workbench.sweep:run",
    examples=(
      "diloco sweep --sweep=experiments/sweeps/quorum.py --workdir=runs/quorum",
      "diloco sweep --workdir=runs/quorum --retry",
      "diloco sweep --sweep=experiments/sweeps/quorum.py --workdir=runs/quorum"
      " --ray=auto",
      "diloco sweep --sweep=experiments/studies/islands.py --workdir=runs/m"
      " --only='*seed-1.*'",
    ),
    flags=(
      entry.flag(
        "--sweep=FILE.py[:VARIANT]",
        "a file with get_sweep(); not needed to go on",
      ),
      entry.flag(
        "--workdir=DIR",
        "of the sweep; each point has a directory in it",
        type=pathlib.Path,
        required=True,
      ),
      entry.flag(
        "--cores=N",
        "to use at most, one for each island; default: all",
        type=int,
      ),
      entry.flag(
        "--ray=HOST:PORT",
        "do the points on the nodes of this Ray cluster, all of which see"
        " DIR; 'auto' finds the one that this machine is a node of",
      ),
      entry.flag(
        "--only=PATTERN",
        "begin those points whose names it fits, in which * is any text;"
        " others wait",
      ),
      entry.flag("--retry", "do what failed again, and no more"),
      entry.flag("--yes", "even more than 200 points"),
    ),
    more="Points are frozen when a sweep starts. Ctrl-C saves and stops; the"
    " same command\ngoes on. A point's run is an ordinary one, for every other"
    " command.",
  ),
  entry.Command(
    name="change",
    what="change settings of a run that is on",
    run="diloco.cli:change",
    more="These may change: --config.sync.quorum, --config.sync.grace,"
    " --config.sync.every,\n--config.sync.grace_gamma,"
    " --config.outer.learning_rate. Islands follow after the\ntrain windows"
    " they have queued.",
    examples=("diloco change runs/quickstart --config.sync.quorum=2",),
    flags=(entry.DIR, entry.FIELD),
  ),
  entry.Command(
    name="cut",
    what="take a consistent checkpoint of a run that is on",
    run="diloco.cli:cut",
    examples=("diloco cut runs/quickstart",),
    flags=(entry.DIR,),
  ),
)

LOOK: tuple[entry.Command, ...] = (
  entry.Command(
    name="ls",
    what="list the runs below a directory, with state and result",
    run="diloco.cli:ls",
    examples=("diloco ls", "diloco ls runs --json"),
    flags=(
      entry.flag(
        "dir",
        "where to look, or the URL of a run's config.store",
        nargs="?",
        type=entry.anywhere,
        default=pathlib.Path("runs"),
      ),
    ),
  ),
  entry.Command(
    name="status",
    what="show a live or dead run",
    run="diloco.cli:status",
    examples=(
      "diloco status runs/quickstart --watch",
      "diloco status s3://bucket/runs/quickstart --json",
    ),
    flags=(entry.RUN, entry.flag("--watch", "until Ctrl-C")),
  ),
  entry.Command(
    name="report",
    what="make a run's summary.json and report.html again",
    run="diloco.cli:report",
    examples=("diloco report runs/quickstart",),
    flags=(entry.RUN,),
  ),
  entry.Command(
    name="compare",
    what="runs against each other: what differs, and what came out",
    run="diloco.workbench.compare_command:run",
    examples=(
      "diloco compare runs/quorum --html=quorum.html",
      "diloco compare runs/quickstart runs/alone --json",
    ),
    flags=(
      entry.flag(
        "dirs=RUN",
        "directory of a run, a sweep or above runs, or URL of a config.store",
        nargs="+",
        type=entry.anywhere,
      ),
      entry.flag(
        "--html=FILE",
        "write one page too, with curves; it needs no network",
        type=pathlib.Path,
      ),
    ),
    more="Runs that differ in the seed alone are one group.",
  ),
  entry.Command(
    name="explain",
    what="tell why a round closed when it did",
    run="diloco.cli:explain",
    examples=("diloco explain runs/quickstart --fragment=3 --version=7",),
    flags=(
      entry.RUN,
      entry.flag(
        "--fragment=P",
        "number of the fragment, from 0",
        type=int,
        required=True,
      ),
      entry.flag(
        "--version=V",
        "global version that the round made, from 1",
        type=int,
        required=True,
      ),
    ),
  ),
)

AWAY: tuple[entry.Command, ...] = (
  entry.Command(
    name="export",
    what="write a run's global parameters as a file for other programs",
    run="diloco.cli:export",
    examples=(
      "diloco export runs/quickstart --format=safetensors"
      " --out=quickstart.safetensors",
      "diloco export runs/quickstart --format=orbax --cut=3 --out=quickstart",
    ),
    flags=(
      entry.RUN,
      entry.flag(
        "--format",
        "of what is written",
        choices=("safetensors", "orbax", "npz"),
        required=True,
      ),
      entry.flag(
        "--out=PATH",
        "file to make, or directory with orbax; nothing is overwritten",
        type=pathlib.Path,
        required=True,
      ),
      *entry.WHICH,
    ),
  ),
  entry.Command(
    name="sample",
    what="let a run's global parameters go on with a text",
    run="diloco.cli:sample",
    examples=(
      "diloco sample runs/quickstart --prompt='def main('",
      "diloco sample runs/quickstart --prompt='import ' --temperature=0",
    ),
    flags=(
      entry.RUN,
      entry.flag("--prompt=TEXT", "what to go on with", default=""),
      entry.flag(
        "--tokens=N",
        "bytes to write at most",
        type=arguments.whole(1),
        default=200,
      ),
      entry.flag(
        "--temperature=N",
        "the higher, the bolder; 0 takes the likeliest byte",
        type=arguments.number(0),
        default=0.8,
      ),
      entry.flag(
        "--seed=N",
        "of the draws",
        type=arguments.whole(0, 2**32 - 1),
        default=0,
      ),
      *entry.WHICH,
      entry.TASK,
    ),
  ),
  entry.Command(
    name="evaluate",
    what="measure the held-out loss of a run's global parameters",
    run="diloco.cli:evaluate",
    examples=(
      "diloco evaluate runs/quickstart",
      "diloco evaluate runs/quickstart --version=7 --batches=16 --json",
    ),
    flags=(
      entry.RUN,
      entry.flag(
        "--batches=N",
        "held-out batches, the first ones; 0: those of the run's own last"
        " evaluation",
        type=arguments.whole(0),
        default=0,
      ),
      *entry.WHICH,
      entry.TASK,
    ),
  ),
  entry.Command(
    name="metrics",
    what="write what a run has logged for TensorBoard and others to show",
    run="diloco.workbench.metrics:main",
    examples=(
      "diloco metrics runs/quickstart --format=tensorboard",
      "diloco metrics runs/quickstart --format=openmetrics",
    ),
    flags=(
      entry.RUN,
      entry.flag(
        "--format",
        "of what is written",
        choices=("tensorboard", "parquet", "openmetrics", "wandb"),
        required=True,
      ),
      entry.flag(
        "--out=PATH",
        "directory to make, default: one in the run's, of the format's"
        " name; with openmetrics a file to replace, default: the terminal",
        type=pathlib.Path,
      ),
      entry.flag(
        "--follow=SECS",
        "go on until the run ends, every so many seconds (5)",
        type=arguments.number(0),
        nargs="?",
        const=5.0,
        default=0.0,
      ),
    ),
    more="It reads the run's files and disturbs nobody. A folder of wandb is"
    " uploaded\nwith 'wandb sync'.",
  ),
)
