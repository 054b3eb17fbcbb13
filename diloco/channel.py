"""Control channels between the controller and the processes of a run.

JSON messages over local connections. A channel carries programs, results and
hints, never tensors and nothing that correctness rests on: a process that
loses its channel goes on with what it has and looks for a controller again.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import pathlib
import queue
import secrets
import socket
import struct
import threading
import time
from multiprocessing import connection
from typing import Any

from diloco import errors

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_RECONNECT_SECS = 0.25
_HANDSHAKE_SECS = 5.0  # a peer that says nothing is hung up on
_SEND_SECS = 2.0  # a peer that takes nothing in, too; it may be stopped
_MAX_MESSAGE_BYTES = 1 << 24
_REFUSED = (
  OSError,
  EOFError,
  ValueError,
  KeyError,
  TypeError,
  AttributeError,
  multiprocessing.AuthenticationError,
)


def check_port(port: int) -> None:
  """Raises `UserError` if nobody can listen on `port`; 0 is any port."""
  _listen(port).close()


def _listen(port: int) -> connection.Listener:
  try:
    return connection.Listener(("127.0.0.1", port), backlog=64)
  except OSError as error:
    raise errors.UserError(
      f"config.controller.port = {port}",
      f"the port cannot be listened on ({error.strerror})",
      "choose another, or 0 to let the system choose",
    ) from error


def address_path(run_dir: str | os.PathLike[str]) -> pathlib.Path:
  """File that tells where the controller of a run listens."""
  return pathlib.Path(run_dir) / "control" / "controller.json"


class _Wire:
  """One connection. Only the thread that receives closes it.

  Any thread may send, and may hang up, which wakes the receiver.
  """

  def __init__(self, conn: connection.Connection):
    """Takes over an open connection whose peer has proved nothing yet."""
    self._conn = conn
    self._lock = threading.Lock()
    self._open = True
    self.pid: Any = None  # of the peer, once it has said hello
    self._set_timeout(socket.SO_SNDTIMEO, _SEND_SECS)
    self._set_timeout(socket.SO_RCVTIMEO, _HANDSHAKE_SECS)

  def challenge(self, authkey: bytes) -> None:
    """The accepting side: the peer proves itself first."""
    connection.deliver_challenge(self._conn, authkey)
    connection.answer_challenge(self._conn, authkey)

  def answer(self, authkey: bytes) -> None:
    """The connecting side: proves itself first."""
    connection.answer_challenge(self._conn, authkey)
    connection.deliver_challenge(self._conn, authkey)

  def established(self) -> None:
    """From now on silence is no fault."""
    self._set_timeout(socket.SO_RCVTIMEO, 0.0)

  def send(self, message: Message) -> bool:
    """Sends; False, and no connection any more, when that fails."""
    data = json.dumps(message).encode()
    with self._lock:
      if not self._open:
        return False
      try:
        self._conn.send_bytes(data)
      except OSError:
        self._shut()  # part of the message may be on its way
        return False
    return True

  def receive(self) -> Message:
    """Waits for a message.

    Raises:
      OSError, EOFError: the connection has ended.
      ValueError: this is no message.
    """
    message = json.loads(self._conn.recv_bytes(_MAX_MESSAGE_BYTES))
    if not isinstance(message, dict):
      raise ValueError(f"a message of type {type(message).__name__}")
    return message

  def hang_up(self) -> None:
    """Ends the connection for both sides."""
    with self._lock:
      if self._open:
        self._shut()

  def close(self) -> None:
    """Releases the socket; for the receiving thread, when it is done."""
    with self._lock:
      self._open = False
      self._conn.close()

  def _shut(self) -> None:
    # Closing a socket does not wake a thread that reads from it.
    with contextlib.suppress(OSError), self._socket() as twin:
      twin.shutdown(socket.SHUT_RDWR)

  def _set_timeout(self, option: int, secs: float) -> None:
    interval = struct.pack("ll", int(secs), int(secs % 1 * 1e6))
    with self._socket() as twin:
      twin.setsockopt(socket.SOL_SOCKET, option, interval)

  def _socket(self) -> socket.socket:
    return socket.socket(fileno=os.dup(self._conn.fileno()))


class Server:
  """The controller's end: accepts peers, collects what they say.

  Everything arrives in `inbox` as (peer name, message): a peer's own messages,
  a first one of type "hello", and a last one of type "lost".
  """

  def __init__(self, port: int):
    """Listens on the loopback interface.

    Args:
      port: 0 lets the system choose.

    Raises:
      UserError: the port is taken.
    """
    self._listener = _listen(port)
    self._authkey = secrets.token_hex(16)
    self.inbox: queue.Queue[tuple[str, Message]] = queue.Queue()
    self._peers: dict[str, _Wire] = {}
    self._wires: set[_Wire] = set()  # peers, and who is about to be one
    self._lock = threading.Lock()
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
    host, port = self._listener.address
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
      socket.create_connection(self._listener.address, timeout=1.0).close()
    self._acceptor.join(timeout=1.0)
    self._listener.close()
    for wire in wires:
      wire.hang_up()

  def _accept(self) -> None:
    while not self._closing:
      try:
        wire = _Wire(self._listener.accept())
      except OSError:
        if not self._closing:
          time.sleep(_RECONNECT_SECS)
        continue
      threading.Thread(
        target=self._serve, args=(wire,), name="serve", daemon=True
      ).start()

  def _serve(self, wire: _Wire) -> None:
    # The challenge is per connection: a peer that hangs in it holds up nobody.
    with self._lock:
      self._wires.add(wire)
      if self._closing:
        wire.hang_up()
    try:
      peer = self._welcome(wire)
    except _REFUSED as error:
      if not self._closing:
        logger.warning("peer_refused error=%r", error)
    else:
      self._listen(wire, peer)
    with self._lock:
      self._wires.discard(wire)
    wire.close()

  def _welcome(self, wire: _Wire) -> str:
    wire.challenge(self._authkey.encode())
    hello = wire.receive()
    wire.established()
    peer, wire.pid = str(hello["peer"]), hello.get("pid")
    with self._lock:
      before = self._peers.get(peer)
      self._peers[peer] = wire
      # In this order, or the new connection would seem lost.
      if before is not None:
        self.inbox.put((peer, {"type": "lost", "pid": before.pid}))
      self.inbox.put((peer, hello))
    if before is not None:
      before.hang_up()
    return peer

  def _listen(self, wire: _Wire, peer: str) -> None:
    with contextlib.suppress(OSError, EOFError, ValueError):
      while True:
        self.inbox.put((peer, wire.receive()))
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
    self._hello = {"type": "hello", "peer": peer, "pid": os.getpid(), **hello}
    self.inbox: queue.Queue[Message] = queue.Queue()
    self._wire: _Wire | None = None
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
    """Sends if there is a controller; what it misses is only a hint."""
    with self._lock:
      wire = self._wire
    if wire is not None:
      wire.send(message)

  def close(self) -> None:
    """Hangs up for good."""
    with self._lock:
      self._closing = True
      wire = self._wire
    if wire is not None:
      wire.hang_up()

  def _run(self) -> None:
    while not self._closing:
      with contextlib.suppress(*_REFUSED):
        self._talk(*self._connect())
      time.sleep(_RECONNECT_SECS)

  def _connect(self) -> tuple[_Wire, str]:
    place = json.loads(self._path.read_text())
    conn = connection.Client((place["host"], place["port"]))
    return _Wire(conn), place["authkey"]

  def _talk(self, wire: _Wire, authkey: str) -> None:
    try:
      wire.answer(authkey.encode())
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
