"""A real run one of whose islands computes values that are not finite."""

import math

from diloco.tape import reader


def test_poisoned_island_is_refused_told_and_trains_on(make_run):
  run = make_run(
    faults=({"target": "island-1", "at_fraction": 0.3, "kind": "poison"},),
  )
  code, _, err = run.start().finish()
  assert code == 0, err
  events = reader.read(run.dir, strict=True).events
  facts = run.summary()

  def of(name):
    return [e for e in events if e["event"] == name]

  (poisoned,) = of("poisoned")
  assert poisoned["role"] == "island-1"
  refused = [e for e in of("discarded") if e["reason"] == "not_finite"]
  assert refused and {e["island"] for e in refused} == {1}
  assert {e["island"] for e in of("quarantined")} == {1}
  resynced = of("resynced")
  assert {e["role"] for e in resynced} == {"island-1"}
  healed = resynced[-1]["step"]
  again = [
    c["step"]
    for e in of("merged")
    for c in e["contributions"]
    if c["island"] == 1 and c["step"] > healed
  ]
  assert again, "the healed island did not contribute again"
  assert facts["status"] == "finished"
  assert math.isfinite(facts["final_eval_loss"])
  assert facts["islands"]["1"]["restarts"] == 0
  assert facts["tokens_discarded"]["not_finite"] > 0
  assert facts["violations"] == [] and facts["tokens_unaccounted"] == 0
  assert facts["ledger"]["balanced"]
  (fault,) = facts["faults"]
  assert (fault["kind"], fault["target"]) == ("poison", "island-1")
  assert fault["back_secs"] > 0
