"""The process of an island, without the island."""

import types

from diloco import channel, process, workers
from diloco.islands import island, main, programs, runner
from diloco.snapshots import records


def test_thread_that_has_ended_ends_the_process_with_one_line(
  monkeypatch, capsys
):
  def run(args):
    raise workers.WorkerError("the publisher thread has ended: KeyError: 'w'")

  monkeypatch.setattr(process, "setup_role", lambda *_: None)
  monkeypatch.setattr(main, "_run", run)
  told = ["--run_dir=x", "--island=0", "--incarnation=1", "--slice=0"]
  assert main.main(told) == process.EXIT_FAILED
  assert capsys.readouterr().err == (
    "error: the publisher thread has ended: KeyError: 'w'\n"
  )


def test_controller_hears_from_the_first_word_on_how_far_an_island_is(
  monkeypatch,
):
  hello, told, made = {}, [], []
  end = types.SimpleNamespace(
    send=told.append,
    set_hello=lambda **fields: hello.update(fields),
    close=lambda: told.append("closed"),
  )

  class Life:
    step = 7

    def __init__(self, *args):
      made.append(args[4])  # what its heartbeat reports to
      self.abandon = None

    def joining(self):
      yield told.append("joining")

    def perform(self, script):
      for _ in script:
        pass

    def close(self, reason):
      member = records.Member("island-1", 3, 4, "n", step=9, step_secs=0.5)
      made[0](member, (5, 2.0))
      told.append(reason)

  def client(run_dir, role, first, dead):
    hello.update(first)
    return end

  monkeypatch.setattr(channel, "Client", client)
  monkeypatch.setattr(island, "Island", Life)
  monkeypatch.setattr(
    runner,
    "ProgramRunner",
    lambda *_: types.SimpleNamespace(running=lambda: _done(dict(hello), told)),
  )
  spec = types.SimpleNamespace(run_dir="x", island=1, incarnation=3)
  config = types.SimpleNamespace(loop="")

  def joined():
    told.append(dict(hello))

  programs.live(spec, config, None, [], workers.Threads(), None, joined)
  plain = {"island": 1, "incarnation": 3}
  assert told == [
    "joining",
    {**plain, "ready": False},
    {"type": "ready", "step": 7},
    {**plain, "ready": True, "step": 7},
    {
      **{"type": "status", "step": 9, "step_secs": 0.5},
      **{"progress": 5, "extra_secs": 2.0},
    },
    "told to stop",
    "closed",
  ]
  assert hello == {**plain, "ready": True, "step": 9}


def _done(hello, told):
  told.append(hello)
  yield
  return "told to stop"
