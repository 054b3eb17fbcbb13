"""What Python allocates, where other threads may allocate, too."""

import contextlib
import time
import tracemalloc
from collections.abc import Iterator

_LATE_SECS = 0.2


@contextlib.contextmanager
def traced() -> Iterator[None]:
  """Has `tracemalloc` keep accounts.

  Threads of TensorStore may still come back from what was asked of them, and
  CPython 3.11 dies if one waits for the interpreter, to enter what it has
  allocated, when the accounts are thrown away. So they are let through first.
  """
  tracemalloc.start()
  try:
    yield
  finally:
    time.sleep(_LATE_SECS)
    tracemalloc.stop()
