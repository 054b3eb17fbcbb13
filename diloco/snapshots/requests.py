"""How often a process has asked its store, by kind of request.

TensorStore counts what it does, tensors' chunks included: a store is asked by
more than its records' readers. On a file system saved states count too.
"""

from __future__ import annotations

import collections
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import tensorstore as ts

EVERY_SECS = 60.0  # a role tells of its own
_DRIVERS = {"gs": "gcs"}
KINDS = ("reads", "writes", "lists", "deletes")


_refused: collections.Counter[str] = collections.Counter()  # by scheme
_lock = threading.Lock()  # of it


def refused(url: str) -> None:
  """Says that a write on a condition was refused in the store at a URL."""
  with _lock:
    _refused[urllib.parse.urlsplit(url).scheme] += 1


class Counter:
  """Counts the requests to one kind of store from now on."""

  def __init__(self, url: str, clock: Callable[[], float] = time.monotonic):
    self._scheme = scheme = urllib.parse.urlsplit(url).scheme
    self._place = f"/tensorstore/kvstore/{_DRIVERS.get(scheme, scheme)}/"
    self._clock = clock
    self._since = clock()
    self._before = self._counts()

  def made(self) -> dict[str, Any]:
    """Requests of `KINDS` since then, and `over_secs` how many seconds."""
    now = self._counts()
    # A write that was under way at either moment was not timed yet.
    made = {kind: max(0, now[kind] - self._before[kind]) for kind in KINDS}
    return {**made, "over_secs": self._clock() - self._since}

  def _counts(self) -> dict[str, int]:
    found = {
      one["name"].removeprefix(self._place): one["values"][0]
      for one in ts.experimental_collect_matching_metrics(self._place)
    }

    def count(name: str, field: str = "value") -> int:
      return int(found.get(name, {}).get(field, 0))

    # There to delete is to write, but is not timed; nor is, but in S3, a write
    # that is refused.
    writes = count("write_latency_ms", "count")
    writes += 0 if self._scheme == "s3" else _refused[self._scheme]
    deletes = count("write") - writes
    counts = count("batch_read"), writes, count("list"), deletes
    return dict(zip(KINDS, counts, strict=True))
