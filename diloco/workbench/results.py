"""What points and runs came to: which figures are shown, and how."""

from collections.abc import Callable, Mapping, Sequence

from diloco.report import figures

# Of a summary or a simulation, dearest first: what to call it, how to show it.
SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
  "final_eval_bits_per_token": (
    "held-out bits per token",
    lambda value: figures.number(value, 4),
  ),
  "goodput.mean": ("goodput", figures.percent),
  "uptime.mean": ("uptime", figures.percent),
  "contributors_per_merge.mean": ("islands a merge", figures.number),
  "tokens_per_sec": ("tokens a second", figures.count),
  "wall_secs": ("time", figures.secs),
  "goodput": ("goodput", figures.percent),
  "merges.contributors_mean": ("islands a merge", figures.number),
  "merges.staleness_mean": ("staleness", figures.number),
  "bytes_published": ("published", figures.num_bytes),
}


def shown(results: Sequence[Mapping[str, float]]) -> list[str]:
  """The figures worth showing that any of them has."""
  return [key for key in SHOWN if any(key in r for r in results)]


def headline(result: Mapping[str, float]) -> str:
  """The dearest figure in words."""
  for key in shown([result])[:1]:
    return f"{SHOWN[key][0]} {SHOWN[key][1](result[key])}"
  return ""
