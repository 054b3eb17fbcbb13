"""Islands that train a small vision transformer on drawn characters.

Question: is what holds for language models true of another kind? Glyphs of the
fonts that matplotlib brings along are told apart by the kinds of their
characters, script and category; a token here is one image.

Command: `diloco train --config=experiments/configs/vision.py --workdir=DIR`;
afterwards `diloco evaluate DIR` tells the loss on unseen characters and on
unseen fonts, each for itself.
Cost: five minutes on two cores.
Expected: 1.7 held-out nats an image, 1.4 of unseen characters and 1.8 of unseen
fonts (one run); the frequencies of kinds alone cost 3.5.
Reference: ViT, arXiv 2010.11929, for the model.

Variants: `:smoke` trains a tiny model for half a minute.
"""

import ml_collections

from experiments.configs import quickstart


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "" or "smoke"."""
  smoke = variant == "smoke"
  config = quickstart.like("vision", variant)
  config.faults = ()
  config.task = ml_collections.ConfigDict(
    dict(
      name="vision",
      options=dict(
        d_model=32 if smoke else 64,
        num_layers=2 if smoke else 4,
        d_ff=96 if smoke else 192,
        batch_size=16 if smoke else 32,
        learning_rate=0.003,
      ),
    )
  )
  # Five times through the glyphs; beyond it the held-out loss rises.
  config.total_tokens = 12_000 if smoke else 200_000
  config.fleet.pace_step_secs = 0.03
  config.programs.eval_every_tokens = 4_000 if smoke else 20_000
  config.programs.final_eval_batches = 8 if smoke else 128
  return config
