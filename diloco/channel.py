"""Control channels between the controller and the processes of a run.

JSON messages over TLS. A channel carries programs, results and hints, never
tensors and nothing that correctness rests on: a process that loses its channel
goes on with what it has and looks for a controller again.

A controller makes a certificate for as long as it lives and draws a token. Both
are in a file that only the run's user can read, the certificate's key is in
none. A role speaks to nobody who does not hold that key, and a controller
listens to nobody who does not show that token.

Each end has one thread, which runs the event loop of all its connections.
"""

import asyncio
import contextlib
import datetime
import hmac
import ipaddress
import json
import logging
import os
import pathlib
import queue
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from diloco import errors

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_LOOPBACK = "127.0.0.1"
_RECONNECT_SECS = 0.25
_HANDSHAKE_SECS = 5.0  # a peer that has proved nothing by then is hung up on
_CLOSE_SECS = 2.0  # for what was said last to be sent
_MAX_UNPROVEN = 32  # connections; the oldest makes room for the next
_MAX_UNPROVEN_BYTES = 1 << 16
_MAX_MESSAGE_BYTES = 1 << 24
_LENGTH = struct.Struct("!I")  # before every message
# A machine that answers nothing for half a minute is lost, whether something
# was said to it or not. A process that is only stopped is answered for.
_KEEP_ALIVE = (
  (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
  (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
  (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
  (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


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
  a first one of type "hello", and a last one of type "lost". Each has the `pid`
  of its sender's hello: two processes may call themselves by one name.
  """

  def __init__(self, port: int, host: str = _LOOPBACK):
    """Listens at an address of this machine, by default for it alone.

    Raises:
      UserError: the port is taken.
    """
    self._listener = _listen(host, port)
    self._listener.setblocking(False)
    self._context, self._certificate = _certify()
    self._token = secrets.token_hex(16)
    self.inbox: queue.Queue[tuple[str, Message]] = queue.Queue()
    # Of the loop's thread; others only look peers up.
    self._peers: dict[str, _Link] = {}
    self._unproven: dict[asyncio.Task[None], None] = {}  # oldest first
    self._loop = _Loop("channels", self._accept())

  def announce(self, run_dir: str | os.PathLike[str], facts: Message) -> None:
    """Writes where to connect, readable by this user alone.

    The file has further `facts`, such as the controller's pid.
    """
    path = address_path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    host, port = self._listener.getsockname()
    place = _Place(host, port, self._certificate, self._token)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # it would keep its mode
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
      json.dump(place._asdict() | facts, file)
    temporary.rename(path)

  def send(self, peer: str, message: Message) -> bool:
    """Sends to a peer, waiting for nobody; False when it is not connected."""
    link = self._peers.get(peer)
    return link is not None and self._loop.call(link.send, _frame(message))

  def close(self) -> None:
    """Stops listening and hangs up on everybody."""
    self._loop.close()
    self._listener.close()

  async def _accept(self) -> None:
    async with asyncio.TaskGroup() as serving:
      while True:
        try:
          await _readable(self._listener)
          conn, _ = self._listener.accept()
        except OSError as error:  # no descriptor is left, or nothing to wait by
          logger.warning("not_accepted error=%s", error)
          await asyncio.sleep(_RECONNECT_SECS)
          continue
        task = serving.create_task(self._serve(conn))
        self._unproven[task] = None
        task.add_done_callback(lambda done: self._unproven.pop(done, None))
        await asyncio.sleep(0)  # from now on it looks after the connection
        # Those that prove nothing never take more than a few descriptors.
        if len(self._unproven) > _MAX_UNPROVEN:
          oldest = next(iter(self._unproven))
          oldest.cancel()
          await asyncio.wait([oldest])

  async def _serve(self, conn: socket.socket) -> None:
    peer: str | None = None
    link: _Link | None = None
    try:
      async with asyncio.timeout(_HANDSHAKE_SECS) as deadline:
        link = await _Link.accept(conn, self._context)
        first = await link.receive(_MAX_UNPROVEN_BYTES)
        if not hmac.compare_digest(first["token"], self._token):
          raise PermissionError("a wrong token")
        deadline.reschedule(None)  # from now on silence is no fault
        hello = first["hello"]
        peer, link.pid = str(hello["peer"]), hello.get("pid")
        self._welcome(peer, link, hello)
        while True:
          said = await link.receive()
          self.inbox.put((peer, said | {"pid": link.pid}))
    except Exception as error:  # whatever a stranger says, it is refused
      if peer is None or not isinstance(error, OSError | EOFError):
        why = errors.one_line(error)  # of some errors all that was said is part
        logger.warning("peer_refused peer=%s error=%s", peer, why)
    finally:
      if peer is not None and self._peers.get(peer) is link:
        self._lose(peer)
      if link is not None:
        if peer is None:
          link.abort()
        await link.close()

  def _welcome(self, peer: str, link: "_Link", hello: Message) -> None:
    del self._unproven[link.task]
    # In this order, or the new connection would seem lost.
    if before := self._peers.get(peer):
      self._lose(peer)
      before.task.cancel()
    self._peers[peer] = link
    link.send(_frame({"type": "welcome"}))
    self.inbox.put((peer, hello))

  def _lose(self, peer: str) -> None:
    link = self._peers.pop(peer)
    self.inbox.put((peer, {"type": "lost", "pid": link.pid}))


class Client:
  """A role's end: finds the controller, and finds it again."""

  def __init__(
    self,
    run_dir: str | os.PathLike[str],
    peer: str,
    hello: Message,
    killed: Callable[[], bool] = lambda: False,
  ):
    """Starts connecting in the background.

    Args:
      run_dir: where the controller announces itself.
      peer: this process's name, such as "island-0".
      hello: fields of the first message of every connection.
      killed: whether the role was, in a process that lives on; it makes no
        more connections then, for its next life has its name.
    """
    self._path = address_path(run_dir)
    # Where process numbers are those of many machines, a life has another one.
    number = int(os.environ.get("DILOCO_LIFE", os.getpid()))
    self._hello = {"type": "hello", "peer": peer, "pid": number, **hello}
    self._lock = threading.Lock()  # of that
    self.inbox: queue.Queue[Message] = queue.Queue()
    self._link: _Link | None = None  # of the loop's thread
    self._place: _Place | None = None  # where it leads
    self._killed = killed
    self._told: set[type[Exception]] = set()  # why there is none, once each
    self._alone_since: float | None = time.monotonic()
    self._loop = _Loop("channel", self._seek())

  def alone_secs(self) -> float:
    """How long there has been no controller, in seconds; 0 with one."""
    since = self._alone_since
    return 0.0 if since is None else time.monotonic() - since

  def set_hello(self, **fields: Any) -> None:
    """Changes what a new controller is told first."""
    with self._lock:
      self._hello = self._hello | fields

  def send(self, message: Message) -> None:
    """Sends if there is a controller; what it misses is only a hint."""
    self._loop.call(self._send, _frame(message))

  def close(self) -> None:
    """Hangs up for good, once everything is sent."""
    self._loop.close()

  def _send(self, frame: bytes) -> None:
    if self._link is None:
      return
    # One that was replaced may be stopped, and not hang up by itself.
    if _announced(self._path) in (None, self._place):
      self._link.send(frame)
    else:
      self._link.abort()

  async def _seek(self) -> None:
    while not self._killed():
      try:
        if place := _announced(self._path):
          await self._talk(place)
      except Exception as error:
        # Whatever is announced or said there, it is no controller to talk to.
        if type(error) not in self._told:
          self._told.add(type(error))
          logger.info("no_channel error=%s", errors.one_line(error))
      await asyncio.sleep(_RECONNECT_SECS)

  async def _talk(self, place: "_Place") -> None:
    async with asyncio.timeout(_HANDSHAKE_SECS) as deadline:
      link = await _Link.connect(place)
      try:
        link.send(_frame({"token": place.token, "hello": self._hello}))
        # From now on, or what is said before the welcome would reach nobody.
        self._link, self._place = link, place
        await link.receive()  # the welcome
        deadline.reschedule(None)
        self._alone_since = None
        self._told.clear()
        while True:
          self.inbox.put(await link.receive())
      finally:
        self._link = None
        if self._alone_since is None:
          self._alone_since = time.monotonic()
        await link.close()


class _Place(NamedTuple):
  """Where a controller listens, and how the two ends know each other."""

  host: str
  port: int
  certificate: str
  token: str


def _announced(path: pathlib.Path) -> _Place | None:
  try:
    facts = json.loads(path.read_text())
    host = str(ipaddress.ip_address(facts["host"]))  # nothing to be looked up
    certificate, token = str(facts["certificate"]), str(facts["token"])
    return _Place(host, int(facts["port"]), certificate, token)
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return None


def _certify() -> tuple[ssl.SSLContext, str]:
  """What a controller proves itself by, with a key that nobody else has.

  Returns:
    The context of its connections, and its certificate.
  """
  # Roles need none of this, and it is slow to load.
  from cryptography import x509
  from cryptography.hazmat.primitives import hashes, serialization
  from cryptography.hazmat.primitives.asymmetric import ec

  key = ec.generate_private_key(ec.SECP256R1())
  name = x509.Name.from_rfc4514_string("CN=diloco controller")
  certificate = (
    x509.CertificateBuilder(name, name, key.public_key())
    .serial_number(x509.random_serial_number())
    # It lives as long as the key does, and clocks may be wrong.
    .not_valid_before(datetime.datetime(1970, 1, 1))
    .not_valid_after(datetime.datetime(9999, 12, 31))
    .sign(key, hashes.SHA256())
    .public_bytes(serialization.Encoding.PEM)
  )
  secret = key.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
  )
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  context.minimum_version = ssl.TLSVersion.TLSv1_3
  context.num_tickets = 0  # no connection follows from an earlier one
  # It must be a file for OpenSSL; this one is only in memory.
  with os.fdopen(os.memfd_create("key"), "wb") as file:
    file.write(secret + certificate)
    file.flush()
    context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
  return context, certificate.decode()


async def _readable(conn: socket.socket) -> None:
  """Waits; a connection that comes meanwhile is not lost to a cancellation."""
  loop = asyncio.get_running_loop()
  ready = asyncio.Event()
  loop.add_reader(conn, ready.set)
  try:
    await ready.wait()
  finally:
    loop.remove_reader(conn)


def _frame(message: Message) -> bytes:
  data = json.dumps(message).encode()
  return _LENGTH.pack(len(data)) + data


class _Link:
  """One connection, of the thread and the task that made it."""

  def __init__(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ):
    self._reader, self._writer = reader, writer
    for option in _KEEP_ALIVE:
      writer.get_extra_info("socket").setsockopt(*option)
    self.pid: Any = None  # of the peer, once it has said hello
    task = asyncio.current_task()
    assert task
    self.task = task

  @classmethod
  async def accept(
    cls, conn: socket.socket, context: ssl.SSLContext
  ) -> "_Link":
    """The controller's end; the other one has proved nothing yet."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
      transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, conn, ssl=context, ssl_shutdown_timeout=_CLOSE_SECS
      )
      writer = asyncio.StreamWriter(transport, protocol, reader, loop)
      return cls(reader, writer)
    except BaseException:
      # Asyncio may leave it open; at its end it is closed, in a turn or two.
      with contextlib.suppress(OSError):
        conn.shutdown(socket.SHUT_RDWR)
      while conn.fileno() >= 0:
        await asyncio.sleep(0)
      raise

  @classmethod
  async def connect(cls, place: _Place) -> "_Link":
    """A role's end; the other one has proved that it is the controller.

    Raises:
      OSError: nobody is there, or somebody else.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # this certificate it is, wherever it is
    context.load_verify_locations(cadata=place.certificate)
    opening = asyncio.create_task(
      asyncio.open_connection(
        *place[:2], ssl=context, ssl_shutdown_timeout=_CLOSE_SECS
      )
    )
    try:
      return cls(*await asyncio.shield(opening))
    except asyncio.CancelledError:
      # Asyncio would leave it open, half made as it is.
      await asyncio.wait([opening], timeout=_CLOSE_SECS)
      if opening.done() and opening.exception() is None:
        opening.result()[1].transport.abort()
      opening.cancel()
      raise

  def send(self, frame: bytes) -> None:
    """Sends in the background."""
    transport = self._writer.transport
    if transport.get_write_buffer_size() > _MAX_MESSAGE_BYTES:
      transport.abort()  # the peer takes nothing in
    elif not transport.is_closing():
      self._writer.write(frame)

  async def receive(self, limit: int = _MAX_MESSAGE_BYTES) -> Message:
    """Waits for a message.

    Raises:
      OSError, EOFError: the connection has ended.
      ValueError: this is no message.
    """
    (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
    if size > limit:
      raise ValueError(f"{size} bytes, where {limit} are the most")
    message = json.loads(await self._reader.readexactly(size))
    if not isinstance(message, dict):
      raise ValueError(f"a message of type {type(message).__name__}")
    return message

  def abort(self) -> None:
    """Hangs up at once."""
    self._writer.transport.abort()

  async def close(self) -> None:
    """Hangs up once everything is sent, or not in time."""
    self._writer.close()
    with contextlib.suppress(Exception):
      await self._writer.wait_closed()


class _Loop:
  """Runs a coroutine on a thread of its own, until closed."""

  def __init__(self, name: str, main: Coroutine[Any, Any, None]):
    self._loop = asyncio.new_event_loop()
    self._main = self._loop.create_task(main)
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def call(self, function: Callable[..., object], *args: Any) -> bool:
    """Has it call a function; False when it is closed."""
    try:
      self._loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
      return False
    return True

  def close(self) -> None:
    """Ends the coroutine after all calls so far."""
    self.call(self._main.cancel)
    self._thread.join(2 * _CLOSE_SECS)

  def _run(self) -> None:
    with contextlib.suppress(asyncio.CancelledError):
      self._loop.run_until_complete(self._main)
    self._loop.run_until_complete(asyncio.sleep(0))  # it hangs up only then
    self._loop.close()
