"""The process of an island, without the island."""

from diloco import process, workers
from diloco.islands import main


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
