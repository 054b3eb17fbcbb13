"""The fleet: chips in slices, slices in islands, and what fails together.

A *slice* is the unit that fails, is repaired and is allocated. Slices have
numbers; consecutive ones stand side by side, in the same rack, and all slices
of an island at one site, so no rack has slices of two islands.
"""

import dataclasses

from diloco import errors

SECS_PER_DAY = 86_400.0
SECS_PER_YEAR = 365 * SECS_PER_DAY
SLICE_CHIPS = 256
_MOST_SLICES = 10_000_000  # a rack and a state of each are listed
_OF_EXTRAS = {
  "above 0": ["share"],
  "above 0 and at most 1": ["speed"],
  "at least 0": ["start_secs"],
}


@dataclasses.dataclass(frozen=True)
class Extra:
  """Capacity that is there for part of the time."""

  share: float  # slices, as a share of the base fleet
  start_secs: float  # when they come
  end_secs: float  # when they are taken away
  speed: float = 1.0  # of its chips, 1 being the fleet's


@dataclasses.dataclass(frozen=True)
class Fleet:
  """All hardware of a run.

  Attributes:
    chips: of the base fleet.
    islands: M; 1 is a single synchronous job.
    slices: of the base fleet; 0 for one per 256 chips, at least one an island.
    rack_slices: slices that share a rack.
    speeds: relative speeds of equal parts of the fleet, in order; the fastest
      is 1.
    speed_spread: standard deviation of single slices' speeds around that.
    extras: capacity that comes and goes.
  """

  chips: int = 1_200_000
  islands: int = 1
  slices: int = 0
  rack_slices: int = 4
  speeds: tuple[float, ...] = (1.0,)
  speed_spread: float = 0.0
  extras: tuple[Extra, ...] = ()

  def __post_init__(self) -> None:
    require(
      self.chips >= self.num_slices,
      "chips",
      self.chips,
      f"fewer than the {self.num_slices} slices they should fill",
    )
    require(
      self.num_slices >= self.islands,
      "islands",
      self.islands,
      f"an island needs a slice, and there are {self.num_slices}",
    )
    require(
      self.all_slices <= _MOST_SLICES,
      "slices",
      self.all_slices,
      f"at most {_MOST_SLICES:,} can be followed",
    )
    require(len(self.speeds) > 0, "speeds", "()", "name at least one speed")
    for speed in self.speeds:
      require(
        0 < speed <= 1, "speeds", speed, "relative to the fastest, 0 to 1"
      )
    require(
      0 <= self.speed_spread < 0.5,
      "speed_spread",
      self.speed_spread,
      "a standard deviation from 0 to 0.5",
    )
    for extra in self.extras:
      errors.check(extra, _OF_EXTRAS, "capacity ")
      require(
        extra.start_secs < extra.end_secs,
        "capacity",
        f"{extra.start_secs:g}..{extra.end_secs:g} s",
        "it comes before it goes",
      )

  @property
  def num_slices(self) -> int:
    """Slices of the base fleet."""
    if self.slices:
      return self.slices
    whole = max(1, round(self.chips / SLICE_CHIPS))
    return max(whole, min(self.islands, self.chips))

  @property
  def slice_chips(self) -> float:
    """Chips of a slice, on average."""
    return self.chips / self.num_slices

  @property
  def island_slices(self) -> int:
    """Slices of an island, on average."""
    return max(1, round(self.num_slices / self.islands))

  def block(self, island: int) -> tuple[int, int]:
    """Returns (first, last) slices of an island, last excluded."""
    first = island * self.num_slices // self.islands
    return first, (island + 1) * self.num_slices // self.islands

  def extra_blocks(self) -> list[tuple[Extra, int, int]]:
    """Returns (extra, first, last) with slices numbered after the base's."""
    found = []
    first = self.num_slices
    for extra in self.extras:
      count = max(1, round(extra.share * self.num_slices))
      found.append((extra, first, first + count))
      first += count
    return found

  def racks(self) -> list[tuple[int, int]]:
    """Returns (first, last) slices of each rack, extra capacity's last."""
    blocks = [self.block(m) for m in range(self.islands)]
    blocks += [(first, last) for _, first, last in self.extra_blocks()]
    return [
      (start, min(start + self.rack_slices, last))
      for first, last in blocks
      for start in range(first, last, self.rack_slices)
    ]

  @property
  def all_slices(self) -> int:
    """Slices of the base fleet and of all extra capacity."""
    blocks = self.extra_blocks()
    return blocks[-1][2] if blocks else self.num_slices

  def speed_of(self, index: int) -> float:
    """Relative speed of a base slice, before its own spread."""
    # The bounds of parts are rounded as those of `block` are.
    part = ((index + 1) * len(self.speeds) - 1) // self.num_slices
    return self.speeds[part]


def require(holds: bool, name: str, value: object, why: str) -> None:
  """Raises a `UserError` for a value that cannot be."""
  if not holds:
    raise errors.UserError(f"{name} = {value}", why, f"change {name}")
