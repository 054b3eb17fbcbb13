"""`diloco simulate` from the command line."""

import json

import pytest
from observing import refused

import diloco
from diloco import cli, errors
from diloco.planning.fleet import traces

QUICK = (
  "--chips=20000",
  "--days=1",
  "--seeds=2",
  "--windows=1",
  "--window_steps=20",
)


def run(capsys, *flags):
  code = cli.main(["simulate", *QUICK, *flags])
  out, err = capsys.readouterr()
  return code, out, err


def test_json_has_goodput_and_uptime_with_their_intervals(capsys):
  code, out, err = run(capsys, "--islands=2", "--json")
  facts = json.loads(out)
  assert code == 0 and err == ""
  for name in ("goodput", "uptime"):
    assert 0.9 < facts[name]["low"] <= facts[name]["mean"]
    assert facts[name]["mean"] <= facts[name]["high"] <= 1
  assert len(facts["tokens_by_island"]) == 2
  assert facts["contributors_per_merge"]["mean"] > 1


def test_text_names_goodput_and_losses(capsys):
  code, out, _ = run(capsys, "--noelastic")
  assert code == 0 and "goodput" in out and "recovery" in out


def test_one_island_is_a_single_job_without_rounds(capsys):
  _, out, _ = run(capsys, "--islands=1", "--json")
  facts = json.loads(out)
  assert facts["contributors_per_merge"]["mean"] is None
  assert facts["rounds"]["windows"] == 0


def test_all_flags_together(capsys, tmp_path):
  picture = tmp_path / "fleet.png"
  code, out, _ = run(
    capsys,
    *("--islands=2", "--elastic", "--quorum=2", "--grace=0.1", "--every=8"),
    *("--fragments=4", "--speeds=1,0.9", "--jitter=0.1", "--mtbi_years=0.5"),
    *("--capacity=0.5:0.2-0.6:0.8", "--rack_mtbi_years=1", "--json"),
    *("--syncer_mtbi_days=0.1", "--straggler_mtbi_years=5"),
    f"--timeline={picture}",
  )
  facts = json.loads(out)
  assert code == 0 and facts["timeline"] == str(picture)
  assert picture.read_bytes()[:4] == b"\x89PNG"
  assert len(facts["tokens_by_island"]) == 3


def test_trace_decides_what_fails(capsys, tmp_path):
  path = tmp_path / "trace.csv"
  path.write_text("secs,target,repair_secs\n3600,0,600\n7200,1,600\n")
  _, out, _ = run(capsys, "--noelastic", f"--trace={path}", "--json")
  facts = json.loads(out)
  assert facts["failures"]["mean"] == 2
  assert facts["downtime"]["recovery"]["mean"] == pytest.approx(1200 / 86_400)


def test_drawn_trace_is_what_the_seed_has(capsys, tmp_path):
  path = tmp_path / "drawn.csv"
  fails = (
    "--mtbi_years=0.05",
    "--rack_mtbi_years=0.02",
    "--syncer_mtbi_days=0.2",
  )
  fails = (*fails, "--noelastic")
  code, out, _ = run(capsys, "--seed=3", *fails, f"--draw={path}", "--json")
  assert code == 0
  drawn = traces.read(path)
  assert json.loads(out)["failures"] == len(drawn) > 6
  assert {"syncer"} < {entry.service for entry in drawn}
  found = []
  for trace in ([], [f"--trace={path}"]):
    _, out, _ = run(capsys, "--seed=3", "--seeds=1", "--json", *fails, *trace)
    found.append(json.loads(out))
  for name in ("goodput", "uptime", "downtime"):
    assert found[0][name] == found[1][name]


def test_trace_of_outages_of_services_alone_is_one(capsys, tmp_path):
  path = tmp_path / "trace.csv"
  path.write_text("secs,target,repair_secs\n100,syncer,50\n")
  code, out, _ = run(capsys, "--windows=0", f"--trace={path}", "--json")
  assert code == 0 and json.loads(out)["service_outages"]["mean"] == 1


def test_text_tells_what_was_simulated_and_how_sure_it_is(capsys):
  _, out, _ = run(capsys, "--islands=2", "--windows=2")
  assert "20,000 chips in 78 slices, 2 islands; 2 seeds" in out
  assert "[lowest, highest]" in out and "(95 %, from windows)" in out
  assert "overwritten_share" in out
  late = ("--islands=2", "--mtbi_years=0", "--publish_secs=1e6")
  assert "rounds: 0 merges in 2 windows" in run(capsys, *late)[1]


def test_sweep_simulates_every_row(capsys, tmp_path):
  path = tmp_path / "sweep.py"
  path.write_text(
    "def get_sweep():\n"
    "  return [{'islands': 1, 'elastic': e} for e in (False, True)]\n"
  )
  code, out, _ = run(capsys, f"--sweep={path}", "--json")
  rows = json.loads(out)["rows"]
  assert code == 0 and [r["given"]["elastic"] for r in rows] == [False, True]
  rigid, elastic = (r["result"]["goodput"]["mean"] for r in rows)
  assert rigid < elastic
  assert "elastic=True" in run(capsys, f"--sweep={path}")[1]


