"""Control channels between the controller and the processes of a run.

JSON messages over local connections. A channel carries programs, results and
hints, never tensors and nothing that correctness rests on: a process that
loses its channel goes on with what it has and looks for a controller again.
"""

import contextlib
import json
import logging
import os
import pathlib
import queue
import secrets
import socket
import threading
import time
from typing import Any

from diloco import errors
from diloco import wire as wire_lib

logger = logging.getLogger(__name__)

Message = wire_lib.Message

_LOOPBACK = "127.0.0.1"
_RECONNECT_SECS = 0.25
_MAX_UNPROVEN = 32  # connections; the oldest makes room for the next


def check_port(port: int) -> None:
  """Raises `UserError` if nobody can listen on `port`; 0 is any port."""
  _listen(_LOOPBACK, port).close()


def _listen(host: str, port: int) -> socket.socket:
  try:
    return socket.create_server((host, port), backlog=64)
  except OSError as error:
    raise errors.UserError(
      f"config.controller.port = {port}",
      f"the port cannot be listened on ({error.strerror})",
      "choose another, or 0 to let the system choose",
    ) from error


def address_path(run_dir: str | os.PathLike[str]) -> pathlib.Path:
  """File that tells where the controller of a run listens."""
  return pathlib.Path(run_dir) / "control" / "controller.json"


class Server:
  """The controller's end: accepts peers, collects what they say.

  Everything arrives in `inbox` as (peer name, message): a peer's own messages,
  a first one of type "hello", and a last one of type "lost".
  """

  def __init__(self, port: int, host: str = _LOOPBACK):
    """Listens.

    Args:
      port: 0 lets the system choose.
      host: address of this machine; by default its own processes alone can
        connect.

    Raises:
      UserError: the port is taken.
    """
    self._listener = _listen(host, port)
    self._authkey = secrets.token_hex(16)
    self.inbox: queue.Queue[tuple[str, Message]] = queue.Queue()
    self._peers: dict[str, wire_lib.Wire] = {}
    self._wires: set[wire_lib.Wire] = set()  # peers, and who is about to be one
    self._unproven: dict[wire_lib.Wire, None] = {}  # the latter, oldest first
    self._lock = threading.Lock()
    self._proved = threading.Condition(self._lock)  # or gone
    self._closing = False
    self._acceptor = threading.Thread(
      target=self._accept, name="accept", daemon=True
    )
    self._acceptor.start()

  def announce(self, run_dir: str | os.PathLike[str], facts: Message) -> None:
    """Writes where to connect, readable by this user alone.

    Args:
      run_dir: directory of the run.
      facts: further fields of the file, such as the controller's pid.
    """
    path = address_path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    host, port = self._listener.getsockname()
    content = {"host": host, "port": port, "authkey": self._authkey, **facts}
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # it would keep its mode
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
      json.dump(content, file)
    temporary.rename(path)

  def send(self, peer: str, message: Message) -> bool:
    """Sends to a peer; False when it is not connected."""
    with self._lock:
      wire = self._peers.get(peer)
    return wire is not None and wire.send(message)

  def close(self) -> None:
    """Stops listening and hangs up on everybody."""
    with self._lock:
      if self._closing:
        return
      self._closing = True
      wires = list(self._wires)
    # Closing a listening socket does not wake the thread that accepts.
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._acceptor.join(timeout=1.0)
    self._listener.close()
    for wire in wires:
      wire.hang_up()

  def _accept(self) -> None:
    while not self._closing:
      try:
        self._begin(wire_lib.Wire(self._listener.accept()[0]))
      except (OSError, RuntimeError) as error:  # no descriptor, or no thread
        if not self._closing:
          logger.warning("not_accepted error=%s", error)
          time.sleep(_RECONNECT_SECS)

  def _begin(self, wire: wire_lib.Wire) -> None:
    """Serves a connection on a thread of its own.

    The proof is per connection: a peer that hangs in it holds up nobody, and
    those that prove nothing never take more than a few descriptors.
    """
    with self._lock:
      self._wires.add(wire)
      self._unproven[wire] = None
      if self._closing:
        wire.hang_up()
      if len(self._unproven) > _MAX_UNPROVEN:
        next(iter(self._unproven)).hang_up()
        self._proved.wait_for(
          lambda: len(self._unproven) <= _MAX_UNPROVEN, wire_lib.HANDSHAKE_SECS
        )
    try:
      threading.Thread(
        target=self._serve, args=(wire,), name="serve", daemon=True
      ).start()
    except RuntimeError:
      self._release(wire)
      raise

  def _release(self, wire: wire_lib.Wire) -> None:
    with self._lock:
      self._wires.discard(wire)
      self._unproven.pop(wire, None)
      self._proved.notify_all()
    wire.close()

  def _serve(self, wire: wire_lib.Wire) -> None:
    try:
      self._listen(wire, self._welcome(wire))
    except Exception as error:  # whatever a stranger says, it is refused
      if not self._closing:
        logger.warning("peer_refused error=%r", error)
    finally:
      self._release(wire)

  def _welcome(self, wire: wire_lib.Wire) -> str:
    peer = wire.admit(self._authkey.encode())
    hello = wire.receive()
    if hello["peer"] != peer:
      raise ValueError(f"{peer} calls itself {hello['peer']}")
    wire.established()
    wire.pid = hello.get("pid")
    with self._lock:
      self._unproven.pop(wire, None)
      self._proved.notify_all()
      before = self._peers.get(peer)
      self._peers[peer] = wire
      # In this order, or the new connection would seem lost.
      if before is not None:
        self.inbox.put((peer, {"type": "lost", "pid": before.pid}))
      self.inbox.put((peer, hello))
    if before is not None:
      before.hang_up()
    return peer

  def _listen(self, wire: wire_lib.Wire, peer: str) -> None:
    try:
      with contextlib.suppress(OSError, EOFError):
        while True:
          self.inbox.put((peer, wire.receive()))
    finally:
      with self._lock:
        if self._peers.get(peer) is wire:
          del self._peers[peer]
          self.inbox.put((peer, {"type": "lost", "pid": wire.pid}))


