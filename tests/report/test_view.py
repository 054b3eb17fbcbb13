"""States, sessions, goodput and gaps, on histories small enough to check."""

import numpy as np
import pytest

from diloco.report import (
  charts,
  clock,
  goodput,
  incidents,
  island_view,
  series,
  status,
)
from diloco.report import view as view_lib
from diloco.tape import events, ledger, painting, reader

_STEP = {"loss": 2.0, "tokens": 10, "step_secs": 1.0, "gap_secs": 1.0}


class Lines:
  """A record under construction."""

  def __init__(self, num_islands=1):
    self.events, self.metrics = [], {}
    self.control(
      0.0, events.RUN_STARTED, islands=num_islands, total_tokens=1000
    )

  def add(self, role, incarnation, wall, event, **fields):
    line = {"event": event, "role": role, "incarnation": incarnation}
    self.events.append({**line, "wall_secs": wall, **fields})

  def control(self, wall, event, **fields):
    self.add("controller", 1, wall, event, **fields)

  def launch(self, wall, island=0, incarnation=1):
    self.control(
      wall,
      events.ISLAND_STARTED,
      island=island,
      island_incarnation=incarnation,
    )

  def start(self, wall, island=0, incarnation=1, step=0, **fields):
    fields = {"tokens_per_step": 10, "kind": "cpu", "step": step, **fields}
    self.add(f"island-{island}", incarnation, wall, events.STARTED, **fields)

  def train(self, first, last, begin, island=0, incarnation=1, **fields):
    """Steps (first, last], one a second, the first one ending at `begin`."""
    for step in range(first + 1, last + 1):
      line = {**_STEP, "step": step, "incarnation": incarnation, **fields}
      line["wall_secs"] = begin + (step - first - 1)
      self.metrics.setdefault(island, []).append(line)

  def die(self, wall, island=0, incarnation=1):
    fields = {"island": island, "island_incarnation": incarnation}
    self.control(wall, events.ISLAND_DIED, cause="signal 9", **fields)

  def view(self):
    view = view_lib.RunView()
    view.update(reader.Record(self.events, self.metrics, []))
    return view


def _trained():
  lines = Lines()
  lines.launch(1)
  lines.start(2)
  lines.train(0, 5, 4)
  return lines


def test_islands_in_a_merge_are_of_late_while_a_run_is_on_and_of_all_after_it():
  lines = _trained()
  for version in range(1, 101):
    of = range(2 if version <= 50 else 1)
    told = [{"island": island, "staleness": 0} for island in of]
    place = {"fragment": 0, "version": version}
    lines.add("syncer", 1, 10, events.MERGED, **place, contributions=told)
  shown = status.status_of(lines.view(), alive=True, now=11.0)
  assert shown["contributors_mean"] == 1.0
  lines.control(15, events.RUN_FINISHED, status="finished")
  shown = status.status_of(lines.view(), alive=False, now=16.0)
  assert shown["contributors_mean"] == 1.5


def test_state_follows_the_life_of_an_island():
  lines = Lines()
  assert lines.view().status == "running" and not lines.view().islands
  lines.launch(1)
  assert lines.view().state(0) == "starting"
  lines.start(2)
  assert lines.view().state(0) == "starting"
  lines.train(0, 5, 4)
  assert lines.view().state(0) == "training"
  lines.die(9)
  assert lines.view().state(0) == "dead"
  lines.control(9, events.ISLAND_RESTART, island=0, attempt=1, delay_secs=1)
  assert lines.view().state(0) == "restarting"
  lines.launch(10, incarnation=2)
  assert lines.view().state(0) == "restarting"
  assert lines.view().islands[0].restarts == 1
  lines.start(11, incarnation=2, step=5)
  lines.train(5, 7, 12, incarnation=2)
  assert lines.view().state(0) == "training"
  lines.add("island-0", 2, 14, events.STOPPED, step=7, reason="run ended")
  assert lines.view().state(0) == "stopped"
  lines.control(15, events.RUN_FINISHED, status="finished")
  view = lines.view()
  assert view.state(0) == "done" and view.status == "finished"
  spans = [tuple(span) for span in view.islands[0].spans(15.0)]
  assert spans == [
    ("starting", 1, 3),
    ("training", 3, 8),
    ("dead", 8, 9),
    ("restarting", 9, 10),
    ("restarting", 10, 11),
    ("training", 11, 14),
  ]


