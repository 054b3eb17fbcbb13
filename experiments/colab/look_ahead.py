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
# # Look ahead before you rent anything
#
# A simulator of fleets that fail, a simulator of the links between sites, and a
# planner that puts both to use. None of them trains; the syncer's decisions in them
# are those of a real run. Needs `pip install '.[workbench]'` in a clone, and a minute.

# %%
import pathlib

import matplotlib.pyplot as plt

import diloco
from experiments.fleets import four_regions

# %% [markdown]
# ## What do failures cost?
#
# A chip fails once a year. One synchronous job over all chips stands still whenever
# any of them does; islands lose only what failed. Means of two
# seeds.

# %%
chips = [19_200, 150_000]
figure, axes = plt.subplots(figsize=(6, 3))
for islands in (1, 8):
  found = [
    diloco.simulate(
      chips=n, islands=islands, mtbi_years=1, days=1, seeds=2, elastic=False
    )["goodput"]
    for n in chips
  ]
  axes.plot(chips, [f["mean"] for f in found], "o-", label=f"M = {islands}")
axes.set(xscale="log", xlabel="chips", ylabel="goodput", ylim=(0, 1))
axes.legend()
# %% [markdown]
# ## What must the links deliver?
#
# Gbit/s between two sites for each share of the time that accelerators shall compute,
# one synchronous job against Decoupled DiLoCo and others.

# %%
# !diloco simulate --bandwidth --params=1e9 --layers=24 --step_secs=0.1 --sites=2

# %% [markdown]
# ## What would you propose?
#
# Four regions with different chips and 3 Gbit/s between them; a model of 12 billion
# parameters. A fleet is a Python file.

# %%
fleet = pathlib.Path(four_regions.__file__)
diloco.plan(fleet, params=12e9, wan_gbps=3)
