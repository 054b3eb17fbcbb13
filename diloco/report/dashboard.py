"""A run's state on a terminal: a table of islands and a line on the whole."""

from collections.abc import Mapping
from typing import Any

from rich import box, console, measure, progress_bar, table, text

from diloco.report import figures

_STATE_STYLES = {
  "starting": "cyan",
  "training": "green",
  "dead": "bold red",
  "restarting": "yellow",
  "stopped": "dim",
  "done": "bold green",
}
# Nearly all of the time to an island's first step goes there.
STATE_WORDS = {"starting": "compiling"}
_BAR_WIDTH = 32
_WIDEST = 10_000  # columns of what is piped
_MAX_PROBLEMS = 3  # shown; all are in `status --json`


def render(
  status: Mapping[str, Any], name: str, hint: str = ""
) -> console.RenderableType:
  """Returns what rich can print; `hint` says what the user can do."""
  return console.Group(
    _islands(status, name),
    _progress(status),
    text.Text(" " + describe(status), style="dim"),
    *_quarantined(status),
    *_damage(status),
    *([text.Text(f" {hint}", style="dim")] if hint else []),
  )


def width(out: console.Console, picture: console.RenderableType) -> int:
  """Columns that a picture takes where no line of it is folded."""
  options = out.options.update(max_width=_WIDEST)
  return measure.Measurement.get(out, options, picture).maximum


def _islands(status: Mapping[str, Any], name: str) -> table.Table:
  title = f"{name}: {status['status']}"
  grid = table.Table(
    title=text.Text(title, style="bold"),
    box=box.SIMPLE_HEAD,
    pad_edge=False,
    padding=(0, 1, 0, 0),
  )
  for head in ("island", "state", "kind", "speed"):
    grid.add_column(head, no_wrap=True)
  bits = f"bits/{status['token_unit']}"
  for head in ("step", "tokens/s", bits, "stale", "restarts"):
    grid.add_column(head, justify="right", no_wrap=True)
  for number, island in status["islands"].items():
    state = island["state"]
    speed = figures.times(island["relative_speed"])
    grid.add_row(
      number,
      text.Text(
        STATE_WORDS.get(state, state), style=_STATE_STYLES.get(state, "")
      ),
      text.Text(island["kind"]),
      f"{speed} emulated" if island["paced"] else speed,
      f"{island['step']:,}",
      figures.count(island["tokens_per_sec"]),
      figures.number(figures.bits(island["loss"]), 4),
      figures.number(island["staleness_mean"], 2),
      str(island["restarts"]),
    )
  if not status["islands"]:
    grid.add_row(figures.DASH, text.Text("no island yet", style="dim"))
  return grid


def _progress(status: Mapping[str, Any]) -> console.RenderableType:
  if status["progress"] is None:
    return text.Text(f" {figures.count(status['tokens'])} tokens")
  done = round(status["progress"] * status["tokens_budget"])
  line = table.Table.grid(padding=(0, 1))
  line.add_row(
    "",
    progress_bar.ProgressBar(
      total=1.0, completed=min(status["progress"], 1.0), width=_BAR_WIDTH
    ),
    f"{figures.percent(status['progress'])}  {figures.count(done)} of"
    f" {figures.count(status['tokens_budget'])} tokens",
  )
  return line


def _damage(status: Mapping[str, Any]) -> list[text.Text]:
  lines = [*status["damaged"]]
  if lines:
    lines.append("stop and resume the run to set it back to its last cut")
  lines += [p for p in status["problems"][:_MAX_PROBLEMS] if p not in lines]
  return [text.Text(f" {line}", style="bold red") for line in lines]


def _quarantined(status: Mapping[str, Any]) -> list[text.Text]:
  lines = []
  for number, island in status["islands"].items():
    if island["quarantines"]:
      times = figures.how_many(island["quarantines"], "times")
      line = f" island {number}: quarantined {times}"
      if secs := island["suspended_secs"]:
        line += f", refused unseen for another {figures.secs(secs)}"
      lines.append(text.Text(line, style="yellow"))
  return lines


def describe(status: Mapping[str, Any]) -> str:
  """Returns one line on the run as a whole."""
  secs, speed = status["wall_secs"], status["tokens_per_sec"]
  pace = f"{figures.count(speed)} tokens/s"
  if status["status"] != "running" and secs:
    pace = f"{figures.count(status['tokens'] / secs)} tokens/s overall"
  parts = [
    figures.secs(secs),
    pace,
    figures.how_many(status["merges"], "merges"),
    f"{figures.num_bytes(status['bytes_per_sec'])}/s",
    figures.how_many(status["faults"], "faults"),
    figures.how_many(status["deaths"], "deaths"),
  ]
  if status["secs_left"]:
    parts[0] += f", {figures.secs(status['secs_left'])} left"
  for name in ("takeovers", "quarantines", "rollbacks"):
    if status[name]:
      parts.append(figures.how_many(status[name], name))
  if status["last_cut"] is not None:
    age = f", {figures.secs(status['last_cut_age_secs'])} ago"
    running = status["status"] == "running"
    parts.append(f"cut {status['last_cut']}" + (age if running else ""))
  if status["contributors_mean"] is not None:
    parts[2] += f" of {figures.number(status['contributors_mean'])} islands"
  if status["eval_bits_per_token"] is not None:
    bits = figures.number(status["eval_bits_per_token"], 4)
    parts.insert(3, f"global eval {bits} bits/{status['token_unit']}")
  return "  \N{MIDDLE DOT}  ".join(parts)
