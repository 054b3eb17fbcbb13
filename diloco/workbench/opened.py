"""A run opened by its directory, whatever became of it: `diloco.Run`.

Nothing is read before it is asked for, nothing is kept, and a run that is on
gives what it has by now. JAX is not needed, pandas only for tables.
"""

import html
import json
import os
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco import errors, logbook, process
from diloco.report import (
  explain_text,
  figures,
  liveness,
  status,
  summary,
)
from diloco.snapshots import portable, store
from diloco.snapshots import versions as versions_lib
from diloco.tape import events, explain, reader, schema

if TYPE_CHECKING:
  import ml_collections
  import pandas as pd

KINDS = frozenset(v for name, v in vars(events).items() if name.isupper())


class Run:
  """One run.

  Attributes:
    dir: its directory.
    settings: its configuration as frozen dataclasses.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Opens a run; nothing in its directory is changed by that.

    Args:
      path: its directory, or the URL of its `config.store`. What is in the
        store by now is brought into this machine's cache then; a run that is on
        gives news when it is opened again.

    Raises:
      UserError: it holds no run, or one of another version.
    """
    self.dir = logbook.local(path).absolute()
    self.settings = process.read_config(self.dir)

  @property
  def name(self) -> str:
    """The run's name and its directory's."""
    return f"{self.settings.name} ({self.dir.resolve().name})"

  @property
  def config(self) -> "ml_collections.ConfigDict":
    """A copy of the whole configuration, such as to start another run from."""
    import ml_collections

    return ml_collections.ConfigDict(self.settings.to_dict())

  @property
  def state(self) -> str:
    """`running`, `finished`, `stopped`, `failed`, `killed` or `crashed`."""
    return str(status.status(self.dir)["status"])

  @property
  def summary(self) -> dict[str, Any]:
    """The figures of `summary.json`, as of now."""
    return self._written() or summary.summarise(self.dir)

  def _written(self) -> dict[str, Any] | None:
    """What is in summary.json, if nothing has been written since."""
    path = self.dir / summary.FILE_NAME
    lines = [*self.dir.glob("tape/*.jsonl"), *self.dir.glob("metrics/*.jsonl")]
    try:
      written = path.stat().st_mtime
      if liveness.controller_alive(self.dir) or any(
        one.stat().st_mtime > written for one in lines
      ):
        return None
      found = json.loads(path.read_text())
    except process.UNREADABLE:
      return None
    return found if isinstance(found, dict) and "status" in found else None

  def metrics(self) -> "pd.DataFrame":
    """Every inner step of every island: loss, norms, times, task scalars.

    Raises:
      UserError: pandas is not installed.
    """
    logs = reader.stream(self.dir).metrics
    rows = (
      {"island": island, **flat(line)}
      for island, lines in sorted(logs.items())
      for line in lines
    )
    return _table(rows, ("island", *schema.METRICS))

  def tape(self, kind: str | None = None) -> "pd.DataFrame":
    """The tape, in the order of wall time.

    Args:
      kind: only events of this name, such as `merged`; see `docs/tape.md`.

    Raises:
      UserError: there is no such event, or pandas is not installed.
    """
    if kind is not None and kind not in KINDS:
      raise errors.UserError(
        f"tape({kind!r})",
        "there is no such event",
        f"name one of {', '.join(sorted(KINDS))}",
      )
    rows = self._events(KINDS if kind is None else {kind})
    return _table(rows, ("event", "role", "incarnation", "wall_secs"))

  def _events(self, kinds: Collection[str]) -> Iterator[reader.Line]:
    return reader.select(reader.stream(self.dir).events, kinds)

  def versions(self) -> list[int]:
    """Global versions that `params` can give; older ones are deleted.

    Raises:
      UserError: the run has no parameters yet.
    """
    return self._store().listed()

  def cuts(self) -> list[int]:
    """Complete cuts that `params` can give.

    Raises:
      UserError: the run has no parameters yet.
    """
    return self._store().cuts()

  def params(
    self, version: int | None = None, cut: int | None = None
  ) -> dict[str, Any]:
    """Global parameters as nested dicts of numpy arrays, float32.

    Args:
      version: one of `versions`; None for the newest of each fragment.
      cut: one of `cuts`, whose parameters are of one moment.

    Raises:
      UserError: there is no such version or cut, or no longer.
      CorruptSnapshotError: it is damaged.
    """
    return portable.nested(self.values(version, cut).params)

  def values(
    self, version: int | None = None, cut: int | None = None
  ) -> versions_lib.Values:
    """As `params`, by '/'-joined names, with the fragments' versions."""
    if version is not None and cut is not None:
      raise errors.UserError(
        f"version {version} and cut {cut}",
        "they exclude each other",
        "name one",
      )
    return self._store().read(version, cut)

  def merged_tokens(self, of: Collection[int]) -> int:
    """Tokens that versions contain, a mean over fragments.

    Args:
      of: [P], the version of each fragment.
    """
    merged: dict[tuple[int, int], int] = {}
    back: dict[tuple[int, int], int] = {}
    for line in self._events({events.MERGED, events.RESTORED}):
      if line["event"] == events.MERGED:
        tokens = sum(c.get("c_tokens") or 0 for c in line["contributions"])
        merged[line["fragment"], line["version"]] = tokens
      else:
        pairs = zip(line["version_from"], line["version_to"], strict=True)
        back |= {(p, new): old for p, (old, new) in enumerate(pairs)}
    total = 0
    for fragment, version in enumerate(of):
      while version > 0:
        total += merged.get((fragment, version), 0)
        version = back.get((fragment, version), version - 1)
    return total // max(1, len(of))

  def explain(self, fragment: int, version: int) -> str:
    """Tells why a round closed when it did, and with whom.

    Raises:
      UserError: the tape has no such round, or is damaged.
    """
    errors.require(
      hasattr(fragment, "__index__") and hasattr(version, "__index__"),
      f"explain({fragment!r}, {version!r})",
      "fragments and versions are integers",
      "name a fragment and a version of it, such as explain(0, 1)",
    )
    record = reader.read(self.dir, strict=True)
    facts = explain.explain(record, fragment, version)
    return explain_text.render(facts, self.settings.sync)

  def report(self, out: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Makes the run's report, one HTML file that needs nothing else.

    Args:
      out: where to; None for `report.html` in the run directory.

    Returns:
      Its path.
    """
    # It draws, and whoever only asks for figures should not load that.
    from diloco.report import html as report_html

    if out is None:
      with process.private_files():
        return report_html.write_report(self.dir)
    path = pathlib.Path(out)
    text = report_html.render(summary.load(self.dir), self.dir.resolve().name)
    summary.replace(path, text)
    return path

  def _store(self) -> versions_lib.Versions:
    return versions_lib.Versions(
      store.SnapshotStore(process.store_url(self.dir)), self._digest
    )

  def _digest(self, fragment: int, version: int) -> str:
    """What the tape says of a version's values."""
    for line in self._events({events.MERGED, events.STARTED}):
      if line["event"] == events.STARTED:
        bases = zip(
          line.get("base_versions") or (),
          line.get("base_digests") or (),
          strict=False,
        )
        for number, (held, told) in enumerate(bases):
          if (number, held) == (fragment, version):
            return str(told)
      elif (line["fragment"], line["version"]) == (fragment, version):
        return str(line.get("digest") or "")
    return ""

  def _shown(self, now: Mapping[str, Any]) -> "Shown":
    bits, progress = now["eval_bits_per_token"], now["progress"]
    unit = f"bits/{now['token_unit']}"
    facts = {
      "run": self.name,
      "state": now["status"],
      "task": self.settings.task.name,
      "islands": str(self.settings.fleet.islands),
      "tokens": figures.count(now["tokens"])
      + (f", {figures.percent(progress)} of the budget" if progress else ""),
      "merges": f"{now['merges']:,}",
      "held-out loss": "unknown" if bits is None else f"{bits:.4f} {unit}",
    }
    return Shown(facts)

  def __repr__(self) -> str:
    return repr(self._shown(status.status(self.dir)))

  def _repr_html_(self) -> str:
    return self._shown(status.status(self.dir))._repr_html_()

  def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
    """Both at once, for a notebook shows neither without the other."""
    shown = self._shown(status.status(self.dir))
    return {"text/plain": repr(shown), "text/html": shown._repr_html_()}


class Shown:
  """A run at one moment: a line, and in a notebook a table."""

  def __init__(self, facts: Mapping[str, str]):
    self._facts = facts

  def __repr__(self) -> str:
    facts = ", ".join(f"{k}: {v}" for k, v in self._facts.items())
    return f"<{facts}>"

  def _repr_html_(self) -> str:
    rows = "".join(
      f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>"
      for k, v in self._facts.items()
    )
    return f"<table>{rows}</table>"


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
  """A metric line in one level; the task's own scalars as `task/NAME`."""
  own = line.get("task") or {}
  rest = {name: value for name, value in line.items() if name != "task"}
  return rest | {f"task/{name}": value for name, value in own.items()}


def _table(
  rows: Iterable[Mapping[str, Any]], columns: Sequence[str]
) -> "pd.DataFrame":
  """A table; one without a row has these columns."""
  pandas = errors.needed("pandas", "a table of a run")
  found = list(rows)
  names = None if found else columns
  made: pd.DataFrame = pandas.DataFrame.from_records(found, columns=names)
  return made
