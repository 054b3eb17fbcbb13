"""A user's own Python file: executed, and its mistakes told as its own."""

import contextlib
import importlib.util
import pathlib
import traceback
import types
from collections.abc import Iterator

from diloco import errors


@contextlib.contextmanager
def execute(what: str, path: str) -> Iterator[types.ModuleType]:
  """Executes a file; what is called of it meanwhile is its own code too.

  Yields:
    The module.

  Raises:
    UserError: there is no such file, or it fails.
  """
  if not pathlib.Path(path).is_file():
    raise errors.UserError(what, "there is no such file", "check the path")
  spec = importlib.util.spec_from_file_location("diloco_own_file", path)
  if spec is None or spec.loader is None:
    raise errors.UserError(what, "it is no Python file", "name a .py file")
  module = importlib.util.module_from_spec(spec)
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
