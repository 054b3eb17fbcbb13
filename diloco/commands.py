"""What commands there are: the one table behind usage, help and completion.

It imports nothing that a command needs, so help comes at once. A new command is
one entry.
"""

import argparse
import importlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco import arguments, errors

# A flag: what `argparse` takes to add one.
Flag = tuple[tuple[str, ...], dict[str, Any]]


def flag(*names: str, **options: Any) -> Flag:
  """A flag or an argument, as `argparse.ArgumentParser.add_argument` has it."""
  return names, options


class Command(NamedTuple):
  """A command, or one of its modes, which a switch in the name chooses.

  Attributes:
    name: what is typed, such as "status" or "simulate --bandwidth".
    group: what a user wants, a key of `GROUPS`.
    what: one sentence, for usage and help.
    run: "module:function", from the parsed flags to the exit code.
    examples: whole command lines, which work when copied.
    flags: its flags.
    more: further help.
    parser: "module:function" that makes the parser, where `flags` cannot know
      it. Such a command parses for itself.
    raw: it is given its arguments as they are, and parses for itself.
  """

  name: str
  group: str
  what: str
  run: str
  examples: tuple[str, ...] = ()
  flags: tuple[Flag, ...] = ()
  more: str = ""
  parser: str = ""
  raw: bool = False

  def make_parser(self) -> arguments.Parser:
    """Returns the parser of its flags."""
    if self.parser:
      made: arguments.Parser = named(self.parser)()
      return made
    description = f"{self.what[0].upper()}{self.what[1:]}.\n\n{self.more}"
    made = arguments.Parser(
      f"diloco {self.name}", description.strip(), self.examples
    )
    for names, options in self.flags:
      made.add_argument(*names, **options)
    return made

  def call(self, argv: Sequence[str]) -> int:
    """Runs it; returns the exit code."""
    raw = self.raw or bool(self.parser)
    parsed = argparse.Namespace()
    if not raw or {"-h", "--help"} & set(argv):
      parser = self.make_parser()
      parsed, rest = parser.parse_known_args(list(argv))
      parsed.overrides = rest if _FIELD in self.flags else []
      if len(parsed.overrides) < len(rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
      for name, value in vars(parsed).items():
        if isinstance(value, list):
          setattr(parsed, name, [_followed(one) for one in value])
        else:
          setattr(parsed, name, _followed(value))
    code: int = named(self.run)(list(argv) if raw else parsed)
    return code


def named(place: str) -> Callable[..., Any]:
  """The function that "module:function" names."""
  module, _, function = place.partition(":")
  found: Callable[..., Any] = getattr(importlib.import_module(module), function)
  return found


def find(argv: Sequence[str]) -> Command:
  """The command, in the mode, that a command line asks for.

  Raises:
    UserError: there is none.
  """
  fitting = [
    command
    for command in TABLE
    if command.name.split()[0] == argv[0]
    and set(command.name.split()[1:]) <= set(argv)
  ]
  if not fitting:
    names = dict.fromkeys(command.name.split()[0] for command in TABLE)
    raise errors.UserError(
      f"diloco {argv[0]}",
      "there is no such command",
      f"choose one of {', '.join(names)}",
    )
  return max(fitting, key=lambda command: len(command.name))


def usage() -> str:
  """All commands, by what a user wants."""
  lines = ["usage: diloco COMMAND [ARGS]"]
  for group, title in GROUPS.items():
    mine = [command for command in TABLE if command.group == group]
    if mine:
      lines += ["", title]
      lines += [f"  {command.name:23} {command.what}" for command in mine]
  lines += ["", "'diloco COMMAND --help' tells more, with examples."]
  return "\n".join(lines) + "\n"


GROUPS = {
  "train": "Train",
  "look": "Look at runs",
  "away": "Take something away from a run",
  "ahead": "Look ahead before renting anything",
  "check": "Check",
  "measure": "Measure",
  "shell": "At the prompt",
}

CONFIG_FLAG = "--config.FIELD"  # stands for every field's
_FIELD = flag(
  CONFIG_FLAG,
  metavar="VALUE",
  help="sets one field, whether the file does or not; docs/glossary.md lists"
  " them",
)


def _here(text: str) -> pathlib.Path:
  """A directory of this machine, for what acts on a run and does not only look.

  Raises:
    ArgumentTypeError: it is a URL.
  """
  if "://" in text:
    raise argparse.ArgumentTypeError(
      f"{text!r} is the URL of a store; only the directory will do where the"
      " run was begun"
    )
  return pathlib.Path(text)


def _there(text: str) -> pathlib.Path | str:
  """The directory of a run, or a URL as it is."""
  return text if "://" in text else pathlib.Path(text)


class _Url(str):
  """Of a run's store, where a directory will do as well."""


def _anywhere(text: str) -> pathlib.Path | _Url:
  """The directory of a run, or a URL that `Command.call` follows."""
  return _Url(text) if "://" in text else pathlib.Path(text)


def _followed(value: Any) -> Any:
  """What was given; in place of a run's URL a directory with its files."""
  if not isinstance(value, _Url):
    return value
  from diloco import logbook  # and TensorStore with it

  return logbook.fetch(value)


_DIR = flag("dir", type=_here, help="directory of a run")
_RUN = flag(
  "dir",
  metavar="RUN",
  type=_anywhere,
  help="directory of a run, or the URL of its config.store",
)
_TASK = flag(
  "--task",
  metavar="NAME",
  help="the task of a run from elsewhere, if you trust its module",
)

_WHICH = (
  flag(
    "--version",
    type=int,
    metavar="V",
    help="global version of every fragment; default: the newest of each",
  ),
  flag("--cut", type=int, metavar="N", help="take those of cut N"),
)

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

TABLE: tuple[Command, ...] = (
  Command(
    name="train",
    group="train",
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
      flag(
        "--config",
        metavar="FILE.py[:VARIANT]",
        help="a file with get_config() or get_config(variant)",
      ),
      flag("--workdir", metavar="DIR", help="directory of the run"),
      _FIELD,
      flag("--quiet", action="store_true", help="show no live view"),
    ),
    more="A first Ctrl-C drains and saves, a second one kills. The same command"
    " goes on\nwith the run.",
  ),
  Command(
    name="resume",
    group="train",
    what="go on with the run in a directory, with its own configuration",
    run="diloco.cli:resume",
    more="A run may get other total_tokens, programs, controller and faults;"
    " these are\nkept in its config.json and told on its tape. By its store's"
    " URL a run goes on\non any machine, once nothing of it is alive; one that"
    " did not end in order goes\nback to its last cut.",
    examples=(
      "diloco resume runs/quickstart",
      "diloco resume runs/quickstart --cut=last",
      "diloco resume runs/quickstart --config.total_tokens=4.8M",
      "diloco resume s3://bucket/prefix --workdir=runs/again",
    ),
    flags=(
      flag(
        "dir",
        metavar="RUN",
        type=_there,
        help="directory of a run, or the URL of its config.store",
      ),
      flag(
        "--workdir",
        type=pathlib.Path,
        metavar="NEW",
        help="a new directory, in which the run at a URL goes on wherever it"
        " was begun",
      ),
      _FIELD,
      flag(
        "--cut",
        metavar="N",
        help="set the run back to cut N, or to the 'last' one",
      ),
      _TASK,
    ),
  ),
  Command(
    name="sweep",
    group="train",
    what="do all points of a sweep file, once each and in parallel",
    run="diloco.workbench.sweep:run",
    examples=(
      "diloco sweep --sweep=experiments/sweeps/quorum.py --workdir=runs/quorum",
      "diloco sweep --workdir=runs/quorum --retry",
      "diloco sweep --sweep=experiments/sweeps/quorum.py --workdir=runs/quorum"
      " --ray=auto",
    ),
    flags=(
      flag(
        "--sweep",
        metavar="FILE.py[:VARIANT]",
        help="a file with get_sweep(); not needed to go on",
      ),
      flag(
        "--workdir",
        type=pathlib.Path,
        required=True,
        metavar="DIR",
        help="of the sweep; each point has a directory in it",
      ),
      flag(
        "--cores",
        type=int,
        metavar="N",
        help="to use at most, one for each island; default: all",
      ),
      flag(
        "--ray",
        metavar="HOST:PORT",
        help="do the points on the nodes of this Ray cluster, all of which see"
        " DIR; 'auto' finds the one that this machine is a node of",
      ),
      flag(
        "--retry", action="store_true", help="do what failed again, and no more"
      ),
      flag("--yes", action="store_true", help="even more than 200 points"),
    ),
    more="Points are frozen when a sweep starts. Ctrl-C saves and stops; the"
    " same command\ngoes on. A point's run is an ordinary one, for every other"
    " command.",
  ),
  Command(
    name="change",
    group="train",
    what="change settings of a run that is on",
    run="diloco.cli:change",
    more="These may change: --config.sync.quorum, --config.sync.grace,"
    " --config.sync.every,\n--config.sync.grace_gamma,"
    " --config.outer.learning_rate. Islands follow after the\ntrain windows"
    " they have queued.",
    examples=("diloco change runs/quickstart --config.sync.quorum=2",),
    flags=(_DIR, _FIELD),
  ),
  Command(
    name="cut",
    group="train",
    what="take a consistent checkpoint of a run that is on",
    run="diloco.cli:cut",
    examples=("diloco cut runs/quickstart",),
    flags=(_DIR,),
  ),
  Command(
    name="ls",
    group="look",
    what="list the runs below a directory, with state and result",
    run="diloco.cli:ls",
    examples=("diloco ls", "diloco ls runs --json"),
    flags=(
      flag(
        "dir",
        nargs="?",
        type=pathlib.Path,
        default=pathlib.Path("runs"),
        help="where to look",
      ),
    ),
  ),
  Command(
    name="status",
    group="look",
    what="show a live or dead run",
    run="diloco.cli:status",
    examples=(
      "diloco status runs/quickstart --watch",
      "diloco status s3://bucket/runs/quickstart --json",
    ),
    flags=(
      _RUN,
      flag("--watch", action="store_true", help="until Ctrl-C"),
    ),
  ),
  Command(
    name="report",
    group="look",
    what="make a run's summary.json and report.html again",
    run="diloco.cli:report",
    examples=("diloco report runs/quickstart",),
    flags=(_RUN,),
  ),
  Command(
    name="compare",
    group="look",
    what="runs against each other: what differs, and what came out",
    run="diloco.workbench.compare_command:run",
    examples=(
      "diloco compare runs/quorum --html=quorum.html",
      "diloco compare runs/quickstart runs/alone --json",
    ),
    flags=(
      flag(
        "dirs",
        metavar="RUN",
        nargs="+",
        type=_anywhere,
        help="directory of a run or a sweep, or URL of a run's config.store",
      ),
      flag(
        "--html",
        metavar="FILE",
        type=pathlib.Path,
        help="write one page too, with curves; it needs no network",
      ),
    ),
    more="Runs that differ in the seed alone are one group.",
  ),
  Command(
    name="explain",
    group="look",
    what="tell why a round closed when it did",
    run="diloco.cli:explain",
    examples=("diloco explain runs/quickstart --fragment=3 --version=7",),
    flags=(
      _RUN,
      flag(
        "--fragment",
        type=int,
        required=True,
        metavar="P",
        help="number of the fragment, from 0",
      ),
      flag(
        "--version",
        type=int,
        required=True,
        metavar="V",
        help="global version that the round made, from 1",
      ),
    ),
  ),
  Command(
    name="export",
    group="away",
    what="write a run's global parameters as a file for other programs",
    run="diloco.cli:export",
    examples=(
      "diloco export runs/quickstart --format=safetensors"
      " --out=quickstart.safetensors",
      "diloco export runs/quickstart --format=orbax --cut=3 --out=quickstart",
    ),
    flags=(
      _RUN,
      flag(
        "--format",
        choices=("safetensors", "orbax", "npz"),
        required=True,
        help="of what is written",
      ),
      flag(
        "--out",
        type=pathlib.Path,
        required=True,
        metavar="PATH",
        help="file to make, or directory with orbax; nothing is overwritten",
      ),
      *_WHICH,
    ),
  ),
  Command(
    name="sample",
    group="away",
    what="let a run's global parameters go on with a text",
    run="diloco.cli:sample",
    examples=(
      "diloco sample runs/quickstart --prompt='def main('",
      "diloco sample runs/quickstart --prompt='import ' --temperature=0",
    ),
    flags=(
      _RUN,
      flag("--prompt", default="", metavar="TEXT", help="what to go on with"),
      flag(
        "--tokens",
        type=arguments.whole(1),
        default=200,
        help="bytes to write at most",
      ),
      flag(
        "--temperature",
        type=arguments.number(0),
        default=0.8,
        help="the higher, the bolder; 0 takes the likeliest byte",
      ),
      flag("--seed", type=arguments.whole(0), default=0, help="of the draws"),
      *_WHICH,
      _TASK,
    ),
  ),
  Command(
    name="evaluate",
    group="away",
    what="measure the held-out loss of a run's global parameters",
    run="diloco.cli:evaluate",
    examples=(
      "diloco evaluate runs/quickstart",
      "diloco evaluate runs/quickstart --version=7 --batches=16 --json",
    ),
    flags=(
      _RUN,
      flag(
        "--batches",
        type=arguments.whole(0),
        default=0,
        help="held-out batches, the first ones; 0: those of the run's own last"
        " evaluation",
      ),
      *_WHICH,
      _TASK,
    ),
  ),
  Command(
    name="metrics",
    group="away",
    what="write what a run has logged for TensorBoard and others to show",
    run="diloco.workbench.metrics:main",
    examples=(
      "diloco metrics runs/quickstart --format=tensorboard",
      "diloco metrics runs/quickstart --format=openmetrics",
    ),
    flags=(
      _RUN,
      flag(
        "--format",
        choices=("tensorboard", "parquet", "openmetrics", "wandb"),
        required=True,
        help="of what is written",
      ),
      flag(
        "--out",
        type=pathlib.Path,
        metavar="PATH",
        help="directory to make, default: one in the run's, of the format's"
        " name; with openmetrics a file to replace, default: the terminal",
      ),
      flag(
        "--follow",
        type=arguments.number(0),
        nargs="?",
        const=5.0,
        default=0.0,
        metavar="SECS",
        help="go on until the run ends, every so many seconds (5)",
      ),
    ),
    more="It reads the run's files and disturbs nobody. A folder of wandb is"
    " uploaded\nwith 'wandb sync'.",
  ),
  Command(
    name="simulate",
    group="ahead",
    what="what a fleet delivers under failures",
    run="diloco.planning.fleet.command:main",
    parser="diloco.planning.fleet.flags:parser",
  ),
  Command(
    name="simulate --bandwidth",
    group="ahead",
    what="what the links between sites must deliver",
    run="diloco.planning.bandwidth.command:main",
    parser="diloco.planning.bandwidth.command:parser",
  ),
  Command(
    name="simulate --calibrate",
    group="ahead",
    what="fit the simulator's unpublished times",
    run="diloco.planning.fleet.calibrate:main",
    parser="diloco.planning.fleet.calibrate:parser",
  ),
  Command(
    name="plan",
    group="ahead",
    what="propose a configuration for a fleet, or say what does not fit",
    run="diloco.planning.planner.command:main",
    parser="diloco.planning.planner.command:parser",
  ),
  Command(
    name="doctor",
    group="check",
    what="test what a run will stand on: machine, packages, store",
    run="diloco.workbench.doctor:main",
    examples=(
      "diloco doctor --quick",
      "diloco doctor --config=experiments/configs/quickstart.py:smoke",
    ),
    flags=(
      flag(
        "--store",
        default=".",
        metavar="PLACE",
        help="directory or URL where runs will be",
      ),
      flag("--config", metavar="FILE.py[:VARIANT]", help="of the run to come"),
      flag("--fleet", metavar="FILE.py", help="whose links to compare with"),
      flag(
        "--params",
        type=arguments.number(1),
        help="of the model, where --config does not say",
      ),
      flag(
        "--step_secs",
        type=arguments.number(0, above=True),
        help="seconds of a step; default: the pace of --config, or measured",
      ),
      flag("--quick", action="store_true", help="try less of everything"),
    ),
    more="Works in a directory of its own below --store, which it removes. Exit"
    " code 1 if\nsomething will fail. Run it on each machine of a run.",
  ),
  Command(
    name="replay",
    group="check",
    what="do a run again from its tape; compare every version by bits",
    run="diloco.cli:replay",
    examples=(
      "diloco replay runs/quickstart",
      "diloco replay runs/quickstart --until_version=3",
    ),
    flags=(
      _RUN,
      flag(
        "--until_version",
        type=int,
        metavar="V",
        help="leave out later versions",
      ),
      _TASK,
    ),
  ),
  Command(
    name="chaos",
    group="check",
    what="kill, stop and damage real runs, then check their books",
    run="diloco.cli:chaos",
    examples=("diloco chaos --workdir=runs/chaos --trials=12 --seed=1",),
    flags=(
      flag(
        "--workdir",
        type=pathlib.Path,
        required=True,
        metavar="DIR",
        help="where its runs go; new, or its own",
      ),
      flag("--trials", type=int, default=40, help="faults in all"),
      flag("--seed", type=int, default=0, help="of the plan"),
      flag("--kinds", metavar="A,B", help="of faults; default: all"),
      flag(
        "--faults_per_run",
        type=int,
        default=12,
        help="faults in one run, before the next one begins",
      ),
    ),
  ),
  Command(
    name="simulate-protocol",
    group="check",
    what="run the protocol under faults in a simulated world, many times",
    run="diloco.cli:simulate_protocol",
    examples=(
      "diloco simulate-protocol --schedules=200",
      "diloco simulate-protocol --seed=7 --trace",
    ),
    flags=(
      flag("--seed", type=int, default=0, help="the first seed"),
      flag(
        "--schedules",
        type=int,
        default=0,
        help="how many seeds; default 1000",
      ),
      flag(
        "--schedule",
        default="",
        metavar="JSON",
        help="one schedule, as printed for a failure",
      ),
      flag(
        "--trace", action="store_true", help="show what happens in one schedule"
      ),
      flag(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="processes",
      ),
      flag(
        "--no-shrink",
        action="store_true",
        help="leave a failure as it was found",
      ),
    ),
  ),
  Command(
    name="bench",
    group="measure",
    what="measure a part against a reference in the same run",
    run="diloco.cli:bench",
    examples=("diloco bench merge", "diloco bench island --json"),
    flags=(flag("part", choices=tuple(_BENCHES), help="what to measure"),),
    more="'diloco bench PART --help' says what it costs.",
  ),
  *(
    Command(
      name=f"bench {part}",
      group="measure",
      what=what,
      run="diloco.cli:bench",
      examples=(f"diloco bench {part} --json > {part}.json",),
      flags=(flag("part", choices=(part,), help=argparse.SUPPRESS),),
      more=f"Takes about {cost}, at the size of docs/results.md.",
    )
    for part, (what, cost) in _BENCHES.items()
  ),
  Command(
    name="completion",
    group="shell",
    what="print what makes a shell complete these commands",
    run="diloco.cli:completion",
    examples=(
      "source <(diloco completion bash)",
      "diloco completion zsh > ~/.diloco.zsh",
    ),
    flags=(flag("shell", choices=("bash", "zsh"), help="which one"),),
    more="Put the line into ~/.bashrc or ~/.zshrc.",
  ),
)
