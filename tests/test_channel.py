"""Control channels over real loopback sockets."""

import asyncio
import contextlib
import errno
import functools
import itertools
import json
import os
import queue
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import types

import pytest
from observing import until

from diloco import channel, errors

_PATIENCE_SECS = 30.0  # far above what loopback needs, for a busy machine


def take(inbox):
  return inbox.get(timeout=_PATIENCE_SECS)


@pytest.fixture
def ends(monkeypatch):
  """Makes servers and clients and closes them all."""
  monkeypatch.setattr(channel, "_RECONNECT_SECS", 0.02)
  with contextlib.ExitStack() as stack:

    def make(kind, *args):
      end = kind(*args)
      stack.callback(end.close)
      return end

    yield make


def serve(ends, run_dir, port=0):
  server = ends(channel.Server, port)
  server.announce(run_dir, {"pid": os.getpid()})
  return server


def place_of(run_dir):
  return json.loads(channel.address_path(run_dir).read_text())


def connect(place):
  conn = socket.create_connection((place["host"], place["port"]))
  conn.settimeout(_PATIENCE_SECS)
  return conn


def trusting(place):
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.check_hostname = False
  context.load_verify_locations(cadata=place["certificate"])
  return context


class Peer:
  """The client's half of a channel, for what no client does."""

  def __init__(self, run_dir, peer, token=..., **fields):
    place = place_of(run_dir)
    self.conn = trusting(place).wrap_socket(connect(place))
    hello = {"peer": peer, **fields}
    token = place["token"] if token is ... else token
    self.send({"token": token, "hello": hello})

  def send(self, content):
    self.write(json.dumps(content).encode())

  def write(self, data):
    self.conn.sendall(len(data).to_bytes(4) + data)

  def receive(self):
    """The next message; None at the end of the connection."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
      if length := self._read(4):
        return json.loads(self._read(int.from_bytes(length)))
    return None

  def _read(self, size):
    data = b""
    while len(data) < size and (more := self.conn.recv(size - len(data))):
      data += more
    return data

  def close(self):
    self.conn.close()


def is_hung_up(conn):
  """Waits for the end of a connection, whatever is said before."""
  with contextlib.suppress(ConnectionError, ssl.SSLError):
    while conn.recv(1024):
      pass
  return True


@contextlib.contextmanager
def process(*lines):
  """Another process, killed in the end."""
  code = "\n".join(("from diloco import channel", *lines))
  child = subprocess.Popen(
    [sys.executable, "-c", code],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  try:
    yield child
  finally:
    child.kill()
    child.communicate()


def test_hello_then_messages_both_ways(ends, tmp_path):
  server = serve(ends, tmp_path)
  told = {"ready": False, "token": 0}
  client = ends(channel.Client, tmp_path, "island-0", told)
  hello = {"type": "hello", "peer": "island-0", "pid": os.getpid()}
  assert take(server.inbox) == ("island-0", hello | told)
  assert server.send("island-0", {"type": "program", "seq": 1})
  assert server.send("island-0", {"type": "program", "seq": 2})
  assert [take(client.inbox)["seq"] for _ in range(2)] == [1, 2]
  until(lambda: client.alone_secs() == 0)
  client.send({"type": "done", "seq": 1})
  told = {"type": "done", "seq": 1, "pid": os.getpid()}
  assert take(server.inbox) == ("island-0", told)
  client.close()
  lost = {"type": "lost", "pid": os.getpid()}
  assert take(server.inbox) == ("island-0", lost)
  assert not server.send("island-0", {})


def test_message_larger_than_any_socket_buffer_arrives(ends, tmp_path):
  server = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  take(server.inbox)
  assert server.send("a", {"text": "x" * 10_000_000})
  assert len(take(client.inbox)["text"]) == 10_000_000


def test_messages_of_many_threads_stay_whole(ends, tmp_path):
  server = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  take(server.inbox)
  until(lambda: client.alone_secs() == 0)

  def talk(n):
    for i in range(50):
      client.send({"from": n, "i": i, "text": "x" * 20_000})

  threads = [threading.Thread(target=talk, args=(n,)) for n in range(4)]
  for thread in threads:
    thread.start()
  heard = [take(server.inbox)[1] for _ in range(200)]
  for thread in threads:
    thread.join()
  for n in range(4):
    assert [m["i"] for m in heard if m["from"] == n] == list(range(50))


def test_client_finds_the_next_server_and_tells_its_new_hello(ends, tmp_path):
  first = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "syncer", {"ready": False})
  take(first.inbox)
  client.set_hello(ready=True)
  first.close()
  until(lambda: client.alone_secs() > 0)
  second = serve(ends, tmp_path)
  assert take(second.inbox)[1]["ready"]
  assert second.send("syncer", {"type": "program"})
  assert take(client.inbox) == {"type": "program"}
  until(lambda: client.alone_secs() == 0)


def test_client_that_closes_as_it_connects_leaves_nothing_open(
  ends, tmp_path, monkeypatch
):
  serve(ends, tmp_path)
  open_connection, made, conns = asyncio.open_connection, threading.Event(), []

  async def connect_slowly(*args, **settings):
    found = await open_connection(*args, **settings)
    conns.append(found[1].get_extra_info("socket"))
    made.set()
    await asyncio.sleep(0.2)
    return found

  monkeypatch.setattr(asyncio, "open_connection", connect_slowly)
  client = ends(channel.Client, tmp_path, "a", {})
  assert made.wait(_PATIENCE_SECS)
  client.close()
  assert [conn.fileno() for conn in conns] == [-1]


def test_alone_secs_counts_from_birth_and_from_every_loss(
  ends, tmp_path, monkeypatch
):
  now = [50.0]
  clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
  monkeypatch.setattr(channel, "time", clock)
  client = ends(channel.Client, tmp_path, "a", {})
  now[0] += 7.0
  assert client.alone_secs() == 7.0
  client.send({"type": "nobody hears this"})
  for secs in (3.0, 2.0):
    server = serve(ends, tmp_path)
    assert take(server.inbox)[1]["type"] == "hello"
    until(lambda: client.alone_secs() == 0)
    now[0] += 1000.0
    assert client.alone_secs() == 0
    server.close()
    until(lambda: client._link is None)
    now[0] += secs
    assert client.alone_secs() == secs


def test_what_is_said_last_is_heard(ends, tmp_path):
  server = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  take(server.inbox)
  until(lambda: client.alone_secs() == 0)
  client.send({"text": "x" * 10_000_000})
  client.send({"type": "bye"})
  client.close()
  heard = [take(server.inbox)[1] for _ in range(3)]
  assert len(heard[0]["text"]) == 10_000_000
  assert [m["type"] for m in heard[1:]] == ["bye", "lost"]


@pytest.mark.parametrize(
  "content",
  [
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"host": 1, "port": 2}',
    '{"host": "x", "port": 2, "certificate": "", "token": ""}',
    '{"host": "127.0.0.1", "port": 99999999, "certificate": "", "token": ""}',
    '{"host": "127.0.0.1", "port": 2, "certificate": "\\n", "token": ""}',
    "[" * 100_000,
  ],
)
def test_client_survives_any_announcement(ends, tmp_path, content):
  path = channel.address_path(tmp_path)
  path.parent.mkdir()
  path.write_text(content)
  ends(channel.Client, tmp_path, "a", {})
  time.sleep(0.05)  # some attempts
  assert take(serve(ends, tmp_path).inbox)[0] == "a"


def test_connected_client_survives_any_announcement(ends, tmp_path):
  inbox = serve(ends, tmp_path).inbox
  client = ends(channel.Client, tmp_path, "a", {})
  assert take(inbox)[1]["type"] == "hello"
  until(lambda: not client.alone_secs())
  channel.address_path(tmp_path).write_text("[" * 100_000)
  client.send({"type": "status"})
  assert take(inbox)[1]["type"] == "status"


@pytest.mark.parametrize("token", ["", "wrong", "\u00e9", None, 3])
def test_wrong_token_is_refused(ends, tmp_path, token):
  server = serve(ends, tmp_path)
  path = channel.address_path(tmp_path)
  right = path.read_text()
  with contextlib.closing(Peer(tmp_path, "a", token)) as stranger:
    assert stranger.receive() is None
  path.write_text(json.dumps(place_of(tmp_path) | {"token": token}))
  client = ends(channel.Client, tmp_path, "a", {})
  with pytest.raises(queue.Empty):
    server.inbox.get(timeout=0.3)
  assert client.alone_secs() > 0.2
  path.write_text(right)
  assert take(server.inbox)[0] == "a"


def test_stranger_fills_no_log(ends, tmp_path, caplog):
  serve(ends, tmp_path)
  place = place_of(tmp_path)
  data = b"\xff" * 60_000
  with trusting(place).wrap_socket(connect(place)) as conn:
    conn.sendall(len(data).to_bytes(4) + data)
    assert is_hung_up(conn)
  until(lambda: "peer_refused" in caplog.text)
  assert "can't decode" in caplog.text and len(caplog.text) < 1000


def test_role_says_once_why_it_has_no_channel(ends, tmp_path, caplog):
  caplog.set_level("INFO")
  server = serve(ends, tmp_path)
  _, other = channel._certify()
  path = channel.address_path(tmp_path)
  right = path.read_text()
  path.write_text(json.dumps(place_of(tmp_path) | {"certificate": other}))
  client = ends(channel.Client, tmp_path, "a", {})
  until(lambda: "no_channel" in caplog.text)
  assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
  path.write_text(right)
  take(server.inbox)
  until(lambda: client.alone_secs() == 0)
  assert caplog.text.count("CERTIFICATE_VERIFY_FAILED") == 1


def test_silent_peer_blocks_nobody_and_is_hung_up_on(
  ends, tmp_path, monkeypatch
):
  server = serve(ends, tmp_path)
  with connect(place_of(tmp_path)):
    ends(channel.Client, tmp_path, "a", {})
    assert take(server.inbox)[0] == "a"
  monkeypatch.setattr(channel, "_HANDSHAKE_SECS", 0.2)
  with connect(place_of(tmp_path)) as silent:
    assert is_hung_up(silent)
  place = place_of(tmp_path)
  with (
    contextlib.suppress(OSError),
    connect(place) as conn,
    trusting(place).wrap_socket(conn) as silent,
  ):
    assert is_hung_up(silent)


def test_peer_that_dribbles_has_no_more_time_than_a_silent_one(
  ends, tmp_path, monkeypatch
):
  monkeypatch.setattr(channel, "_HANDSHAKE_SECS", 0.2)
  serve(ends, tmp_path)
  begun = bytes.fromhex("16030102000100")  # of a handshake
  with connect(place_of(tmp_path)) as slow, contextlib.suppress(OSError):
    for byte in begun + bytes(400):
      slow.sendall(bytes([byte]))
      time.sleep(0.02)
    pytest.fail("nobody hung up")


def test_connection_is_closed_at_whatever_turn_its_handshake_is_given_up():
  context, certificate = channel._certify()
  trusted = trusting({"certificate": certificate})

  async def given_up_after(turns):
    with socket.create_server(("127.0.0.1", 0)) as listener:
      theirs = socket.create_connection(listener.getsockname())
      ours, _ = listener.accept()
    accepting = asyncio.create_task(channel._Link.accept(ours, context))
    connecting = asyncio.create_task(
      asyncio.open_connection(sock=theirs, ssl=trusted, server_hostname="")
    )
    for _ in range(turns):
      await asyncio.sleep(0)
    if done := accepting.done():
      accepting.result().abort()
      await accepting.result().close()
    accepting.cancel()
    await asyncio.wait([accepting])
    assert ours.fileno() == -1, turns
    with contextlib.suppress(OSError):
      (await connecting)[1].transport.abort()
    return done

  turns = itertools.count(1)  # before it begins there is none
  while not asyncio.run(given_up_after(next(turns))):
    pass


def test_established_peer_may_be_silent(ends, tmp_path, monkeypatch):
  monkeypatch.setattr(channel, "_HANDSHAKE_SECS", 1.0)
  server = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  take(server.inbox)
  with pytest.raises(queue.Empty):
    server.inbox.get(timeout=1.5)
  assert client.alone_secs() == 0
  assert server.send("a", {"still": "there"})
  assert take(client.inbox) == {"still": "there"}


@pytest.mark.parametrize(
  "first",
  [
    *("3", "{", "[]", "{}", "\xff", "", "[" * 0xFFF),
    *(f'{{"token": "TOKEN", "hello": {x}}}' for x in ("3", "null", "[]", "{}")),
    '{"token": "TOKEN", "hello": {"peer": "a", "x": "' + "x" * 100_000 + '"}}',
  ],
)
def test_peer_whose_hello_is_none_is_refused(ends, tmp_path, first):
  server = serve(ends, tmp_path)
  place = place_of(tmp_path)
  data = first.replace("TOKEN", place["token"]).encode("latin-1")
  with trusting(place).wrap_socket(connect(place)) as conn:
    with contextlib.suppress(OSError):
      conn.sendall(len(data).to_bytes(4) + data)
    assert is_hung_up(conn)
  ends(channel.Client, tmp_path, "c", {})
  assert take(server.inbox)[0] == "c"


@pytest.mark.parametrize("said", [b"[]", b"3", b"{", b"[" * 100_000])
def test_peer_that_says_what_is_no_message_is_lost(ends, tmp_path, said):
  server = serve(ends, tmp_path)
  with contextlib.closing(Peer(tmp_path, "a", pid=5)) as peer:
    assert take(server.inbox) == ("a", {"peer": "a", "pid": 5})
    peer.write(said)
    assert take(server.inbox) == ("a", {"type": "lost", "pid": 5})


@pytest.mark.parametrize(
  "said",
  [
    b"\xff\xff\xff\xff",
    b"\0",
    b"GET / HTTP/1.1\r\n\r\n",
    b"{}\n",
    bytes(100_000),
    bytes.fromhex("16030100020100"),  # the beginning of a handshake
  ],
)
def test_stranger_is_refused_whatever_it_says(ends, tmp_path, said):
  server = serve(ends, tmp_path)
  with connect(place_of(tmp_path)) as conn:
    with contextlib.suppress(ConnectionError):
      conn.sendall(said)
      conn.shutdown(socket.SHUT_WR)
    assert is_hung_up(conn)
  ends(channel.Client, tmp_path, "a", {})
  assert take(server.inbox)[0] == "a"


class Middle:
  """A man in the middle: what clients of a run find where it listened."""

  def __init__(self, run_dir):
    self.listener = socket.create_server(("127.0.0.1", 0))
    self.listener.settimeout(_PATIENCE_SECS)
    self.server = place_of(run_dir)
    here = self.server | {"port": self.listener.getsockname()[1]}
    channel.address_path(run_dir).write_text(json.dumps(here))
    self.conns = [self.listener]

  def accept(self):
    return self._keep(self.listener.accept()[0])

  def connect(self):
    return self._keep(connect(self.server))

  def _keep(self, conn):
    conn.settimeout(_PATIENCE_SECS)
    self.conns.append(conn)
    return conn

  def relay(self, source, target, harm=lambda data: data):
    """Passes on what is said, in the background; returns what was."""
    said = []

    def run():
      with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
          said.append(data)
          target.sendall(harm(data))

    threading.Thread(target=run, daemon=True).start()
    return said

  def close(self):
    for conn in self.conns:
      with contextlib.suppress(OSError):
        conn.shutdown(socket.SHUT_RDWR)
      conn.close()


def test_nobody_on_an_old_port_is_taken_for_the_controller(ends, tmp_path):
  serve(ends, tmp_path).close()  # it has died; its announcement is there
  middle = ends(Middle, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  for _ in range(2):  # what the client says comes back to it
    mirror = middle.accept()
    middle.relay(mirror, mirror)
  ends(channel.Client, tmp_path, "b", {})  # what one says comes to the other
  one, other = middle.accept(), middle.accept()
  middle.relay(one, other), middle.relay(other, one)
  # Another's key proves nothing, and gets no token.
  own, _ = channel._certify()
  with contextlib.suppress(ssl.SSLError, ConnectionError):
    own.wrap_socket(middle.accept(), server_side=True).recv(1)
    pytest.fail("the client went on with a stranger")
  assert client.alone_secs() > 0 and client.inbox.empty()


@pytest.mark.parametrize("target", ["server", "client"])
@pytest.mark.parametrize(
  "harm",
  [
    lambda first, data: data[:-1] + bytes([data[-1] ^ 1]),
    lambda first, data: data + data,
    lambda first, data: b"" if first else data,
    lambda first, data: b"\0" + data if first else data,
  ],
)
def test_nobody_can_speak_for_another_on_a_connection(
  ends, tmp_path, target, harm
):
  server = serve(ends, tmp_path)
  middle = ends(Middle, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  inner, outer = middle.accept(), middle.connect()
  parts = []  # of what is said from now on
  harmful = threading.Event()

  def harmed(data):
    if harmful.is_set():
      parts.append(data)
      return harm(len(parts) == 1, data)
    return data

  harms = {"server": [harmed, bytes], "client": [bytes, harmed]}[target]
  middle.relay(inner, outer, harms[0])
  middle.relay(outer, inner, harms[1])
  assert take(server.inbox)[1]["type"] == "hello"
  until(lambda: client.alone_secs() == 0)
  harmful.set()
  seqs = itertools.count()

  def is_lost():
    seq = next(seqs)
    client.send({"type": "done", "seq": seq})
    server.send("a", {"type": "program", "seq": seq})
    if target == "client":
      return client.alone_secs() > 0
    return any(message["type"] == "lost" for _, message in server.inbox.queue)

  until(is_lost)
  inboxes = {
    "client": list(client.inbox.queue),
    "server": [m for _, m in server.inbox.queue if m["type"] == "done"],
  }
  heard = [message["seq"] for message in inboxes[target]]
  assert parts and heard == list(range(len(heard)))


def test_connection_cannot_be_played_again(ends, tmp_path):
  server = serve(ends, tmp_path)
  middle = ends(Middle, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  inner, outer = middle.accept(), middle.connect()
  said = middle.relay(inner, outer)
  middle.relay(outer, inner)
  assert take(server.inbox)[1]["type"] == "hello"
  until(lambda: client.alone_secs() == 0)
  client.send({"type": "done", "seq": 1})
  assert take(server.inbox)[1]["type"] == "done"
  again = middle.connect()
  with contextlib.suppress(ConnectionError):
    for data in said:
      again.sendall(data)
  assert is_hung_up(again)
  assert server.inbox.empty() and server.send("a", {})


def test_strangers_take_few_descriptors_and_keep_nobody_out(
  ends, tmp_path, monkeypatch
):
  monkeypatch.setattr(channel, "_MAX_UNPROVEN", 4)
  monkeypatch.setattr(channel, "_HANDSHAKE_SECS", 1e6)
  server = serve(ends, tmp_path)
  before = len(os.listdir("/proc/self/fd")), threading.active_count()
  with contextlib.ExitStack() as stack:
    strangers = [
      stack.enter_context(connect(place_of(tmp_path))) for _ in range(200)
    ]
    for stranger in strangers[:-4]:
      assert is_hung_up(stranger)
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    assert after[0] <= before[0] + len(strangers) + 4 + 1
    assert after[1] == before[1]
    ends(channel.Client, tmp_path, "a", {})
    assert take(server.inbox)[0] == "a"
    assert server.send("a", {"type": "program"})


def test_server_goes_on_after_it_could_not_wait(ends, tmp_path, monkeypatch):
  readable, left = channel._readable, [OSError(errno.ENOSPC, "no watch")]

  async def refused_once(listener):
    if left:
      raise left.pop()
    await readable(listener)

  monkeypatch.setattr(channel, "_readable", refused_once)
  server = serve(ends, tmp_path)
  ends(channel.Client, tmp_path, "island-0", {})
  assert take(server.inbox)[1]["type"] == "hello" and not left


def test_server_goes_on_after_there_was_no_descriptor(ends, tmp_path):
  with process(
    "import os, resource",
    "server = channel.Server(0)",
    f"server.announce({str(tmp_path)!r}, {{}})",
    "least = len(os.listdir('/proc/self/fd'))",
    "limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)",
    "resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))",
    "print(1, flush=True); input()",
    "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))",
    "print(server.inbox.get(), flush=True)",
  ) as child:
    assert child.stdout.readline() == "1\n"
    with contextlib.ExitStack() as stack:
      for _ in range(9):
        stack.enter_context(connect(place_of(tmp_path)))
      ends(channel.Client, tmp_path, "a", {})
      assert "not_accepted" in child.stdout.readline()
    child.stdin.write("\n")
    child.stdin.flush()
    while "hello" not in (line := child.stdout.readline()):
      assert "not_accepted" in line or "peer_refused" in line


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_peer_that_is_stopped_or_killed_holds_up_nobody(ends, tmp_path, end):
  server = serve(ends, tmp_path)
  with process(
    f"client = channel.Client({str(tmp_path)!r}, 'a', {{}})",
    "import time; time.sleep(1000)",
  ) as child:
    assert take(server.inbox)[1]["pid"] == child.pid
    if end == "killed":
      child.kill()
    else:
      child.send_signal(signal.SIGSTOP)
      for _ in range(6):  # so much that it cannot be held for the peer
        server.send("a", {"text": "x" * 10_000_000})
    assert take(server.inbox) == ("a", {"type": "lost", "pid": child.pid})
    assert not server.send("a", {})


def test_role_may_send_to_a_controller_that_is_stopped(ends, tmp_path):
  with process(
    "server = channel.Server(0)",
    f"server.announce({str(tmp_path)!r}, {{}})",
    "import time; time.sleep(1000)",
  ) as child:
    client = ends(channel.Client, tmp_path, "a", {})
    until(lambda: client.alone_secs() == 0)
    child.send_signal(signal.SIGSTOP)
    for _ in range(6):
      client.send({"text": "x" * 10_000_000})
    until(lambda: client.alone_secs() > 0)


def test_machine_that_is_lost_will_be_noticed_at_both_ends(ends, tmp_path):
  server = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  take(server.inbox)
  until(lambda: client.alone_secs() == 0)
  for link in (client._link, server._peers["a"]):
    conn = link._writer.get_extra_info("socket")
    assert conn.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
      assert conn.getsockopt(socket.IPPROTO_TCP, option) <= 10
    limit = conn.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert 10_000 <= limit <= 60_000


@pytest.mark.parametrize("heard", ["", "server.inbox.get()"])
@pytest.mark.parametrize(
  "made", ["", "client = channel.Client(run_dir, 'a', {})"]
)
def test_process_ends_without_closing_anything(tmp_path, made, heard):
  with process(
    f"run_dir = {str(tmp_path)!r}",
    "server = channel.Server(0)",
    "server.announce(run_dir, {})",
    made,
    heard if made else "",
  ) as child:
    assert child.wait(_PATIENCE_SECS) == 0
    assert child.stdout.read() == ""


def test_second_connection_of_a_peer_takes_the_place_of_the_first(
  ends, tmp_path
):
  server = serve(ends, tmp_path)
  first = ends(Peer, tmp_path, "a")
  assert take(server.inbox) == ("a", {"peer": "a"})
  second = ends(functools.partial(Peer, pid=2), tmp_path, "a")
  # The loss is told before the hello: what follows belongs to the new one.
  assert take(server.inbox) == ("a", {"type": "lost", "pid": None})
  assert take(server.inbox) == ("a", {"peer": "a", "pid": 2})
  assert first.receive() == second.receive() == {"type": "welcome"}
  with contextlib.suppress(OSError):
    first.send({"type": "of the past"})
  assert first.receive() is None
  # Nor can who has the name speak for another process that had it.
  second.send({"type": "status", "pid": 1})
  assert take(server.inbox) == ("a", {"type": "status", "pid": 2})
  # The end of the first is no end of the second.
  assert server.send("a", {"type": "program"})
  assert second.receive() == {"type": "program"}
  second.close()
  assert take(server.inbox) == ("a", {"type": "lost", "pid": 2})
  assert not server.send("a", {})


def test_role_that_was_killed_leaves_its_place_to_its_next_life(ends, tmp_path):
  server, killed = serve(ends, tmp_path), threading.Event()
  first = ends(channel.Client, tmp_path, "a", {}, killed.is_set)
  assert take(server.inbox)[1]["type"] == "hello"
  killed.set()  # in a process that lives on; its threads may hang
  second = ends(channel.Client, tmp_path, "a", {})
  said = [take(server.inbox)[1]["type"] for _ in range(2)]
  assert said == ["lost", "hello"]
  until(lambda: not first._loop._thread.is_alive())
  assert server.send("a", {"type": "program"})
  assert take(second.inbox) == {"type": "program"}
  assert server.inbox.empty()


def test_taken_port_is_refused_with_a_remedy(ends):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    for attempt in (channel.Server, channel.check_port):
      with pytest.raises(errors.UserError, match="or 0") as caught:
        attempt(port)
      assert caught.value.what == f"config.controller.port = {port}"


def test_port_is_free_again_after_close(ends, tmp_path):
  server = serve(ends, tmp_path)
  port = place_of(tmp_path)["port"]
  ends(channel.Client, tmp_path, "a", {})
  take(server.inbox)
  server.close()
  again = serve(ends, tmp_path, port)
  assert place_of(tmp_path)["port"] == port
  assert take(again.inbox)[0] == "a"


def test_announcement_is_readable_by_its_user_alone(ends, tmp_path):
  path = channel.address_path(tmp_path)
  path.parent.mkdir()
  leftover = path.with_suffix(".tmp")  # of a controller killed at this point
  leftover.write_text("")
  leftover.chmod(0o644)
  serve(ends, tmp_path)
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert place_of(tmp_path)["pid"] == os.getpid()
  assert [p.name for p in path.parent.iterdir()] == [path.name]
  assert "PRIVATE KEY" not in path.read_text()


def test_close_leaves_no_threads(ends, tmp_path):
  before = set(threading.enumerate())
  server = serve(ends, tmp_path)
  clients = [
    ends(channel.Client, tmp_path, f"island-{m}", {}) for m in range(3)
  ]
  for _ in clients:
    take(server.inbox)
  with connect(place_of(tmp_path)):
    server.close()
    for client in clients:
      client.close()
    until(lambda: set(threading.enumerate()) <= before)


def test_role_leaves_a_controller_that_was_replaced_and_is_stopped(
  ends, tmp_path
):
  first = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "island-0", {})
  take(first.inbox)
  second = serve(ends, tmp_path)  # the first hangs nobody up
  until(lambda: client.send({"type": "status"}) or not second.inbox.empty())
  assert take(second.inbox)[1]["type"] == "hello"
  client.send({"type": "done"})
  assert take(second.inbox)[1]["type"] in ("done", "status")


def test_role_stays_with_a_controller_whose_announcement_is_gone(
  ends, tmp_path
):
  server = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "island-0", {})
  take(server.inbox)
  channel.address_path(tmp_path).unlink()
  until(lambda: client.alone_secs() == 0.0)
  client.send({"type": "done"})
  assert take(server.inbox)[1]["type"] == "done"
