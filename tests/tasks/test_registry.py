"""Tasks by name, tasks of the user's own, and helpful refusals."""

import sys

import pytest

from diloco import errors
from diloco.tasks import language_model, registry


@pytest.fixture
def user_module(tmp_path, monkeypatch):
  (tmp_path / "their_task.py").write_text(
    "from diloco.tasks import registry\n"
    "def make(options):\n"
    "  return registry.make_task('language_model', options)\n"
    "def make_nothing(options):\n"
    "  return object()\n"
    "CONSTANT = 3\n"
  )
  (tmp_path / "their_broken.py").write_text("import no_such_dependency\n")
  monkeypatch.syspath_prepend(tmp_path)
  yield "their_task"
  for name in ("their_task", "their_broken"):
    sys.modules.pop(name, None)


def test_options_reach_the_language_model():
  made = registry.make_task("language_model", {"d_model": 64, "seq_len": 16})
  assert isinstance(made, language_model.LanguageModel)
  assert made.config.d_model == 64
  assert made.tokens_per_batch == made.config.batch_size * 16


def test_a_factory_of_the_users_gets_the_options(user_module):
  made = registry.make_task(f"{user_module}:make", {"d_model": 64})
  assert isinstance(made, language_model.LanguageModel)
  assert made.config.d_model == 64


@pytest.mark.parametrize(
  ("name", "options", "remedy"),
  [
    ("langage_model", {}, "did you mean 'language_model'?"),
    ("zzz", {}, "package.module:Factory"),
    ("their_task.py", {}, "FILE.py:Factory"),
    ("language_model", {"d_modle": 64}, "did you mean 'd_model'?"),
    ("language_model", {"zzz": 64}, "known are optimizer"),
    ("language_model", {"d_model": "64"}, "give a int"),
    ("no_such_package.tasks:Make", {}, "PYTHONPATH"),
    ("no_such_module:Make", {}, "FILE.py:NAME"),
    (":Make", {}, "FILE.py:NAME"),
    ("their_task:mak", {}, "did you mean 'make'?"),
    ("their_task:CONSTANT", {}, "known are"),
    ("__main__:Mine", {}, "FILE.py:NAME"),
    ("their_task:make_nothing", {}, "implement diloco.tasks.task.Task"),
  ],
)
def test_what_is_unknown_is_refused(user_module, name, options, remedy):
  del user_module
  with pytest.raises(errors.UserError) as caught:
    registry.make_task(name, options)
  assert remedy in caught.value.remedy
  assert "\n" not in str(caught.value)


def test_module_that_is_another_one_is_told_with_its_file():
  with pytest.raises(errors.UserError) as caught:
    registry.make_task("random:make", {})
  assert "random.py)" in caught.value.why and "_log" not in str(caught.value)


def test_an_import_error_of_the_users_own_is_shown_whole(user_module):
  del user_module
  with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
    registry.make_task("their_broken:make", {})
