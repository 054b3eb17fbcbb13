"""What Python allocates, where other threads may allocate, too."""

import contextlib
import time
import tracemalloc
from collections.abc import Iterator

_LATE_SECS = 0.01
_LATE_TIMES = 20


@contextlib.contextmanager
def traced() -> Iterator[None]:
  """Has `tracemalloc` keep accounts.

  Threads of TensorStore may still come back from what was asked of them, and
  CPython 3.11 dies if one waits for the interpreter, to enter what it has
  allocated, when the accounts are thrown away. So they are let through first,
  again and again: a machine that stalls may take one long pause whole.
  """
  tracemalloc.start()
  try:
    yield
  finally:
    for _ in range(_LATE_TIMES):
      time.sleep(_LATE_SECS)
    tracemalloc.stop()
