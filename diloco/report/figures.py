"""Numbers as people read them."""

import math
from collections.abc import Container, Sequence

DASH = "\N{EN DASH}"


def number(value: float | None, digits: int = 3) -> str:
  """Returns a number with few significant digits, or a dash."""
  if value is None or not math.isfinite(value):
    return DASH
  if abs(value) >= 10**digits - 0.5:  # as it would be rounded
    return f"{value:,.0f}"
  return f"{value:.{digits}g}"


def bits(nats: float | None) -> float | None:
  """Returns a loss in the one unit that people are shown."""
  return None if nats is None else nats / math.log(2)


def token_unit(task: str) -> str:
  """Returns what a token is, for the tasks that are built in."""
  return {"language_model": "byte", "vision": "image"}.get(task, "token")


def count(value: float | None) -> str:
  """Returns a count, from a thousand on with k, M, G or T."""
  return _scaled(value, ("", " k", " M", " G", " T"))


def how_many(value: int, plural: str) -> str:
  """Returns how many there are of what is named in the plural with an s."""
  return f"{value:,} {plural[:-1] if value == 1 else plural}"


def num_bytes(value: float | None) -> str:
  """Returns an amount of data in decimal units."""
  return _scaled(value, (" B", " kB", " MB", " GB", " TB"))


def percent(value: float | None) -> str:
  """Returns a share as a percentage."""
  if value is None or not math.isfinite(value):
    return DASH
  return f"{100 * value:.1f} %"


def secs(value: float | None) -> str:
  """Returns a duration in its natural unit."""
  if value is None or not math.isfinite(value):
    return DASH
  if value < 0.1:
    return f"{1000 * value:.3g} ms"
  if value < 120:
    return f"{value:.3g} s"
  minutes, rest = divmod(round(value), 60)
  if minutes < 120:
    return f"{minutes} min {rest:02d} s"
  hours, minutes = divmod(minutes, 60)
  return f"{hours} h {minutes:02d} min"


def times(value: float | None) -> str:
  """Returns a ratio, as in "1.2×"."""
  if value is None or not math.isfinite(value):
    return DASH
  return f"{value:.3g}\N{MULTIPLICATION SIGN}"


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
  """Returns rows as aligned text; of columns to the `right` by their ends."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(
      cell.rjust(width) if i in right else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  )


def _scaled(value: float | None, units: tuple[str, ...]) -> str:
  if value is None or not math.isfinite(value):
    return DASH
  power = 0
  while abs(value) >= 999.5 and power < len(units) - 1:
    value /= 1000
    power += 1
  return f"{value:.3g}{units[power]}"