def test_line_of_a_dead_incarnation_does_not_revive_it():
  lines = _trained()
  lines.die(8.5)
  view = lines.view()
  late = {**_STEP, "step": 6, "incarnation": 1, "wall_secs": 9.0}
  view.update(reader.Record([], {0: [late]}, []))
  assert view.state(0) == "dead"


def test_view_fed_in_pieces_equals_the_view_of_the_whole():
  lines = _trained()
  lines.die(9)
  lines.launch(10, incarnation=2)
  whole, pieces = lines.view(), view_lib.RunView()
  for line in lines.events:
    pieces.update(reader.Record([line], {}, []))
  for line in lines.metrics[0]:
    pieces.update(reader.Record([], {0: [line]}, []))
  assert pieces.state(0) == whole.state(0)
  assert pieces.tokens == whole.tokens == 50
  assert pieces.wall_secs == whole.wall_secs
  assert pieces.islands[0].spans(10) == whole.islands[0].spans(10)


def test_pause_between_sessions_is_not_run_time():
  lines = _trained()  # falls silent at 8
  lines.control(1000.0, events.RUN_STARTED, islands=1)
  lines.launch(1001, incarnation=2)
  lines.start(1002, incarnation=2, step=5)
  lines.train(5, 8, 1003, incarnation=2)
  lines.control(1006.0, events.RUN_FINISHED, status="stopped", reason="asked")
  view = lines.view()
  assert [s.status for s in view.sessions.all] == ["crashed", "stopped"]
  assert view.wall_secs == 8.0 + 6.0
  assert view.islands[0].restarts == 0
  times = clock.RunClock(view)
  assert times.length == 14.0 and times.seams == [8.0]
  assert times.at(np.array([0, 8, 500, 1000, 1006])).tolist() == [
    *(0, 8, 8, 8, 14)
  ]


@pytest.mark.parametrize("broken", [1, 2])
def test_session_whose_first_line_is_broken_has_a_time_of_its_own(broken):
  lines = Lines()
  lines.events.clear()
  for life, begin in ((1, 0.0), (2, 1000.0)):
    told = [
      (begin, events.RUN_STARTED, {"islands": 1}),
      (begin + 1, events.SYNCER_STARTED, {"pid": 1}),
      (begin + 8, events.RUN_FINISHED, {"status": "stopped"}),
    ]
    for wall, event, fields in told[life == broken :]:
      lines.add("controller", life, wall, event, **fields)
  view = lines.view()
  assert view.wall_secs == pytest.approx(8.0 + 7.0)
  assert [one.status for one in view.sessions.all] == ["stopped"] * 2


def test_what_comes_before_the_start_is_told_is_of_the_same_session():
  lines = Lines()
  lines.control(8.0, events.RUN_FINISHED, status="stopped")
  changes = {"sync.quorum": [1, 2]}
  lines.add("controller", 2, 100.0, events.CONFIG_CHANGED, changes=changes)
  lines.add("controller", 2, 101.0, events.RUN_STARTED, islands=1)
  view = lines.view()
  assert len(view.sessions.all) == 2 and view.wall_secs == pytest.approx(9.0)


def test_stall_is_gap_beyond_compute_and_pace():
  lines = Lines()
  lines.start(1, paced_step_secs=1.5)
  lines.train(0, 1, 2, step_secs=1.0, gap_secs=None)
  lines.train(1, 3, 4, step_secs=1.0, gap_secs=1.5)  # waits for its pace
  lines.train(3, 4, 6, step_secs=2.0, gap_secs=2.5)  # 0.5 beyond compute
  lines.train(4, 5, 9, step_secs=1.0, gap_secs=3.5)  # 2.0 beyond pace
  assert lines.view().islands[0].stall_secs == pytest.approx(2.5)


def test_steps_drawn_around_their_pace_are_no_stalls():
  lines = Lines()
  lines.start(0, paced_step_secs=1.0)
  lines.train(0, 1, 1, step_secs=0.0, gap_secs=None)
  for step in range(1, 19, 2):
    lines.train(step, step + 1, step + 0.5, step_secs=0.0, gap_secs=0.5)
    lines.train(step + 1, step + 2, step + 2, step_secs=0.0, gap_secs=1.5)
  assert lines.view().islands[0].stall_secs == pytest.approx(0.0)


