"""Process of one island: `python -m diloco.islands.main`."""

import argparse
import gc
import os
import pathlib
import sys
import traceback

from diloco import channel as channel_lib
from diloco import errors, process, workers
from diloco.islands import devices
from diloco.snapshots import records


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
  except errors.UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return process.EXIT_USER_ERROR
  except (errors.CorruptSnapshotError, workers.WorkerError) as error:
    process.print_error(error)
    return process.EXIT_FAILED
  except Exception as error:
    # The controller tells a mistake in the task by the line in which it ends.
    traceback.print_exception(error)
    print(f"error: {errors.with_place(error)}", file=sys.stderr)
    return process.EXIT_FAILED


def _run(args: argparse.Namespace) -> int:
  config = process.read_config(args.run_dir, or_copy=True)
  hardware = config.fleet.slices[args.slice]
  indices = config.fleet.device_indices(args.slice)
  # JAX reads these once, so it is imported only now.
  os.environ |= devices.environ(indices, os.environ)
  import jax

  from diloco.islands import compilation, programs
  from diloco.islands import island as island_lib
  from diloco.tasks import registry

  compilation.use_cache(args.run_dir / "compilation_cache")
  channel = channel_lib.Client(
    args.run_dir,
    f"island-{args.island}",
    {"island": args.island, "incarnation": args.incarnation, "ready": False},
  )

  def report(member: records.Member, standing: tuple[int, float]) -> None:
    channel.set_hello(step=member.step)
    progress, extra_secs = standing
    channel.send(
      {
        "type": "status",
        "step": member.step,
        "step_secs": member.step_secs,
        "progress": progress,
        "extra_secs": extra_secs,
      }
    )

  task = registry.make_task(
    config.task.name, config.task.options, config.replicas
  )
  island = island_lib.Island(
    island_lib.Spec(
      run_dir=args.run_dir,
      store_url=process.store_url(args.run_dir),
      island=args.island,
      incarnation=args.incarnation,
      slice=hardware,
    ),
    config,
    task,
    devices.of_slice(indices, jax.devices()),
    report=report,
  )
  island.join()
  # All that start-up made stays. Every full collection would look at it again,
  # which stops a step for a tenth of a second and more.
  gc.collect()
  gc.freeze()
  channel.set_hello(ready=True, step=island.step)
  channel.send({"type": "ready", "step": island.step})
  reason = programs.ProgramRunner(island, channel, config).run()
  island.close(reason)
  channel.close()
  return 0


if __name__ == "__main__":
  code = main()
  if code:
    # Other threads may be at work still; to take things down under them aborts.
    sys.stderr.flush()
    os._exit(code)