@pytest.mark.parametrize(
  "name", ["from_run", "measured_from", "sweep", "draw", "timeline"]
)
def test_what_is_no_setting_of_a_fleet_is_not_ignored(name):
  with pytest.raises(errors.UserError, match=f"{name} = a: it is no setting"):
    diloco.simulate(chips=20_000, days=1, seeds=1, **{name: "a"})


def test_switches_are_off_if_a_caller_says_so():
  found = [
    diloco.simulate(chips=20_000, days=1, seeds=1, windows=0, **more)
    for more in ({}, {"lockstep": False, "elastic": True})
  ]
  assert found[0] == found[1]


def test_run_that_is_not_there_cannot_be_predicted(capsys):
  argv = ["simulate", "--from_run=nowhere", "--quorum", "2", "--json"]
  assert "no such directory" in refused(capsys, argv)


BAD = [
  (["--chips=10", "--slices=20"], "fewer than the 20 slices"),
  (["--chips=0"], "at least 1"),
  (["--chips=many"], "many"),
  (["--islands=0"], "at least 1"),
  (["--islands=100", "--slices=10"], "an island needs a slice"),
  (["--downscale_secs=-1"], "must be at least 0"),
  (["--repair_scale_secs=0"], "above 0"),
  (["--publish_secs=-1"], "must be at least 0"),
  (["--mtbi_years=-1"], "must be at least 0"),
  (["--mtbi_years=nan"], "must be at least 0"),
  (["--days=-3"], "above 0"),
  (["--days=inf"], "above 0"),
  (["--days=0.0001"], "too short for any failure"),
  (["--seeds=0"], "at least 1"),
  (["--islands=2", "--quorum=3"], "no round could ever close"),
  (["--islands=2", "--grace=soon"], "adaptive"),
  (["--islands=2", "--every=4"], "P must not exceed H"),
  (["--speeds=1,2"], "relative to the fastest"),
  (["--speeds="], "must be a number"),
  (["--days=a month"], "must be a number"),
  (["--jitter=2"], "below 1"),
  (["--min_share=2"], "between 0 and 1"),
  (["--capacity=lots"], "SHARE:FROM-TO"),
  (["--capacity=0.5:9-3"], "before it goes"),
  (["--capacity=-1:3-9"], "above 0"),
  (["--capacity=0.5:1-2:1e-310"], "SHARE:FROM-TO"),
  (["--trace=nowhere.csv"], "No such file"),
  (["--draw=nowhere/drawn.csv"], "cannot be written"),
  (["--sweep=nowhere.py"], "no such file"),
  (["--sweep=a.py", "--timeline=a.png"], "different things to do"),
  (["--measured_from=runs/a"], "give --from_run too"),
  (["--from_run=nowhere"], "--chips: the rest of the fleet is that of"),
  (["--islands=2", "--lockstep", "--windows=0"], "by following rounds"),
  (["--timeline=/nowhere/x.png"], "No such file"),
  (["--straggler_factor=0"], "above 0"),
  (["--chips=2e9", "--days=1000"], "can be followed"),
  (["--chips=1e12", "--mtbi_years=0"], "10,000,000 can be followed"),
  (["--rack_mtbi_years=1e-15"], "can be followed"),
  (["--store_mtbi_days=1e-15"], "can be followed"),
  (["--straggler_mtbi_years=1e-15"], "can be followed"),
  (["--step_secs=1e-310"], "nothing is of this size"),
  (["--speeds=1,1e-310"], "nothing is of this size"),
  (["--repair_shape=1e-20"], "one repair in 1e9 has no end"),
  (["--seeds=1e30"], "at most 1000000"),
  (["--colour=red"], "--colour"),
  (["--calibrate", "--failures=3"], "at least 1000"),
]


@pytest.mark.parametrize(
  ("flags", "why"), BAD, ids=[" ".join(b[0]) for b in BAD]
)
def test_bad_input_is_refused_in_one_line(capsys, flags, why):
  argv = ["simulate", "--chips=20000", "--seeds=1", *flags]
  assert why in refused(capsys, argv)


@pytest.mark.parametrize(
  ("text", "why"),
  [
    ("def get_sweep():\n  return []\n", "no points"),
    (
      "def get_config(): pass\ndef get_sweep():\n  return [{'a': 1}]\n",
      "use 'diloco sweep'",
    ),
    ("def get_sweep():\n  return [{'chips': -1}]\n", "at least 1"),
    ("def get_sweep():\n  return [{'color': 1}]\n", "--color"),
    ("def get_sweep():\n  return [{'draw': 'a.csv'}]\n", "would be ignored"),
  ],
)
def test_bad_sweep_is_refused_in_one_line(capsys, tmp_path, text, why):
  path = tmp_path / "sweep.py"
  path.write_text(text)
  assert why in refused(capsys, ["simulate", *QUICK, f"--sweep={path}"])