def test_goodput_counts_needed_seconds_of_steps_that_were_kept():
  lines = Lines(num_islands=2)
  lines.start(0, 0, devices=4, paced_step_secs=2.0)
  lines.train(0, 5, 1, step_secs=0.5)  # 2 s each by its pace
  lines.start(0, 1)
  lines.train(0, 4, 1, island=1, step_secs=3.0)  # slower than any pace
  lines.control(20.0, events.RUN_FINISHED, status="finished")
  # The first life of island 0 lost steps 4 and 5 of one of two fragments.
  result = goodput.goodput(lines.view(), {0: [painting.LifeSpan(1, 3, 5)]}, 2)
  assert result.useful_chip_secs == pytest.approx(4 * 2.0 * 4 + 1 * 3.0 * 4)
  assert result.allocated_chip_secs == pytest.approx(4 * 20 + 1 * 20)
  assert result.ratio == pytest.approx(44 / 100)


def test_island_that_never_came_is_allocated_and_one_that_came_late_is_not():
  lines = Lines(num_islands=2)
  lines.start(0, 0)
  lines.launch(15, island=2)
  lines.control(20.0, events.RUN_FINISHED, status="finished")
  result = goodput.goodput(lines.view(), {}, 1)
  assert result.allocated_chip_secs == pytest.approx(20 + 20 + 5)


def test_goodput_of_nothing_is_unknown():
  assert goodput.goodput(view_lib.RunView(), {}, 1).ratio is None


def _two_islands():
  lines = Lines(num_islands=2)
  for island in (0, 1):
    lines.start(1, island)
    lines.train(0, 30, 2, island=island)
  return lines


def test_survivor_gap_is_the_longest_around_the_fault():
  lines = _two_islands()
  lines.metrics[1][18]["gap_secs"] = 3.0  # ends at 20
  lines.metrics[1][2]["gap_secs"] = 9.0  # long before
  lines.control(
    18.2, events.FAULT_INJECTED, kind="sigkill", target="island-0", at_tokens=5
  )
  lines.die(18.4)
  lines.launch(19, incarnation=2)
  lines.start(20, incarnation=2, step=30)
  lines.train(30, 31, 24.2, incarnation=2)
  (incident,) = incidents.find(lines.view())
  assert incident.gap_over_median == {1: pytest.approx(3.0)}
  assert incident.back_secs == pytest.approx(6.0)
  assert incident.injected and incident.cause == "signal 9"


@pytest.mark.parametrize(
  ("method", "slices"),
  [("diloco", 1), ("data_parallel", 4), ("elastic_data_parallel", 4)],
)
def test_chips_of_one_job_are_those_of_all_its_slices(method, slices):
  lines = Lines()
  lines.events[0]["method"] = method
  lines.start(0)
  lines.train(0, 3, 1)
  lines.control(4.0, events.RUN_FINISHED, status="finished")
  view = lines.view()
  view.config = {"fleet": {"slices": [{}] * 4}}
  found = goodput.goodput(view, {}, 1)
  assert found.allocated_chip_secs == pytest.approx(slices * 4.0)
  assert found.useful_chip_secs == pytest.approx(slices * 3.0)


def test_steps_in_vain_are_those_of_their_life_in_a_long_run(monkeypatch):
  monkeypatch.setattr(series, "LIMIT", 8)  # then rows hold several lives
  lines = Lines()
  for life in range(1, 21):
    lines.start(4.0 * life, incarnation=life)
    lines.train(0, 3, 4.0 * life + 1, incarnation=life)
  kept = painting.LifeSpan(20, 0, 3)
  spans = [painting.LifeSpan(life, 0, 3) for life in range(1, 20)]
  found = goodput.goodput(lines.view(), {0: spans}, 1)
  assert found.useful_chip_secs == pytest.approx(kept.last - kept.first)
  assert found.lost_chip_secs["in vain"] == pytest.approx(19 * 3)


def test_first_step_is_not_counted_as_start_too():
  lines = Lines()
  lines.launch(0)
  lines.train(0, 2, 12, step_secs=4.0, gap_secs=None)
  lines.control(13.0, events.RUN_FINISHED, status="finished")
  found = goodput.goodput(lines.view(), {}, 1)
  assert found.useful_chip_secs == pytest.approx(8.0)
  assert found.lost_chip_secs["starting"] == pytest.approx(8.0)


