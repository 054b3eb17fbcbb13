"""How XLA compiles: where that is kept, by whom, and in how many threads.

A program's key must not depend on where the cache is: JAX would make the place
of its per-fusion autotuning results, below the cache, part of every key. Those
are switched off; what was tuned is in the compiled program anyway.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import (
  core,  # that of jax.extend, which would load Pallas
  xla_bridge,
)

from diloco.islands import surroundings

Numbers = dict[str, Any]
_LOOPS = ("while", "scan", "cond")
_LONGEST_WAIT_SECS = 600.0
_POLL_SECS = 0.05
_DEFAULTS = {
  "jax_persistent_cache_min_compile_time_secs": 0.05,  # a fragment's programs
  "jax_persistent_cache_enable_xla_caches": "none",
}


def use_cache(folder: pathlib.Path) -> None:
  """Compiles nothing twice.

  It is kept in this folder, unless the environment names another place in
  `JAX_COMPILATION_CACHE_DIR`, which several runs may share.
  """
  for name, value in {
    "jax_compilation_cache_dir": str(folder),
    **_DEFAULTS,
  }.items():
    if name.upper() not in os.environ:
      jax.config.update(name, value)


def compiled(jitted: Any, *args: Any) -> jax.stages.Compiled:
  """Compiles a jitted function for such arguments.

  Of processes that share a cache and begin with the same program at the same
  time, as the islands of a new run do, one compiles and the others wait for it.
  """
  lowered = jitted.lower(*args)
  program = hashlib.blake2b(lowered.as_text().encode(), digest_size=16)
  with _in_turn(program.hexdigest()):
    return lowered.compile()


def numbers_apart(
  function: Callable[..., Any], *args: Any
) -> tuple[Numbers, Callable[..., Any]]:
  """Makes arguments of the numbers that a function computes scalars from.

  A learning rate and the length of its schedule are constants of the traced
  program, and a program with others is compiled anew. What is computed from
  them alone is a handful of scalars, in which a compiler has nothing to gain
  from knowing them. Numbers that meet arrays stay where they are.

  The function is traced once, with `args` as examples.

  Returns:
    The numbers by dtype, each `[n]`, and a function of these and the arguments.
  """
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  jaxpr = closed.jaxpr
  values: dict[str, list[Any]] = {}
  variables: list[tuple[core.Var, str, int]] = []

  def apart(atom: Any) -> Any:
    if not _is_number(atom):
      return atom
    variable, dtype = core.Var(atom.aval), atom.aval.dtype.name
    alike = values.setdefault(dtype, [])
    variables.append((variable, dtype, len(alike)))
    alike.append(atom.val)
    return variable

  equations = [
    eqn.replace(invars=[apart(atom) for atom in eqn.invars])
    if _is_of_scalars(eqn)
    else eqn
    for eqn in jaxpr.eqns
  ]
  general = jaxpr.replace(
    constvars=[*jaxpr.constvars, *(variable for variable, *_ in variables)],
    eqns=equations,
  )

  def with_numbers(numbers: Numbers, *args: Any) -> Any:
    found = [numbers[dtype][i] for _, dtype, i in variables]
    program = core.ClosedJaxpr(general, [*closed.consts, *found])
    out = core.jaxpr_as_fun(program)(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), out)

  return {k: np.asarray(v, k) for k, v in values.items()}, with_numbers


def _is_number(atom: Any) -> bool:
  return isinstance(atom, core.Literal) and atom.aval.dtype != bool


def _is_of_scalars(eqn: core.JaxprEqn) -> bool:
  """Whether it computes scalars from scalars, and loops over nothing."""
  return eqn.primitive.name not in _LOOPS and all(
    getattr(atom.aval, "shape", None) == ()
    for atom in (*eqn.invars, *eqn.outvars)
  )


@contextlib.contextmanager
def _in_turn(name: str) -> Iterator[None]:
  """Lets one at a time in, by name, as long as that can be had.

  Only thrift rests on it: whoever dies lets the next one in, and nobody waits
  for one that hangs for longer than `_LONGEST_WAIT_SECS`.
  """
  folder = jax.config.jax_compilation_cache_dir
  if not folder or "://" in folder:
    yield
    return
  turn = pathlib.Path(folder, f"{name}.turn")
  with contextlib.ExitStack() as stack:
    with contextlib.suppress(OSError):  # then everybody compiles
      turn.parent.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(turn.open("a"))
      deadline = time.monotonic() + _LONGEST_WAIT_SECS
      while not _locked(file.fileno()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    yield
    with contextlib.suppress(OSError):  # gone, or not ours to delete
      turn.unlink()


def _locked(file: int) -> bool:
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


def in_one_thread() -> None:
  """Has XLA compute in one thread from now on, however many cores there are.

  For runs in virtual time, which are the same on any number of cores then. A
  process that has computed already goes on as it began; its tapes say how.
  """
  if xla_bridge.backends_are_initialized():
    return
  name = surroundings.THREADS
  before = os.environ.get(name)
  os.environ[name] = "1"
  jax.devices()
  surroundings.forced[name] = os.environ.pop(name)
  if before is not None:  # what else this process starts has its cores
    os.environ[name] = before
