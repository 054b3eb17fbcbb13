"""The functions of `import diloco`: what the commands do, for Python.

They may be called from a script, which needs no `if __name__ == "__main__"`,
for islands are processes that start from nothing; and from a notebook.
"""

import html
import os
from collections.abc import Mapping
from typing import Any

from diloco import errors
from diloco.workbench import opened


class Facts(dict[str, Any]):
  """Results as plain JSON values, which show themselves as text."""

  def __init__(self, facts: Mapping[str, Any], text: str):
    super().__init__(facts)
    self._text = text.rstrip("\n")

  def __repr__(self) -> str:
    return self._text

  def _repr_html_(self) -> str:
    return f"<pre>{html.escape(self._text)}</pre>"


def train(
  config: str | os.PathLike[str] | Mapping[str, Any],
  workdir: str | os.PathLike[str],
  *,
  cut: str | int | None = None,
  quiet: bool = False,
) -> opened.Run:
  """Trains, or goes on with the run in a directory; returns when it has ended.

  A first interrupt drains and saves, and the run is `stopped`; a second one
  kills it. In virtual time, where nothing goes on, the first one does.

  Args:
    config: a configuration, such as a `ConfigDict`, or "FILE.py[:VARIANT]".
    workdir: directory of the run; made if it does not exist.
    cut: set the run back to this cut first, a number or "last".
    quiet: show nothing while it goes on.

  Returns:
    The run.

  Raises:
    UserError: configuration, machine or directory will not do. Nothing has
      been started or written then.
    FailedRunError: the run has failed. Its directory has what is left of it.
    KeyboardInterrupt: it was killed by an interrupt.
  """
  from diloco import launch, process
  from diloco import run as run_lib

  workdir = errors.directory("workdir", workdir)
  wanted = None if cut is None else str(cut)
  if wanted is not None:
    errors.require(
      wanted == "last" or wanted.isdecimal(),
      f"cut={cut!r}",
      "a cut is known by its number",
      "name one of Run.cuts(), or 'last'",
    )
    errors.require(
      process.holds_run(workdir),
      f"cut={cut!r}",
      f"{workdir} holds no run that could be set back",
      "leave it out, or name the directory of a run",
    )
  values: Mapping[str, Any] = (
    launch.load_config(config)
    if isinstance(config, str | os.PathLike)
    else config
  )
  result = run_lib.train(values, workdir, quiet=quiet, cut=wanted)
  if result.status == "failed":
    raise errors.FailedRunError(
      f"the run in {workdir} has failed: {result.summary['reason']}; see"
      f" {result.report}"
    )
  if result.status == "killed":
    raise KeyboardInterrupt
  return opened.Run(workdir)


def simulate(**settings: Any) -> Facts:
  """Simulates what a fleet delivers under failures.

  Args:
    **settings: flags of `diloco simulate` by name, such as `chips=1_200_000`,
      `islands=8`, `speeds=(1, 0.8)`, `elastic=False`.

  Returns:
    What `diloco simulate --json` prints.

  Raises:
    UserError: there is no such flag, or the fleet cannot be.
  """
  from diloco.planning.fleet import command, flags

  facts = command.simulate(flags.written(settings))
  return Facts(facts, command.text(facts))


def plan(
  fleet: str | os.PathLike[str], params: float | None = None, **settings: Any
) -> Facts:
  """Proposes a configuration for a fleet, or says what does not fit.

  Args:
    fleet: a file with get_fleet().
    params: parameters of the model; or give `config="FILE.py:VARIANT"`.
    **settings: further flags of `diloco plan` by name, such as `wan_gbps=3`.

  Returns:
    What `diloco plan --json` prints.

  Raises:
    UserError: there is no such flag, or nothing fits.
  """
  from diloco.planning.fleet import flags
  from diloco.planning.planner import command, text

  if params is not None:
    settings["params"] = params
  argv = flags.written({"fleet": os.fspath(fleet), **settings})
  facts = command.propose(command.parser().parse_args(argv))
  return Facts(facts, text.render(facts))