def test_speed_after_a_pause_is_that_of_the_new_life():
  lines = Lines(num_islands=1)
  lines.start(0)
  lines.train(0, 10, 1)
  lines.control(11.0, events.RUN_FINISHED, status="stopped", reason="asked")
  lines.control(90_000.0, events.RUN_STARTED, islands=1, total_tokens=1000)
  lines.start(90_001.0, incarnation=2, step=10)
  lines.train(10, 14, 90_002.0, incarnation=2)
  assert lines.view().islands[0].tokens_per_sec(90_006.0) == pytest.approx(10.0)


def test_target_is_back_after_time_that_the_run_was_on():
  lines = _two_islands()
  lines.die(31.0)
  lines.control(32.0, events.RUN_FINISHED, status="stopped", reason="asked")
  lines.control(90_000.0, events.RUN_STARTED, islands=2, total_tokens=1000)
  lines.launch(90_001.0, incarnation=2)
  lines.start(90_002.0, incarnation=2, step=30)
  lines.train(30, 31, 90_004.0, incarnation=2)
  (incident,) = incidents.find(lines.view())
  assert incident.back_secs == pytest.approx(5.0)


def test_gap_in_the_first_steps_of_a_long_run_is_seen(monkeypatch):
  monkeypatch.setattr(series, "LIMIT", 8)  # then steps share rows
  lines = _two_islands()
  lines.metrics[1][2]["gap_secs"] = 9.0  # ends at 4
  lines.die(2.5)
  (incident,) = incidents.find(lines.view())
  assert incident.gap_over_median == {1: pytest.approx(9.0)}


def test_survivor_that_never_steps_again_shows_its_open_gap():
  lines = _two_islands()  # both step until 31
  lines.die(30.5)
  lines.control(91.0, events.SYNCER_STARTED, pid=1)
  (incident,) = incidents.find(lines.view())
  assert incident.kind == "died" and not incident.injected
  assert incident.gap_over_median == {1: pytest.approx(60.0)}
  assert incident.back_secs is None


def test_faults_and_deaths_are_paired_by_target():
  lines = _two_islands()
  for wall, target in ((5.0, "syncer"), (6.0, "island-1")):
    lines.control(wall, events.FAULT_INJECTED, kind="sigkill", target=target)
  lines.control(6.5, events.SYNCER_DIED, cause="signal 9")
  lines.add("syncer", 2, 8.0, events.LEASE_ACQUIRED, token=2)
  lines.die(7.0, island=1)
  lines.die(9.0, island=0)
  found = incidents.find(lines.view())
  assert [(i.target, i.injected, i.kind) for i in found] == [
    ("syncer", True, "sigkill"),
    ("island-1", True, "sigkill"),
    ("island-0", False, "died"),
  ]
  assert found[0].back_secs == pytest.approx(3.0)
  assert set(found[0].gap_over_median) == {0, 1}  # both lived
  assert found[2].gap_over_median == {}  # nobody was left


def test_seats_that_led_are_told_from_those_that_waited():
  lines = _two_islands()
  lines.add("syncer", 1, 1.0, events.LEASE_ACQUIRED, token=1)
  fault = {"kind": "sigkill", "target": "syncer"}
  lines.control(5.0, events.FAULT_INJECTED, **fault)
  died = {"cause": "SIGKILL", "seat": "syncer", "led": True}
  lines.control(5.1, events.SYNCER_DIED, **died)
  lines.control(5.6, events.SYNCER_STARTED, pid=2, seat="syncer")
  lines.add("standby", 1, 6.2, events.LEASE_ACQUIRED, token=2)
  died = {"cause": "SIGKILL", "seat": "syncer", "led": False}
  lines.control(8.0, events.SYNCER_DIED, **died)
  lines.control(8.5, events.SYNCER_STARTED, pid=3, seat="syncer")
  view = lines.view()
  assert view.takeovers == 1
  assert len(view.syncer_deaths) == len(view.standby_deaths) == 1
  found = incidents.find(view)
  assert [(i.target, i.injected) for i in found] == [
    ("syncer", True),
    ("standby", False),
  ]
  # Merging goes on when somebody leads, not when a process starts.
  assert found[0].back_secs == pytest.approx(1.2)
  assert found[1].back_secs == pytest.approx(0.5)


