"""Process of one island: `python -m diloco.islands.main`."""

import argparse
import gc
import os
import pathlib
import sys

from diloco import process
from diloco.islands import devices


def main(argv: list[str] | None = None) -> int:
  """Joins the run, runs programs, leaves. Returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--run_dir", type=pathlib.Path, required=True)
  parser.add_argument("--island", type=int, required=True)
  parser.add_argument("--incarnation", type=int, required=True)
  parser.add_argument("--slice", type=int, required=True)
  parser.add_argument("--cores", type=int, nargs="*", default=[])
  args = parser.parse_args(argv)
  process.setup_role(args.cores, args.run_dir, f"island-{args.island}")
  try:
    return _run(args)
  except Exception as error:
    return process.end_with(error, sys.stderr)


def _run(args: argparse.Namespace) -> int:
  config = process.read_config(args.run_dir, or_copy=True)
  hardware = config.fleet.slices[args.slice]
  indices = config.fleet.device_indices(args.slice)
  # JAX reads these once, so it is imported only now.
  os.environ |= devices.environ(indices, os.environ)
  import jax

  from diloco import relay
  from diloco.islands import compilation, programs
  from diloco.islands import island as island_lib
  from diloco.tasks import registry

  compilation.use_cache(args.run_dir / "compilation_cache")
  task = registry.make_task(
    config.task.name, config.task.options, config.replicas
  )
  role = f"island-{args.island}"
  with relay.relayed(args.run_dir, role, args.incarnation) as recorded:
    programs.live(
      island_lib.Spec(
        run_dir=args.run_dir,
        store_url=process.store_url(args.run_dir),
        island=args.island,
        incarnation=args.incarnation,
        slice=hardware,
        recorded=recorded,
      ),
      config,
      task,
      devices.of_slice(indices, jax.devices()),
      joined=_settle,
    )
  return 0


def _settle() -> None:
  """Start-up is over.

  All that it made stays. Every full collection would look at it again, which
  stops a step for a tenth of a second and more.
  """
  gc.collect()
  gc.freeze()
  gc.enable()


if __name__ == "__main__":
  gc.disable()  # until `_settle`; a tenth of all imports is the search
  process.leave(main())
