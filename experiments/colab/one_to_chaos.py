# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From one island to chaos
#
# Decoupled DiLoCo trains one model on several *islands* that never wait for each
# other. This notebook trains a tiny language model on Python's own sources, first
# on one island, then on three of unequal speed; kills what it can; changes settings
# on the way; and takes the result out. Two processor cores and five minutes are
# enough. On a fresh machine run `pip install '.[workbench]'` in a clone first.
#
# With the engine `inline` islands and syncers are threads of this notebook's own
# process, so a run begins at once. They talk through a store on the disk as they do
# across processes and machines, and everything below is the same without that line.

# %%
import pathlib
import tempfile

import matplotlib.pyplot as plt

import diloco
from experiments.configs import quickstart

folder = pathlib.Path(tempfile.mkdtemp(prefix="diloco-story-"))
config = quickstart.get_config("smoke")
config.faults = ()  # we do that ourselves
config.engine = "inline"
config.fleet.slices = config.fleet.slices[:1]
config.total_tokens = 30_000

run = diloco.start(config, folder / "alone")
run.watch()

# %% [markdown]
# One island is ordinary training. Its steps are in a table, as are all others that
# follow.


# %%
def draw(*runs):
  """Training loss of every island of some runs, against its steps."""
  _, axes = plt.subplots(figsize=(7, 3))
  for one in runs:
    # Steps that are done again after a death count once.
    table = one.metrics().drop_duplicates(["island", "step"], keep="last")
    for island, steps in table.sort_values("step").groupby("island"):
      smooth = steps.loss.ewm(span=20).mean()
      axes.plot(steps.step, smooth, label=f"{one.dir.name}, island {island}")
  axes.set(xlabel="inner step", ylabel="training loss, nats per byte")
  axes.legend()


draw(run)
# %% [markdown]
# ## Three islands
#
# The second island makes 6 steps while the first makes 10, the third 4. Nobody
# waits: each publishes what it learned, fragment by fragment, and adopts what the
# syncer has merged. A cell that is run twice starts nothing twice, one that is
# interrupted stops nothing, and after a restart of the notebook it goes on with the
# run where that was.

# %%
config = quickstart.get_config("smoke")
config.faults = ()
config.engine = "inline"
config.total_tokens = 4_000_000  # more than you will stay for
alone, run = run, diloco.start(config, folder / "three")
run.watch(merges=20)

# %% [markdown]
# ## Kill one
#
# No warning: it does nothing more, whatever it was at. (A process would get a
# SIGKILL.) The others go on; the dead one comes back by itself, with its optimizer,
# its place in the data and what it had not sent yet.

# %%
run.kill("island-1")
run.watch(merges=10)

# %% [markdown]
# ## Kill who merges
#
# The standby takes over from the store alone, within `config.controller.takeover_secs`.

# %%
run.kill("syncer")
run.watch(merges=10)

# %% [markdown]
# ## Change your mind
#
# Quorum K, grace, H and the outer learning rate may change while the run is on. The
# tape says what was changed and when.

# %%
run.change(sync__quorum=2, sync__every=16, outer__learning_rate=0.8)

# %%
run.watch(merges=20)

# %% [markdown]
# ## Enough seen
#
# It drains, merges what is left and saves. `diloco.start` on its directory would go on.

# %%
run.stop()
run

# %%
draw(alone, run)
# %% [markdown]
# ## What became of every token
#
# Trained is merged plus pending plus discarded, and nothing is unaccounted for,
# whoever died.

# %%
names = ("trained", "merged", "pending", "unaccounted")
tokens = {name: run.summary[f"tokens_{name}"] for name in names}
assert tokens["unaccounted"] == 0
tokens

# %%
run.tape("config_changed").changes.tolist()

# %% [markdown]
# ## Why did a round close when it did?

# %%
merged = run.tape("merged")
last = merged.iloc[-1]
print(run.explain(int(last.fragment), int(last.version)))

# %% [markdown]
# ## Once more, to the same bits
#
# The tape holds every decision, so the run can be done again without its timing,
# its kills and its luck.

# %% magic_args="-s {run.dir}" language="bash"
# diloco replay "$1" --until_version=1

# %% [markdown]
# ## Take it away
#
# The global parameters are a tree of arrays; `diloco export` writes them for others.

# %%
params = run.params()
list(params), run.versions()

# %% magic_args="-s {run.dir}" language="bash"
# diloco sample "$1" --prompt="def " --tokens=80 --temperature=0.7

# %% [markdown]
# `run.report()` makes one page of everything.

# %%
run.report()
