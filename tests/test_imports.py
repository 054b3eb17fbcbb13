"""The one-way layering of the packages, read from their import statements."""

import ast
import pathlib

import pytest
from observing import loaded_by

import diloco

ROOT = pathlib.Path(diloco.__file__).parent.parent

# What each layer may use of the project; a package may always use itself.
BASE = {"diloco.errors", "diloco.crash", "diloco.own_file"}
CONFIG = BASE | {
  *("diloco.config", "diloco.config_changes"),
  *("diloco.typed", "diloco.fragments"),
}
STORE = BASE | {"diloco.fragments", "diloco.snapshots", "diloco.tape"}
REPORT = CONFIG | STORE
PROCESS = CONFIG | {"diloco.process", "diloco.channel"}
ROLE = PROCESS | STORE
ROLE |= {"diloco.relay", "diloco.timing", "diloco.workers"}
ROLE |= {"diloco.heartbeat"}
CONTROLLER = ROLE | {"diloco.report"}
ALLOWED = {
  "diloco.errors": set(),
  "diloco.own_file": {"diloco.errors"},
  "diloco.crash": set(),
  "diloco.arguments": BASE | {"diloco.typed"},
  "diloco.commands": BASE | {"diloco.arguments", "diloco.logbook"},
  "diloco.typed": BASE,
  "diloco.hyper": BASE,
  "diloco.methods": {"diloco.errors", "diloco.typed"},
  "diloco.config": CONFIG | {"diloco.config_checks", "diloco.methods"},
  "diloco.config_changes": CONFIG,
  "diloco.config_checks": CONFIG,
  "diloco.channel": BASE,
  "diloco.process": CONFIG,
  "diloco.heartbeat": PROCESS
  | {"diloco.snapshots", "diloco.workers", "diloco.report.liveness"},
  "diloco.timing": CONFIG | {"diloco.snapshots"},
  "diloco.promises": BASE
  | {"diloco.snapshots", "diloco.timing", "diloco.workers"},
  "diloco.workers": {"diloco.errors", "diloco.snapshots"},
  "diloco.relay": STORE | {"diloco.process", "diloco.workers"},
  "diloco.logbook": STORE
  | {"diloco.process", "diloco.relay", "diloco.workers"},
  "diloco.moving": CONTROLLER | {"diloco.controller", "diloco.logbook"},
  "diloco.fragments": BASE,
  "diloco.snapshots": BASE | {"diloco.fragments"},
  "diloco.tape": BASE,
  "diloco.tasks": BASE,
  "diloco.syncer": ROLE,
  "diloco.islands": ROLE | {"diloco.tasks"},
  "diloco.report": REPORT | {"diloco.process"},
  "diloco.replay": ROLE
  | {"diloco.islands", "diloco.syncer", "diloco.tasks", "diloco.report"},
  "diloco.controller": CONTROLLER,
  "diloco.inline": ROLE
  | {
    *("diloco.controller.engines.base", "diloco.islands"),
    *("diloco.syncer", "diloco.tasks"),
  },
  "diloco.virtual": ROLE
  | {
    "diloco.controller.outcome",
    "diloco.controller.pilot",
    "diloco.islands",
    "diloco.planning.fleet.traces",
    "diloco.syncer",
    "diloco.tasks",
  },
  "diloco.verification": STORE
  | {
    *("diloco.config", "diloco.timing", "diloco.workers"),
    *("diloco.controller.core", "diloco.controller.cutter"),
    *("diloco.controller.orders", "diloco.controller.outcome"),
    *("diloco.controller.program", "diloco.controller.resources"),
    *("diloco.controller.move", "diloco.islands", "diloco.syncer"),
  },
  "diloco.planning.bandwidth": BASE | {"diloco.fragments", "diloco.arguments"},
  "diloco.planning.fleet": REPORT
  | {
    "diloco.islands",
    "diloco.syncer",
    "diloco.report",
    "diloco.arguments",
    "diloco.hyper",
  },
  "diloco.planning.planner": CONFIG
  | {
    "diloco.arguments",
    "diloco.planning.bandwidth",
    "diloco.planning.fleet",
    *("diloco.islands.trial", "diloco.launch", "diloco.tasks"),
  },
  "diloco.planning": set(),
  "diloco.workbench.doctor": CONTROLLER
  | {
    "diloco.controller",
    "diloco.islands",
    "diloco.launch",
    "diloco.planning",
    "diloco.promises",
    "diloco.run",
    "diloco.syncer.grace",
    "diloco.tasks",
    "diloco.workbench",
  },
  "diloco.workbench": ROLE
  | {
    *("diloco.islands", "diloco.tasks", "diloco.report", "diloco.controller"),
    *("diloco.hyper", "diloco.planning.fleet", "diloco.run", "diloco.launch"),
    *("diloco.logbook", "diloco.arguments", "diloco.methods"),
  },
}
# `run` puts everything together; `cli` and `experiments` stand above it.
TOP = (
  "diloco.run",
  "diloco.launch",
  "diloco.chaos",
  "diloco.workbench",
  "diloco.__main__",
  "diloco.cli",
  "diloco.completion",
  "diloco.interface",
  "experiments",
)