class Client:
  """A role's end: finds the controller, and finds it again."""

  def __init__(
    self, run_dir: str | os.PathLike[str], peer: str, hello: Message
  ):
    """Starts connecting in the background.

    Args:
      run_dir: where the controller announces itself.
      peer: this process's name, such as "island-0".
      hello: fields of the first message of every connection.
    """
    self._path = address_path(run_dir)
    # Where process numbers are those of many machines, a life has another one.
    number = int(os.environ.get("DILOCO_LIFE", os.getpid()))
    self._hello = {"type": "hello", "peer": peer, "pid": number, **hello}
    self.inbox: queue.Queue[Message] = queue.Queue()
    self._wire: wire_lib.Wire | None = None
    self._place: tuple[str, int, str] | None = None  # where it leads
    self._lock = threading.Lock()
    self._closing = False
    self._alone_since = time.monotonic()
    threading.Thread(target=self._run, name="channel", daemon=True).start()

  def alone_secs(self) -> float:
    """How long there has been no controller, in seconds; 0 with one."""
    with self._lock:
      connected = self._wire is not None
      return 0.0 if connected else time.monotonic() - self._alone_since

  def set_hello(self, **fields: Any) -> None:
    """Changes what a new controller is told first."""
    with self._lock:
      self._hello.update(fields)

  def send(self, message: Message) -> None:
    """Sends if there is a controller; what it misses is only a hint.

    One that was replaced may be stopped, and not hang up by itself.
    """
    with self._lock:
      wire, place = self._wire, self._place
    if wire is not None and self._announced() in (None, place):
      wire.send(message)
    elif wire is not None:
      wire.hang_up()

  def close(self) -> None:
    """Hangs up for good."""
    with self._lock:
      self._closing = True
      wire = self._wire
    if wire is not None:
      wire.hang_up()

  def _run(self) -> None:
    while not self._closing:
      # Whatever is announced or said there, it is no controller to talk to.
      with contextlib.suppress(Exception):
        self._talk(*self._connect())
      time.sleep(_RECONNECT_SECS)

  def _connect(self) -> tuple[wire_lib.Wire, str]:
    place = self._announced()
    if place is None:
      raise OSError(f"nobody is announced in {self._path}")
    with self._lock:
      self._place = place
    conn = socket.create_connection(place[:2], wire_lib.HANDSHAKE_SECS)
    return wire_lib.Wire(conn), place[2]

  def _announced(self) -> tuple[str, int, str] | None:
    """Where a controller says that it listens, and by what key."""
    try:
      facts = json.loads(self._path.read_text())
      return str(facts["host"]), int(facts["port"]), str(facts["authkey"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
      return None

  def _talk(self, wire: wire_lib.Wire, authkey: str) -> None:
    try:
      wire.join(authkey.encode(), self._hello["peer"])
      wire.established()
      with self._lock:
        if self._closing or not wire.send(self._hello):
          return
        self._wire = wire
      while True:
        self.inbox.put(wire.receive())
    finally:
      with self._lock:
        if self._wire is wire:
          self._wire = None
          self._alone_since = time.monotonic()
      wire.close()
