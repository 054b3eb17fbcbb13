"""Drawn failures, failures from a file, and the times they take."""

import numpy as np
import pytest
from scipy import stats

from diloco import errors
from diloco.planning.fleet import defaults, failures, traces
from diloco.planning.fleet import fleet as fleet_lib

YEAR, DAY = fleet_lib.SECS_PER_YEAR, fleet_lib.SECS_PER_DAY
REPAIR = defaults.ExponentiatedWeibull(60.0)


def draw(model, fleet, secs, seed=0):
  rng = np.random.default_rng(seed)
  return failures.sample(model, fleet, REPAIR, secs, rng)


@pytest.mark.parametrize(
  ("shape", "power"), [(1, 1), (0.7, 1), (2, 0.3), (1.5, 2)]
)
def test_quantile_inverts_the_distribution(shape, power):
  one = defaults.ExponentiatedWeibull(100.0, shape, power)
  shares = np.array([0.05, 0.5, 0.95])
  found = stats.exponweib.cdf(one.quantile(shares), power, shape, scale=100)
  assert found == pytest.approx(shares)


def test_exponential_failures_come_at_the_rate_of_all_chips():
  found = draw(failures.FailureModel(), fleet_lib.Fleet(chips=500_000), DAY)
  expected = 500_000 * DAY / YEAR
  assert len(found.secs) == pytest.approx(expected, abs=4 * expected**0.5)
  assert (np.diff(found.secs) >= 0).all()
  # 26 thousand chips fail a cluster interruption every 13 seconds or so.
  spread = np.bincount(found.first, minlength=1953).max()
  assert spread < 10 and found.last.max() <= 1953


def test_groups_take_all_their_slices_with_them():
  fleet = fleet_lib.Fleet(chips=2560, islands=2, rack_slices=4)
  model = failures.FailureModel(
    mtbi_years=0, rack_mtbi_years=0.01, site_mtbi_years=0.01
  )
  found = draw(model, fleet, 10 * DAY)
  names = np.array(failures.CAUSES)[found.cause]
  widths = (found.last - found.first)[names == "rack"]
  assert set(widths) == {4, 1}  # of five: no rack is at two sites
  assert set((found.last - found.first)[names == "site"]) == {5}


def test_extra_slices_fail_only_while_they_are_there():
  extra = fleet_lib.Extra(1.0, 4 * DAY, 5 * DAY)
  found = draw(
    failures.FailureModel(mtbi_years=0.1, rack_mtbi_years=0.02),
    fleet_lib.Fleet(chips=2560, extras=(extra,)),
    10 * DAY,
  )
  late = found.secs[found.first >= 10]
  assert len(late) and ((late >= 4 * DAY) & (late < 5 * DAY)).all()
  assert (found.secs < 4 * DAY).any() and (found.secs > 5 * DAY).any()


def test_services_fail_without_slices():
  model = failures.FailureModel(mtbi_years=0, syncer_mtbi_days=0.1)
  rng = np.random.default_rng(0)
  services = failures.sample_services(model, 10 * DAY, rng)
  assert 60 < len(services.syncer) < 140 and services.store == []
  assert all(b - a == 2.0 for a, b in services.syncer)


def test_outages_that_overlap_are_one():
  both = failures.Services([(0.0, 5.0), (20.0, 22.0)], [(4.0, 9.0)])
  assert both.merged == [(0.0, 9.0), (20.0, 22.0)]


def test_failures_cut_to_an_island():
  group = failures.Failures(
    *(np.array([value]) for value in (1.0, 2, 9, 30.0, 3))
  )
  part = group.within(5, 20)
  assert (part.first[0], part.last[0]) == (5, 9)
  assert len(group.within(9, 20).secs) == 0


def test_trace_names_slices_islands_and_services(tmp_path):
  path = tmp_path / "trace.csv"
  path.write_text(
    "secs,target,repair_secs\n10,3,60\n20,island-1,\n20,syncer,5\n99,store,1\n"
  )
  model = failures.FailureModel(trace=traces.read(path))
  fleet = fleet_lib.Fleet(chips=2560, islands=2)
  found = draw(model, fleet, 1000)
  assert found.secs.tolist() == [10, 20]
  assert found.first.tolist() == [3, 5] and found.last.tolist() == [4, 10]
  assert found.repair_secs[0] == 60 and found.repair_secs[1] > 0
  services = failures.sample_services(model, 1000, np.random.default_rng(0))
  assert services.syncer == [(20, 25)] and services.store == [(99, 100)]


@pytest.mark.parametrize(
  ("text", "why"),
  [
    ("secs,target\n10,0\n9,0\n", "time does not go back"),
    ("secs,target\n-1,0\n", "at least 0"),
    ("secs,target\nsoon,0\n", "at least 0"),
    ("secs,target\n1,moon\n", "slice's number"),
    ("secs,target\n1,3,600\n", "line 2: it has more values"),
    ("secs,target,repair_secs\n1,0,-5\n", "at least 0"),
    ("when,what\n1,0\n", "the columns are"),
    ("", "the columns are"),
  ],
)
def test_bad_trace_is_refused_with_its_line(tmp_path, text, why):
  path = tmp_path / "trace.csv"
  path.write_text(text)
  with pytest.raises(errors.UserError, match=why) as refusal:
    traces.read(path)
  assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("target", ["10", "island-2"])
def test_trace_of_another_fleet_is_refused(tmp_path, target):
  path = tmp_path / "trace.csv"
  path.write_text(f"secs,target\n1,{target}\n")
  model = failures.FailureModel(trace=traces.read(path))
  with pytest.raises(errors.UserError, match="counted from 0"):
    draw(model, fleet_lib.Fleet(chips=2560, islands=2), 1000)
