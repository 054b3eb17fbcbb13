"""An island's life: it joins, says that it is ready, does programs, leaves."""

from collections.abc import Callable, Sequence

import jax

from diloco import channel as channel_lib
from diloco import config as config_lib
from diloco import workers
from diloco.islands import island as island_lib
from diloco.islands import link, runner
from diloco.islands import trainer as trainer_lib
from diloco.snapshots import operations, records
from diloco.tasks import task as task_lib


def live(
  spec: island_lib.Spec,
  config: config_lib.RunConfig,
  task: task_lib.Task,
  devices: Sequence[jax.Device],
  threads: workers.Threads = workers.Threads(),
  like: trainer_lib.Trainer | None = None,
  joined: Callable[[], None] = lambda: None,
) -> None:
  """Returns once the island, see `island.Island`, has left in order.

  `joined` is called when all that start-up makes is there.

  Raises:
    UserError: the task does not fit the mesh or the run.
  """
  role = f"island-{spec.island}"
  channel = channel_lib.Client(
    spec.run_dir,
    role,
    {"island": spec.island, "incarnation": spec.incarnation, "ready": False},
    lambda: threads.dead,
  )
  threads.at_death(channel.close)

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

  loop = link.load(config.loop) if config.loop else None
  island = island_lib.Island(spec, config, task, devices, report, threads, like)
  threads.at_death(island.abandon)

  def living() -> operations.Script[None]:
    yield from island.joining()
    joined()
    threads.check()
    channel.set_hello(ready=True, step=island.step)
    channel.send({"type": "ready", "step": island.step})
    reason = yield from runner.ProgramRunner(island, channel).running()
    island.close(reason)

  if loop is None:
    island.perform(living())
  else:
    link.Link(island, living(), config, spec.island).run(loop)
  channel.close()