def test_leader_that_leaves_in_order_is_not_taken_over_from():
  lines = _two_islands()
  lines.add("syncer", 1, 1.0, events.LEASE_ACQUIRED, token=1)
  lines.control(20.0, events.RUN_FINISHED, status="stopped", reason="asked")
  lines.control(21.0, events.RUN_STARTED, islands=2, total_tokens=1000)
  lines.add("syncer", 2, 22.0, events.LEASE_ACQUIRED, token=2)
  assert lines.view().takeovers == 0


def test_staleness_and_versions_come_from_merges_once():
  lines = _two_islands()
  merged = {
    "fragment": 2,
    "version": 1,
    "contributions": [
      {"island": 0, "staleness": 0},
      {"island": 1, "staleness": 3},
    ],
  }
  for wall in (5.0, 6.0):  # told again after a takeover
    lines.add("syncer", 1, wall, events.MERGED, **merged)
  view = lines.view()
  assert view.merges.count == 1 and view.merges.staleness == 1.5
  assert view.islands[1].staleness_mean == 3.0
  assert view.versions == {2: 1} and view.num_fragments == 3


def test_speed_is_of_the_last_steps_and_falls_to_zero_in_silence():
  island = _two_islands().view().islands[0]
  assert island.tokens_per_sec(32.0) == pytest.approx(10.0)
  assert island.tokens_per_sec(500.0) == 0.0


def test_tokens_at_counts_all_islands():
  view = _two_islands().view()  # the first steps end at 2
  tokens = view.tokens_at(np.array([1.9, 2.0, 3.5, 1000.0]))
  assert tokens.tolist() == [0, 20, 40, 600]


def test_losses_on_samples_of_different_sizes_are_lines_apart():
  view = view_lib.RunView()
  view.config = {"task": {"name": "language_model"}}
  for at, tokens, loss in [(1, 512, 3.9), (2, 512, 3.0), (3, 8192, 4.36)]:
    view.global_evals.append(view_lib.Eval(at, 0, loss, tokens))
  chart = charts.Charts(view).loss_by_time()
  lines = {line["name"]: len(line["x"]) for line in chart["lines"]}
  assert lines == {
    "global, 512 held-out bytes": 2,
    "global, 8.19 k held-out bytes": 1,
  }
  assert chart["y"]["label"] == "bits per byte"


def test_scalars_of_the_last_step_are_shown():
  island = island_view.IslandView(0)
  for step in (1, 2):
    line = {"step": step, "wall_secs": 1.0, "grad_norm": 2.0 * step, **_STEP}
    island.log(line | {"task": {"nll": 1.5, "junk": "x"}, "incarnation": 1})
  assert island.metrics == {"grad_norm": 4.0, "nll": 1.5}


@pytest.mark.parametrize(
  ("config", "gain"),
  [
    ({"outer": {"learning_rate": 0.7, "momentum": 0.9}}, 7.0),
    ({"outer": {"learning_rate": 0.7}}, 0.7),
    ({}, None),
    ({"outer": 3}, None),
    ({"outer": {"momentum": 1}}, None),
  ],
)
def test_gain_of_the_outer_optimizer(config, gain):
  view = view_lib.RunView()
  view.config = config
  found = view.outer_gain
  assert found == (gain and pytest.approx(gain))


def test_what_the_evaluator_does_is_shown_and_is_no_syncer_s_doing():
  lines = _trained()
  lines.control(2.5, events.REATTACHED, peer="evaluator", pid=3)
  told = {"target": "global", "step": 2, "loss": 1.5, "tokens": 8}
  lines.add("evaluator", 1, 3.0, events.EVALUATED, **told, skipped=1)
  view = lines.view()
  assert view.syncer_leads == []
  assert view.global_evals == [view_lib.Eval(3.0, None, 1.5, 8)]
  ledger.compute(reader.Record(lines.events, lines.metrics, []))
  drawn = charts.Charts(view).timeline([])
  assert drawn["rows"][1:] == ["syncer, evaluator"]
  assert [mark[0] for mark in drawn["marks"]] == [1]
