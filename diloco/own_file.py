"""A user's own Python code: executed, and its mistakes told as its own."""

import contextlib
import difflib
import importlib
import importlib.util
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from diloco import errors


@contextlib.contextmanager
def execute(what: str, path: str) -> Iterator[types.ModuleType]:
  """Executes a file; what is called of the module meanwhile is its own code.

  Raises:
    UserError: there is no such file, or it fails.
  """
  if not os.path.isfile(path):  # which a name that cannot be is not, either
    where = (
      "" if pathlib.Path(path).is_absolute() else f" in {pathlib.Path.cwd()}"
    )
    raise errors.UserError(
      what, f"there is no such file{where}", "check the path"
    )
  name = f"diloco_own_file_{pathlib.Path(path).stem}"
  spec = importlib.util.spec_from_file_location(name, path)
  if spec is None or spec.loader is None:
    raise errors.UserError(what, "it is no Python file", "name a .py file")
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # where its dataclasses look their names up
  try:
    spec.loader.exec_module(module)
    yield module
  except errors.UserError:
    raise
  except (Exception, SystemExit) as error:  # whatever the file does wrong
    raise errors.UserError(
      what, _describe(error, path), "correct the file"
    ) from error


def _describe(error: BaseException, path: str) -> str:
  """The exception on one line, with the line of the file if it has one."""
  text = " ".join(str(error).split())
  if isinstance(error, AttributeError) and str(error.name).startswith("get_"):
    return f"it has no function {error.name}"
  if isinstance(error, SyntaxError):
    return f"{type(error).__name__}: {text}"
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename.endswith(path)]
  where = f" (line {lines[-1]})" if lines else ""
  return f"{type(error).__name__}: {text}{where}"


def load(what: str, place: str) -> Callable[..., Any]:
  """Loads a function of the user's, "FILE.py:NAME" or "package.module:NAME".

  Raises:
    UserError: there is no such file, module or function, or the file fails.
  """
  home, _, name = place.rpartition(":")
  if not home:
    raise errors.UserError(
      what, "it names no function", "write FILE.py:NAME or package.module:NAME"
    )
  if home.endswith(".py"):
    with execute(what, home) as module:
      pass
  else:
    module = _imported(what, home)
  function = getattr(module, name, None)
  if not callable(function):
    names = [n for n, v in vars(module).items() if callable(v) and n[:1] != "_"]
    file = getattr(module, "__file__", None)  # maybe another of its name
    where = f" ({file})" if file and not home.endswith(".py") else ""
    remedy = "write it into a file and name that, FILE.py:NAME"
    if home != "__main__":  # which is another one in each process
      remedy = nearest(name, names)
    raise errors.UserError(
      what, f"{home!r} has no function {name!r}{where}", remedy
    )
  found: Callable[..., Any] = function
  return found


def _imported(what: str, name: str) -> types.ModuleType:
  try:
    return importlib.import_module(name)
  except (ModuleNotFoundError, ValueError, TypeError) as error:
    # An import that fails inside the user's module is theirs to see whole.
    missing = getattr(error, "name", None) or name
    if not f"{name}.".startswith(f"{missing}."):
      raise
    raise errors.UserError(
      what,
      f"there is no module {missing!r}",
      "install it, put its folder on PYTHONPATH, or name FILE.py:NAME",
    ) from error


def nearest(name: str, names: Iterable[str]) -> str:
  """A remedy: the name probably meant, else all names."""
  names = list(names)
  close = difflib.get_close_matches(name, names, n=1)
  if close:
    return f"did you mean {close[0]!r}?"
  return f"known are {', '.join(names) or 'none'}"
