import json

import pytest
from observing import refused

from diloco import cli
from diloco.planning.bandwidth import methods

TABLE = [
  *("simulate", "--bandwidth", "--params=1e9", "--layers=24"),
  *("--step_secs=0.1", "--every=100", "--fragment_layers=3", "--sites=2"),
]


def run(capsys, *args):
  assert cli.main([*args, "--json"]) == 0
  return json.loads(capsys.readouterr().out)


def test_command_reproduces_the_published_table(capsys):
  result = run(capsys, *TABLE)
  assert (result["cells"], result["cells_exact"]) == (25, 25)
  assert list(result["methods"]) == list(methods.METHODS)
  assert result["methods"]["diloco"]["gbps"] == pytest.approx(
    [1.39, 6.25, 13.3, 23.3, 86.9], rel=0.005
  )


def test_text_shows_figures_and_assumptions(capsys):
  assert cli.main([*TABLE, "--method=streaming"]) == 0
  out = capsys.readouterr().out
  assert "streaming                          1.39     5.18      9.1" in out
  assert "5 of 5 published cells on the same grid point" in out
  assert "What this rests on:" in out


def test_unequal_links_bind_methods_by_the_slowest(capsys):
  args = [*TABLE[:5], "--every=24", "--method=data_parallel"]
  unequal = run(capsys, *args, "--links=2,100")
  equal = run(capsys, *args, "--links=2", "--sites=2")
  one = unequal["methods"]["data_parallel"]
  assert one["utilisation"] == equal["methods"]["data_parallel"]["utilisation"]
  assert one["wall_secs_per_step"] == pytest.approx(0.1 / one["utilisation"])


def test_decoupled_sites_are_told_apart(capsys):
  result = run(
    capsys,
    *("simulate", "--bandwidth", "--method=decoupled", "--params=12e9"),
    *("--layers=55", "--step_secs=2", "--every=100", "--links=2,3,4,5"),
    *("--latency_ms=10,20,30,40", "--num_fragments=100"),
  )
  found = result["decoupled"]
  loads = [site["load"] for site in found["sites"]]
  assert loads == sorted(loads, reverse=True)
  assert found["fits_link"]
  assert found["fits_overlap"]
  assert found["utilisation"] == 1.0
  assert found["advantage"] > 20
  at_first = run(
    capsys,
    *("simulate", "--bandwidth", "--method=decoupled", "--params=12e9"),
    *("--layers=55", "--step_secs=2", "--every=100", "--links=2,3,4,5"),
    "--syncer_site=0",
  )["decoupled"]
  assert not at_first["fits_link"]
  assert at_first["every_on_these_links"] > 100


def test_codec_of_islands_is_not_lent_to_the_synchronous_job(capsys):
  args = [*TABLE, "--method=decoupled", "--links=3"]
  bf16 = run(capsys, *args)["decoupled"]
  int4 = run(capsys, *args, "--codec=int4", "--down_codec=int4")["decoupled"]
  assert int4["advantage"] == bf16["advantage"]
  assert int4["mean_gbps"] < bf16["mean_gbps"]


def test_utilisation_that_no_bandwidth_reaches_has_no_figure(capsys):
  args = [*TABLE, "--method=data_parallel", "--latency_ms=50"]
  found = run(capsys, *args)["methods"]["data_parallel"]
  assert found["gbps"] == found["reached_gbps"] == [None] * 5
  small = run(capsys, *TABLE, "--method=diloco", "--params=1")
  assert small["methods"]["diloco"]["gbps"] == [None] * 5
  assert small["methods"]["diloco"]["reached_gbps"] == [0.1] * 5


def test_more_latency_than_the_overlap_has_no_bandwidth(capsys):
  args = [*TABLE, "--method=decoupled", "--latency_ms=60"]
  assert run(capsys, *args)["decoupled"]["gbps"] is None


@pytest.mark.parametrize(
  ("args", "told"),
  [
    (["--params=-1"], "'-1' must be a number of at least 1"),
    (["--params=nan"], "'nan' must be a number"),
    (["--layers=2.5"], "'2.5' must be a whole number"),
    (["--step_secs=0"], "'0' must be a number above 0"),
    (["--links=2,x"], "'x' must be a number above 0"),
    (["--links=1,2,3", "--sites=2"], "3 values for --sites=2"),
    (["--latency_ms=-5"], "'-5' must be a number of at least 0"),
    (["--codec=zip"], "invalid choice: 'zip' (choose from 'f32', 'bf16'"),
    (["--down_codec=zip"], "argument --down_codec: invalid choice: 'zip'"),
    (["--fragment_layers=25"], "the model has --layers=24"),
    (["--sites=1"], "'1' must be a whole number of at least 2"),
    (["--method=magic"], "argument --method: invalid choice: 'magic'"),
    (["--syncer_site=2"], "there are 2 sites"),
    (["--syncer_site=1"], "would be ignored"),
    (["--syncer_site=1", "--links=2", "--method=diloco"], "would be ignored"),
    (["--method=decoupled", "--num_fragments=101"], "P must not exceed H"),
    (["--every=1e6"], "1000000 are followed at most"),
    (["--links=1e-310", "--method=decoupled"], "nothing is of this size"),
    (["--links=2", "--step_secs=5e-324"], "nothing is of this size"),
    (["--links=2", "--step_secs=1.7e308"], "nothing is of this size"),
    (["--sites=1e30"], "of at least 2 and at most 10000"),
    (["--layers=1e30"], "of at least 1 and at most 1000000000000000000"),
    (["--nonsense"], "unrecognized arguments"),
  ],
)
def test_bad_input_is_refused_in_one_line(capsys, args, told):
  assert told in refused(capsys, ["simulate", "--bandwidth", *args])
