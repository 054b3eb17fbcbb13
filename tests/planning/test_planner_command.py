import json
import pathlib

import pytest
from observing import refused

from diloco import cli, config, errors
from diloco.planning.planner import command, resources
from experiments.configs import shapes

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ROOT / "experiments" / "configs"
FLEETS = ROOT / "experiments" / "fleets"
GOLDEN = ROOT / "tests" / "golden" / "plan_four_regions.txt"
REGIONS = [
  *("plan", f"--fleet={FLEETS / 'four_regions.py'}"),
  *("--params=12e9", "--wan_gbps=3", "--seeds=2"),
]
ROOMS = ["plan", f"--fleet={FLEETS / 'two_rooms.py'}", "--params=1e9"]


@pytest.fixture(scope="module")
def plan():
  """The plan of each example, made once."""
  made: dict = {}

  def of(capsys, args):
    if tuple(args) not in made:
      assert cli.main([*args, "--json"]) == 0
      made[tuple(args)] = json.loads(capsys.readouterr().out)
    return made[tuple(args)]

  return of


def test_text_of_a_plan_is_the_golden_one(capsys):
  # Made anew by the same command: `diloco plan ... > tests/golden/...`.
  assert cli.main(REGIONS) == 0
  assert capsys.readouterr().out == GOLDEN.read_text()


@pytest.mark.parametrize("args", [REGIONS, ROOMS], ids=["regions", "rooms"])
def test_proposed_config_is_accepted(plan, capsys, args):
  found = plan(capsys, args)
  built = config.from_mapping(found["config"])
  proposal = found["proposal"]
  assert built.fleet.islands == proposal["islands"]
  assert built.sync.every == proposal["every"]
  assert built.sync.num_fragments == proposal["num_fragments"]
  assert built.sync.overlap_steps == proposal["overlap_steps"]
  assert built.sync.codec == proposal["codec"]
  chips = sum(s.num_devices for s in built.fleet.slices)
  assert chips == found["fleet"]["used_chips"]
  assert max(s.relative_speed for s in built.fleet.slices) == 1.0


def test_plan_shows_what_is_asked_for(plan, capsys):
  found = plan(capsys, REGIONS)
  assert found["proposal"]["syncer_site"] == "storage"
  assert set(found["expected"]["goodput"]) == {"mean", "low", "high"}
  # Published: more than 20 times a synchronous job on 2 to 5 Gbit/s.
  assert found["expected"]["times_synchronous"] > 20
  for site in found["sites"]:
    moved = max(site["sent_bytes_per_sec"], site["received_bytes_per_sec"])
    assert 8e-9 * moved == pytest.approx(site["load"] * site["link_gbps"])
    assert site["load"] <= 0.8
  for island in found["islands"]:
    held = dict(island["memory"])
    of_chip = [v for k, v in held.items() if not k.startswith("host_")]
    assert sum(of_chip) == pytest.approx(island["memory_bytes_per_chip"])
    assert island["memory_bytes_per_chip"] < island["memory_bytes_of_chip"]
  shares = [limit["share"] for limit in found["limits"]]
  assert shares == sorted(shares, reverse=True)
  bought = {better["resource"]: better for better in found["one_more"]}
  assert bought["1 Gbit/s more on every link"]["saved_share"] > 0
  every = found["proposal"]["every"]
  assert bought["new versions sent in int4"]["every"] < every


def test_proposal_is_the_soonest_of_all(plan, capsys):
  found = plan(capsys, REGIONS)
  days = {
    row["islands"]: row["days_to_quality"]["mean"]
    for row in found["over_islands"]
    if row["fits"]
  }
  assert min(days, key=days.get) == found["proposal"]["islands"]
  assert len(days) > 3


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shape_has_the_parameters_of_its_name(name):
  params, layers, tokens = command.shape_of(f"{CONFIGS / 'shapes.py'}:{name}")
  assert params == pytest.approx(shapes.SHAPES[name].params, rel=0.03)
  assert tokens == pytest.approx(20 * params, rel=0.03)
  assert layers == shapes.SHAPES[name].num_layers


def test_config_gives_the_model_of_a_plan(capsys):
  config = f"--config={CONFIGS / 'shapes.py'}:550m"
  fleet, one = ROOMS[1], ("--islands=1", "--seeds=2", "--json")
  assert cli.main(["plan", fleet, config, *one]) == 0
  found = json.loads(capsys.readouterr().out)["model"]
  assert (found["params"], found["layers"]) == (559_998_720, 18)
  assert found["tokens"] == 11e9
  assert "there is neither" in refused(capsys, ["plan", fleet])
  assert "there are both" in refused(capsys, [*ROOMS, config])
  broken = f"--config={CONFIGS / 'shapes.py'}:7b"
  assert "choose of smoke, 35m" in refused(capsys, ["plan", fleet, broken])


