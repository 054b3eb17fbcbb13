"""The run's evaluator: what it reads, measures, records and answers."""

import functools
import os
import pathlib
import queue

import pytest
from cut_builder import PLAN, CutRun, filled
from observing import python

from diloco import heartbeat
from diloco.islands import evaluator as evaluator_lib
from diloco.snapshots import arrays, keys
from diloco.tape import reader, recorder

AUTOGROUP = pathlib.Path("/proc/self/autogroup")  # of some Linux kernels


@pytest.fixture
def run(tmp_path):
  made = CutRun(tmp_path)
  made.commit(0, 1, {}, value=2.0)  # tensor "a", of four
  return made


@pytest.fixture
def evaluator(run):
  tape = recorder.Recorder(run.dir, evaluator_lib.ROLE, 1)

  def measure(params, num_batches):
    loss = float(sum(x.sum() for x in params.values()))
    return {"loss": loss, "tokens": num_batches, "bits_per_token": loss}

  yield functools.partial(evaluator_lib.evaluate, run.store, tape, measure)
  tape.close()


ASKED = {"num_batches": 2, "step": 7, "skipped": 3}


def told(run):
  return reader.read(run.dir, strict=True).events


def test_newest_versions_are_measured_and_go_on_the_tape(run, evaluator):
  result = evaluator(**ASKED)
  assert result["loss"] == 8.0
  assert (result["version"], result["newest_version"]) == (0, 1)
  (line,) = told(run)
  assert (
    line.items()
    >= {
      **{"event": "evaluated", "role": "evaluator", "target": "global"},
      **{"step": 7, "skipped": 3, "tokens": 2},
      **result,
    }.items()
  )


def damage(run):
  wrong = filled(PLAN.fragments[0][0], 3.0)
  prefix = f"{run.head(0).payload}/params"
  run.store.arrays.write(prefix, [arrays.Tensor.whole("a", wrong)])


@pytest.mark.parametrize(
  ("strike", "why"),
  [
    (damage, "its digest differs"),
    (lambda run: run.store.delete(keys.head_key(1)), "its head is lost"),
    (lambda run: run.store.delete(keys.head_key(0)), "has none yet"),
  ],
)
def test_what_cannot_be_read_is_not_measured(run, evaluator, strike, why):
  strike(run)
  assert why in evaluator(**ASKED)["error"]
  assert told(run) == []


class Channel:
  """Says what is written down for it; then it is alone."""

  def __init__(self, *said):
    self.said = list(said)
    self.sent = []
    self.inbox = self

  def get(self, timeout):
    if not self.said or self.said[0] is None:
      self.said = self.said[1:]
      raise queue.Empty
    return self.said.pop(0)

  def send(self, message):
    self.sent.append((message["type"], message["seq"], message["result"]))

  def alone_secs(self):
    return 0.0 if self.said else 100.0


def program(seq, name, **args):
  return {"type": "program", "seq": seq, "name": name, "args": args}


def measured(**args):
  return {"loss": 1.0, **args}


@pytest.mark.parametrize("last", [program(3, "stop"), None])
def test_it_answers_until_it_is_told_to_stop_or_left_alone(last):
  channel = Channel(
    {"type": "welcome"},
    program(1, "configure", settings={}),
    None,
    program(2, "evaluate", step=5),
    last,
  )
  evaluator_lib._serve(channel, 10.0, measured, heartbeat.Progress())
  answers = [(1, {}), (2, {"loss": 1.0, "step": 5})] + [(3, {})] * bool(last)
  assert channel.sent == [("done", *answer) for answer in answers]


def test_it_rests_nine_times_as_long_as_it_works_unless_somebody_waits():
  worked, slept, awaited = [100.0], [], []
  pace = evaluator_lib.Pace(
    lambda: bool(awaited), lambda: worked[0], slept.append
  )
  pace.rest()
  assert not slept  # to load and compile is not what is repeated
  worked[0] += 0.25
  pace.rest()
  assert sum(slept) == pytest.approx(2.25)
  pace.rest()
  assert sum(slept) == pytest.approx(2.25)  # nothing done, nothing rested
  awaited.append("stop")
  worked[0] += 0.25
  pace.rest()
  assert sum(slept) == pytest.approx(2.25)


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="sessions are no groups")
@pytest.mark.parametrize("alone", [True, False])
def test_others_of_its_session_do_not_give_way_with_it(alone):
  code = (
    "from diloco.islands import evaluator; evaluator._give_way();"
    f"print(open({str(AUTOGROUP)!r}).read())"
  )
  before = AUTOGROUP.read_text()  # of who is in no group: empty
  told = python(code, start_new_session=alone)
  assert AUTOGROUP.read_text() == before
  after = told.strip()
  assert after.endswith(" 19") if alone else after == before.strip()


@pytest.mark.parametrize("cores", [[], sorted(os.sched_getaffinity(0))[:1]])
def test_without_a_core_of_its_own_it_runs_while_nobody_else_wants_to(
  tmp_path, cores
):
  code = f"""
import os
from diloco.islands import evaluator
evaluator.live = lambda *_: print(os.getpriority(0, 0), os.sched_getaffinity(0))
evaluator.main(["--run_dir", {str(tmp_path)!r}, "--incarnation", "1"] + {
    ["--cores", *map(str, cores)]
  })
"""
  nice, _, bound = python(code).partition(" ")
  if cores:
    assert (int(nice), bound.strip()) == (
      os.getpriority(0, 0),
      f"{{{cores[0]}}}",
    )
  else:
    assert int(nice) == min(19, os.getpriority(0, 0) + 19)
