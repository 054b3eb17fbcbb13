"""What hardware there is, as a user's fleet file says it, and its resources.

An island stands at one site and has chips of one kind. Every group of equal
slices gets an island, the fastest groups first; what is left of the M islands
goes to the groups in proportion to their speed, by largest remainders, at most
one island a slice. Within a group the slices are spread evenly.

A fleet file is Python with a function `get_fleet()` that returns a `Fleet`, or
nested mappings with its fields. It is the user's own code, as a configuration
file is.
"""

import dataclasses
import math
import re

from diloco import errors, own_file, typed

_RULES = {
  "above 0": ("count", "memory_gb", "teraflops", "mtbi_years"),
  "at least 0": ("price_per_hour",),
}
_TOPOLOGY = re.compile("[0-9]{1,6}(x[0-9]{1,6}){0,2}")


@dataclasses.dataclass(frozen=True)
class Slices:
  """Equal slices at one site.

  Attributes:
    kind: of their chips, "v5p" for instance.
    topology: chips along each axis, "4x4x4" for instance.
    count: how many slices.
    memory_gb: of one chip, 1e9 bytes.
    teraflops: of one chip, at its peak, in bf16.
    price_per_hour: of one chip.
    mtbi_years: mean time between two interruptions by the same chip.
  """

  kind: str
  topology: str
  count: int
  memory_gb: float
  teraflops: float
  price_per_hour: float = 0.0
  mtbi_years: float = 1.0

  @property
  def slice_chips(self) -> int:
    """Chips of one slice."""
    return math.prod(int(n) for n in self.topology.split("x"))

  @property
  def chips(self) -> int:
    """Chips of all."""
    return self.count * self.slice_chips

  @property
  def flops(self) -> float:
    """Of all, a second, at their peak."""
    return 1e12 * self.teraflops * self.chips


@dataclasses.dataclass(frozen=True)
class Site:
  """A place. One without slices can still hold the syncer and the store.

  Attributes:
    name: unique in the fleet.
    slices: kinds are never mixed within an island.
    link_gbps: to all other sites, in each direction.
    latency_ms: one way, to the other sites.
  """

  name: str
  slices: tuple[Slices, ...] = ()
  link_gbps: float = 0.0
  latency_ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Fleet:
  """All sites."""

  sites: tuple[Site, ...]

  @property
  def groups(self) -> tuple[tuple[int, Slices], ...]:
    """Every group of equal slices, with the number of its site."""
    return tuple(
      (number, slices)
      for number, site in enumerate(self.sites)
      for slices in site.slices
    )

  @property
  def chips(self) -> int:
    """Of all sites."""
    return sum(slices.chips for _, slices in self.groups)

  @property
  def flops(self) -> float:
    """Of all sites, a second, at the peak."""
    return sum(slices.flops for _, slices in self.groups)


@dataclasses.dataclass(frozen=True)
class Island:
  """One island of a plan."""

  site: int  # its number in the fleet
  hardware: Slices  # the group it is part of
  slices: int  # of that group, that are its own

  @property
  def chips(self) -> int:
    """Of all its slices."""
    return self.slices * self.hardware.slice_chips

  @property
  def flops(self) -> float:
    """A second, at the peak."""
    return self.hardware.flops * self.slices / self.hardware.count


def divide(fleet: Fleet, islands: int) -> tuple[Island, ...]:
  """Makes M islands, or as many as there are slices."""
  groups = fleet.groups
  total = sum(slices.flops for _, slices in groups)
  wanted = [islands * slices.flops / total for _, slices in groups]
  counts = [0] * len(groups)
  # Sorting is stable: of equal groups those named first come first.
  for g in sorted(range(len(groups)), key=lambda g: -wanted[g])[:islands]:
    counts[g] = 1
  while sum(counts) < islands:
    free = [g for g, (_, s) in enumerate(groups) if counts[g] < s.count]
    if not free:
      break
    counts[max(free, key=lambda g: wanted[g] - counts[g])] += 1
  made = []
  for (site, hardware), count in zip(groups, counts, strict=True):
    for number in range(count):
      share = hardware.count * (number + 1) // count
      share -= hardware.count * number // count
      made.append(Island(site, hardware, share))
  return tuple(made)


def load(path: str, wan_gbps: float | None = None) -> Fleet:
  """Reads a fleet file; `wan_gbps` replaces the link of each site with slices.

  Raises:
    UserError: there is no such file or function, or the fleet cannot be.
  """
  with own_file.execute(f"--fleet={path}", str(path)) as module:
    values = module.get_fleet()
  fleet = typed.build(Fleet, values, "fleet")
  if wan_gbps is not None:
    fleet = Fleet(
      tuple(
        dataclasses.replace(site, link_gbps=wan_gbps) if site.slices else site
        for site in fleet.sites
      )
    )
  _check(fleet)
  return fleet


def _check(fleet: Fleet) -> None:
  names = [site.name for site in fleet.sites]
  errors.require(
    len(set(names)) == len(names),
    f"fleet.sites = {typed.show(names)}",
    "each site needs a name of its own",
    "rename one",
  )
  for i, site in enumerate(fleet.sites):
    where = f"fleet.sites[{i}]."
    for j, slices in enumerate(site.slices):
      place = f"{where}slices[{j}]."
      errors.require(
        bool(_TOPOLOGY.fullmatch(slices.topology)) and slices.slice_chips > 0,
        f"{place}topology = {typed.show(slices.topology)}",
        "a topology is chip counts along one to three axes",
        "write it like '256' or '4x4x4'",
      )
      errors.check(slices, _RULES, place)
      for name in sum(_RULES.values(), ()):
        value = getattr(slices, name)
        errors.require(
          errors.is_amount(value),
          f"{place}{name} = {value}",
          errors.NO_AMOUNT,
          f"change {place}{name}",
        )
    errors.check(site, {"at least 0": ["latency_ms"]}, where)
    errors.require(
      site.link_gbps > 0 and errors.is_amount(site.link_gbps),
      f"{where}link_gbps = {site.link_gbps:g}",
      "a site reaches the others over a link",
      "give a number above 0, or --wan_gbps",
    )
  errors.require(
    fleet.chips > 0,
    f"fleet.sites = {typed.show(names)}",
    "there is not one chip in it",
    "add slices to a site",
  )
