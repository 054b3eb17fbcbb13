"""Stores that break their promises, for clients in processes of their own."""

import signal

from diloco.snapshots import store


class Unconditional:
  """A key-value store that takes every write, whatever its condition."""

  def __init__(self, kvs):
    self._kvs = kvs

  def __getattr__(self, name):
    return getattr(self._kvs, name)

  def write(self, key, value, if_equal=None):
    return self._kvs.write(key, value)


def losing(url):
  made = store.SnapshotStore(url)
  made._kvs = Unconditional(made._kvs)
  return made


def deaf(url):
  """A sound one, for clients that no interrupt ends."""
  if signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    raise OSError("an interrupt would be heard")
  return store.SnapshotStore(url)


def broken(url):
  raise OSError("no route to the store")