def module_name(path):
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
  module_name(path): path
  for package in ("diloco", "experiments")
  for path in sorted((ROOT / package).rglob("*.py"))
}


def imports_of(name):
  """Modules of the project that a module imports, at any place in it."""
  found = set()
  for node in ast.walk(ast.parse(MODULES[name].read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{name} has a relative import"
      base = node.module or ""
      found |= {
        f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base
        for alias in node.names
      }
  return {m for m in found if m.partition(".")[0] in ("diloco", "experiments")}


def within(module, layers):
  return any(f"{module}.".startswith(f"{layer}.") for layer in layers)


def layer_of(name):
  return next((layer for layer in ALLOWED if within(name, [layer])), None)


def test_modules_are_found():
  assert {"diloco.run", "diloco.syncer.core", "experiments.launch"} <= set(
    MODULES
  )
  assert "diloco.fragments.partition" in imports_of("diloco.run")
  assert "diloco.launch" in imports_of("diloco.cli")


def wrong_imports(name):
  """What a module imports and may not."""
  layer = layer_of(name)
  imported = sorted(imports_of(name))
  if layer is not None:
    allowed = {layer, *ALLOWED[layer]}
    return [m for m in imported if not within(m, allowed)]
  if name == "diloco.run":
    return [m for m in imported if within(m, TOP)]
  # Whoever adds a package says above what it may use.
  return [] if name == "diloco" or within(name, TOP) else ["not in ALLOWED"]


def test_imports_point_one_way():
  wrong = {name: wrong_imports(name) for name in MODULES}
  assert {name: found for name, found in wrong.items() if found} == {}


def test_wrong_import_is_found(monkeypatch, tmp_path):
  path = tmp_path / "stray.py"
  path.write_text("def f():\n  from diloco.syncer import core\n")
  monkeypatch.setitem(MODULES, "diloco.islands.stray", path)
  assert wrong_imports("diloco.islands.stray") == ["diloco.syncer.core"]


@pytest.mark.parametrize(
  ("package", "other"),
  [("diloco.islands", "diloco.syncer"), ("diloco.syncer", "diloco.islands")],
)
def test_islands_and_syncer_never_import_each_other(package, other):
  for name in MODULES:
    if within(name, [package]):
      assert [m for m in imports_of(name) if within(m, [other])] == []


# Seconds of start-up and hundreds of megabytes for roles that do no training.
@pytest.mark.parametrize(
  "module",
  ["diloco.syncer.main", "diloco.cli", "diloco.controller.controller"],
)
def test_role_starts_without_jax(module):
  loaded = loaded_by(f"import {module}")
  assert "diloco" in loaded
  assert not loaded & {"jax", "jaxlib", "flax", "optax", "grain"}