def test_time_and_cost_grow_with_tokens_and_price(capsys):
  def expected(*more):
    assert cli.main([*ROOMS, "--islands=2", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)["expected"]

  batch = "--batch_tokens=1e6"
  one = expected(batch, "--tokens=1e10", "--cost_per_chip_hour=1")
  two = expected(batch, "--tokens=2e10", "--cost_per_chip_hour=3")
  days = "days_to_tokens"
  assert two[days]["mean"] == pytest.approx(2 * one[days]["mean"])
  assert two["cost_to_tokens"] == pytest.approx(6 * one["cost_to_tokens"])
  # 80 chips, 1 an hour each.
  assert one["cost_to_tokens"] == pytest.approx(one[days]["mean"] * 24 * 80)


@pytest.mark.parametrize("name", ["trade.png", "trade.svg"])
def test_trade_off_is_drawn(capsys, tmp_path, name):
  path = tmp_path / name
  assert cli.main([*ROOMS, f"--plot={path}"]) == 0
  start = path.read_bytes()[:100]
  assert start.startswith(b"\x89PNG") or b"<?xml" in start


@pytest.mark.parametrize(
  ("args", "told"),
  [
    (["--params=1e12"], "would hold 429 GB, and it has 80"),
    (["--islands=11"], "has 10 slices, and an island needs one"),
    (
      ["--islands=2", "--wan_gbps=0.01"],
      "would carry 0.0397 of its 0.01 Gbit/s",
    ),
    (["--params=-1"], "'-1' must be a number of at least 1"),
    (["--tokens=inf"], "'inf' must be a number"),
    (["--wan_gbps=0"], "'0' must be a number above 0"),
    (["--cost_per_chip_hour=-2"], "'-2' must be a number of at least 0"),
    (["--seeds=1"], "'1' must be a whole number of at least 2"),
    (["--islands=two"], "'two' must be a whole number of at least 1; see"),
    (["--seeds=1e30"], "of at least 2 and at most 10000"),
    (["--params=1e300"], "nothing is of this size"),
    (["--mfu=1e-310"], "nothing is of this size"),
    (["--wan_gbps=1e-310"], "nothing is of this size"),
    (["--cost_per_chip_hour=1.7e308"], "nothing is of this size"),
    (["--mfu=1.5"], "it is a share of the peak"),
    (["--tokens=1e6", "--batch_tokens=1e7"], "the budget is --tokens=1e+06"),
    (
      ["--batch_tokens=5e4"],
      "48 chips would have 24.4 sequences of 2048 tokens a step, and a chip"
      " works on a whole one; give a larger batch or fewer chips",
    ),
    (["--plot=x.bmp"], "end it in one of .png, .svg, .pdf"),
    (["--plot=/no/such/folder/x.png"], "there is no such folder"),
    (["--fleet=nowhere.py"], "there is no such file"),
  ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys, args, told):
  assert told in refused(capsys, [*ROOMS, *args])


SLICES = dict(kind="v", topology="4x4", count=2, memory_gb=32, teraflops=100)


def site(name="a", gbps=1.0, latency=0.0, **changes):
  return dict(
    name=name,
    link_gbps=gbps,
    latency_ms=latency,
    slices=[{**SLICES, **changes}],
  )


@pytest.mark.parametrize(
  ("sites", "told"),
  [
    ([], "there is not one chip in it"),
    ([dict(name="a", link_gbps=1)], "there is not one chip in it"),
    ([site(count=0)], "slices[0].count = 0: it must be above 0"),
    ([site(count=-3)], "slices[0].count = -3: it must be above 0"),
    ([site(memory_gb=-1)], "slices[0].memory_gb = -1"),
    ([site(mtbi_years=0)], "slices[0].mtbi_years = 0"),
    ([site(price_per_hour=-1)], "price_per_hour = -1.0: it must be at least 0"),
    ([site(topology="4x")], "a topology is chip counts"),
    ([site(topology="0x4")], "a topology is chip counts"),
    ([site(gbps=0)], "link_gbps = 0"),
    ([site(gbps=1e-310)], "link_gbps = 1e-310"),
    ([site(teraflops=1e-310)], "teraflops = 1e-310: nothing is of this size"),
    ([site(latency=-1)], "latency_ms = -1.0: it must be at least 0"),
    ([site(), site()], "each site needs a name of its own"),
    ([site(colour="red")], "there is no such field"),
    ([site(count="two")], "it must be a whole number"),
    ("none", "it must be a list"),
  ],
)
def test_impossible_fleet_is_refused(tmp_path, capsys, sites, told):
  path = tmp_path / "fleet.py"
  path.write_text(f"def get_fleet():\n  return dict(sites={sites!r})\n")
  error = refused(capsys, ["plan", f"--fleet={path}", "--params=1e9"])
  assert told in error


@pytest.mark.parametrize(
  ("text", "told"),
  [
    ("def fleet(): pass", "it has no function get_fleet"),
    ("def get_fleet(:", "SyntaxError"),
    ("def get_fleet():\n  return 1 / 0", "ZeroDivisionError: division by zero"),
    ("def get_fleet(): return 7", "it must be a group of fields"),
  ],
)
def test_broken_fleet_file_is_refused(tmp_path, capsys, text, told):
  path = tmp_path / "fleet.py"
  path.write_text(text)
  assert told in refused(capsys, ["plan", f"--fleet={path}", "--params=1e9"])


def test_wan_replaces_links_of_sites_with_slices_only():
  fleet = resources.load(str(FLEETS / "four_regions.py"), 1.5)
  links = {site.name: site.link_gbps for site in fleet.sites}
  assert links.pop("storage") == 100
  assert set(links.values()) == {1.5}
  with pytest.raises(errors.UserError, match="no such file"):
    resources.load("missing.py")
