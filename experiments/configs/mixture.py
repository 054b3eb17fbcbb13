"""Islands that train a mixture of experts: 2 of 8 experts for each token.

Question: does a mixture merge as well as a dense model, its experts being
trained on other tokens on each island? A token costs the operations of the
quickstart's model, which has a third of the parameters. The metrics have each
expert's share of the tokens (`expert_<e>_share`), and what was dropped.

Command: `diloco train --config=experiments/configs/mixture.py --workdir=DIR`.
An island on two devices of its own, four experts on each:
`--config.fleet.slices[0].topology=1x2`.
Cost: four minutes on two cores.
Expected: 2.42 held-out bits per byte (one run), and almost nothing dropped in
the end. The dense model comes to 2.37 on as many tokens: so few are not enough
for three times the parameters.
Reference: Switch Transformers, arXiv 2101.03961, for the loss that balances.

Variants: `:smoke` trains a tiny model for half a minute.
"""

import ml_collections

from experiments.configs import quickstart


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "" or "smoke"."""
  smoke = variant == "smoke"
  config = quickstart.like("mixture", variant)
  config.faults = ()
  config.total_tokens = 200_000 if smoke else 1_200_000
  config.fleet.pace_step_secs = 0.05 if smoke else 0.15
  # A batch is four rows of one text each, which prefer the same experts.
  config.task.options.update(
    num_experts=8,
    experts_per_token=2,
    d_ff=24 if smoke else 192,
    capacity_factor=1.5,
    balance_loss=0.1,
  )
  return config
