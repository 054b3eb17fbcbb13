"""Control channels over real loopback sockets."""

import contextlib
import json
import os
import queue
import socket
import stat
import threading
import time
import types

import pytest

from diloco import channel, errors, wire

_PATIENCE_SECS = 10.0  # far above what loopback needs, for a busy machine


def eventually(holds):
  deadline = time.monotonic() + _PATIENCE_SECS
  while not holds():
    assert time.monotonic() < deadline
    time.sleep(0.01)


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


def wire_to(run_dir, peer):
  """The client's half of a channel, for what no client does."""
  place = place_of(run_dir)
  conn = socket.create_connection((place["host"], place["port"]))
  end = wire.Wire(conn)
  end.join(place["authkey"].encode(), peer)
  return end


def read_frame(conn):
  """The next frame with its length; b"" at the end of the connection."""
  with contextlib.suppress(ConnectionError):
    length = conn.recv(4, socket.MSG_WAITALL)
    if length:
      size = int.from_bytes(length)
      return length + conn.recv(size, socket.MSG_WAITALL)
  return b""


def frame(content):
  data = json.dumps(content).encode()
  return len(data).to_bytes(4) + data


class Middle:
  """A man in the middle: what clients of a run find where it listened.

  It knows no key. `server` says where the run's server is now, if anywhere.
  """

  def __init__(self, run_dir, server=None):
    self.listener = socket.create_server(("127.0.0.1", 0))
    place = place_of(run_dir)
    self.server = place["host"], place["port"]
    here = place | {"port": self.listener.getsockname()[1]}
    channel.address_path(run_dir).write_text(json.dumps(here))
    self.conns = []

  def accept(self):
    return self._keep(self.listener.accept()[0])

  def connect(self):
    return self._keep(socket.create_connection(self.server))

  def _keep(self, conn):
    conn.settimeout(_PATIENCE_SECS)
    self.conns.append(conn)
    return conn

  def close(self):
    for conn in [self.listener, *self.conns]:
      conn.close()


def test_hello_then_messages_both_ways(ends, tmp_path):
  server = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "island-0", {"ready": False})
  hello = {"type": "hello", "peer": "island-0", "pid": os.getpid()}
  assert take(server.inbox) == ("island-0", hello | {"ready": False})
  assert server.send("island-0", {"type": "program", "seq": 1})
  assert server.send("island-0", {"type": "program", "seq": 2})
  assert [take(client.inbox)["seq"] for _ in range(2)] == [1, 2]
  eventually(lambda: client.alone_secs() == 0)
  client.send({"type": "done", "seq": 1})
  assert take(server.inbox) == ("island-0", {"type": "done", "seq": 1})
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
  eventually(lambda: client.alone_secs() == 0)

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
  eventually(lambda: client.alone_secs() > 0)
  second = serve(ends, tmp_path)
  assert take(second.inbox)[1]["ready"]
  assert second.send("syncer", {"type": "program"})
  assert take(client.inbox) == {"type": "program"}
  eventually(lambda: client.alone_secs() == 0)


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
    eventually(lambda: client.alone_secs() == 0)
    now[0] += 1000.0
    assert client.alone_secs() == 0
    server.close()
    eventually(lambda: client._wire is None)
    now[0] += secs
    assert client.alone_secs() == secs


@pytest.mark.parametrize(
  "content",
  [
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"host": 1, "port": 2}',
    '{"host": "127.0.0.1", "port": 99999999, "authkey": ""}',
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
  eventually(lambda: not client.alone_secs())
  channel.address_path(tmp_path).write_text("[" * 100_000)
  client.send({"type": "status"})
  assert take(inbox)[1]["type"] == "status"


def test_wrong_key_is_refused(ends, tmp_path):
  server = serve(ends, tmp_path)
  path = channel.address_path(tmp_path)
  right = path.read_text()
  path.write_text(json.dumps(place_of(tmp_path) | {"authkey": "wrong"}))
  client = ends(channel.Client, tmp_path, "a", {})
  with pytest.raises(queue.Empty):
    server.inbox.get(timeout=0.3)
  assert client.alone_secs() > 0.2
  path.write_text(right)
  assert take(server.inbox)[0] == "a"


def test_silent_peer_blocks_nobody_and_is_hung_up_on(
  ends, tmp_path, monkeypatch
):
  monkeypatch.setattr(wire, "HANDSHAKE_SECS", 0.2)
  server = serve(ends, tmp_path)
  place = place_of(tmp_path)
  with socket.create_connection((place["host"], place["port"])) as silent:
    ends(channel.Client, tmp_path, "a", {})
    assert take(server.inbox)[0] == "a"
    silent.settimeout(_PATIENCE_SECS)
    while silent.recv(1024):  # the challenge, then the end
      pass


def test_established_peer_may_be_silent(ends, tmp_path, monkeypatch):
  monkeypatch.setattr(wire, "HANDSHAKE_SECS", 0.2)
  server = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  take(server.inbox)
  with pytest.raises(queue.Empty):
    server.inbox.get(timeout=0.5)
  assert client.alone_secs() == 0
  assert server.send("a", {"still": "there"})
  assert take(client.inbox) == {"still": "there"}


@pytest.mark.parametrize(
  "hello", [[1], {}, 3, None, {"peer": "b", "type": "hello"}]
)
def test_peer_whose_hello_is_none_of_its_own_is_refused(ends, tmp_path, hello):
  server = serve(ends, tmp_path)
  end = wire_to(tmp_path, "a")
  assert end.send(hello)
  ends(channel.Client, tmp_path, "c", {})
  assert take(server.inbox)[0] == "c"
  with pytest.raises((EOFError, ConnectionError)):
    end.receive()
  end.close()


@pytest.mark.parametrize(
  "answer",
  [
    b"\xff\xff\xff\xff",
    b"\0\0\0\1\xff",
    b"\0\0\0\0",
    b"\0\0\x0f\xff" + b"[" * 0xFFF,  # deeper than any parser goes
    frame([]),
    frame({}),
    frame({"peer": "a", "nonce": "", "proof": ""}),
    frame({"peer": "a", "nonce": 5, "proof": None}),
    frame({"peer": "a", "nonce": "\u00e9", "proof": "\u00e9"}),
  ],
)
def test_stranger_is_refused_whatever_it_answers(ends, tmp_path, answer):
  server = serve(ends, tmp_path)
  place = place_of(tmp_path)
  with socket.create_connection((place["host"], place["port"])) as conn:
    conn.settimeout(_PATIENCE_SECS)
    assert read_frame(conn)
    conn.sendall(answer)
    assert read_frame(conn) == b""
  ends(channel.Client, tmp_path, "a", {})
  assert take(server.inbox)[0] == "a"


def test_proof_of_one_role_makes_nobody_a_controller(ends, tmp_path):
  serve(ends, tmp_path).close()  # the key is known to its roles alone
  middle = ends(Middle, tmp_path)
  first = ends(channel.Client, tmp_path, "a", {})
  to_first = middle.accept()
  to_first.sendall(frame({"nonce": "0" * 32}))
  said = json.loads(read_frame(to_first)[4:])
  # Whatever either says is tried on the first: its own proof, another's of
  # its nonce, and another connection of the same role.
  proofs = [said["proof"]]
  for other in ("b", "a"):
    ends(channel.Client, tmp_path, other, {})
    to_other = middle.accept()
    to_other.sendall(frame({"nonce": said["nonce"]}))
    proofs.append(json.loads(read_frame(to_other)[4:])["proof"])
  to_first.sendall(frame({"proof": proofs[0]}))
  assert read_frame(to_first) == b""
  for proof in proofs[1:]:
    again = middle.accept()
    again.sendall(frame({"nonce": said["nonce"]}))
    assert read_frame(again)
    again.sendall(frame({"proof": proof}))
    assert read_frame(again) == b""
  assert first.alone_secs() > 0 and first.inbox.empty()


def test_reflected_proof_is_of_the_wrong_role_or_direction(ends, tmp_path):
  """The same without sockets: each fact alone makes another proof."""
  facts = ("client", "a", "1", "2")
  proofs = {wire._sign(b"key", *facts)}
  for i, other in enumerate(("server", "b", "2", "1")):
    proofs.add(wire._sign(b"key", *facts[:i], other, *facts[i + 1 :]))
  proofs.add(wire._sign(b"key", "client", "a1", "", "2"))
  proofs.add(wire._sign(b"other", *facts))
  assert len(proofs) == 7


@pytest.mark.parametrize(
  "harm",
  [
    lambda hello, message: message[:-1] + b"!",
    lambda hello, message: hello,  # said once already
    lambda hello, message: frame({"type": "done", "seq": 1}),
    lambda hello, message: b"\0\0\0\0",
  ],
)
@pytest.mark.parametrize("target", ["server", "client"])
def test_nobody_can_speak_for_another_on_a_connection(
  ends, tmp_path, harm, target
):
  server = serve(ends, tmp_path)
  middle = ends(Middle, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  inner, outer = middle.accept(), middle.connect()
  inner.sendall(read_frame(outer))
  outer.sendall(read_frame(inner))
  inner.sendall(read_frame(outer))
  hello = read_frame(inner)
  outer.sendall(hello)
  assert take(server.inbox)[1]["type"] == "hello"
  eventually(lambda: client.alone_secs() == 0)
  if target == "server":
    client.send({"type": "done", "seq": 1})
    outer.sendall(harm(hello, read_frame(inner)))
    assert take(server.inbox)[1]["type"] == "lost"
  else:
    server.send("a", {"type": "program"})
    inner.sendall(harm(hello, read_frame(outer)))
    eventually(lambda: client.alone_secs() > 0)
    assert client.inbox.empty()


def test_strangers_take_few_descriptors_and_keep_nobody_out(
  ends, tmp_path, monkeypatch
):
  monkeypatch.setattr(channel, "_MAX_UNPROVEN", 4)
  monkeypatch.setattr(wire, "HANDSHAKE_SECS", 1e6)
  server = serve(ends, tmp_path)
  place = place_of(tmp_path)
  with contextlib.ExitStack() as stack:

    def connect():
      conn = socket.create_connection((place["host"], place["port"]))
      conn.settimeout(_PATIENCE_SECS)
      return stack.enter_context(conn)

    first = connect()
    assert read_frame(first)  # its challenge
    for _ in range(29):
      connect()
    ends(channel.Client, tmp_path, "a", {})
    assert take(server.inbox)[0] == "a"
    assert len(server._wires) <= channel._MAX_UNPROVEN + 1
    assert read_frame(first) == b""
    assert server.send("a", {"type": "program"})


def test_stranger_that_dribbles_has_no_more_time_than_a_silent_one(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(wire.time, "monotonic", lambda: now[0])
  ours, theirs = socket.socketpair()
  end = wire.Wire(ours)
  theirs.sendall(b"\0\0\1")
  now[0] = wire.HANDSHAKE_SECS + 1
  with pytest.raises(TimeoutError):
    end._read(1000)
  assert ours.gettimeout() < 0.1  # and not as long again for every byte
  end.close()
  theirs.close()


@pytest.mark.parametrize("what", ["descriptor", "thread"])
def test_server_goes_on_when_the_machine_refuses_it_something(
  ends, tmp_path, monkeypatch, what
):
  refusals = [3]
  plain = {"descriptor": wire.Wire, "thread": threading.Thread.start}[what]

  def refuse(*args):
    if refusals[0] and threading.current_thread().name == "accept":
      refusals[0] -= 1
      if what == "thread":
        raise RuntimeError("can't start new thread")
      args[0].close()
      raise OSError(24, "Too many open files")
    return plain(*args)

  owner, name = (
    (wire, "Wire") if what == "descriptor" else (threading.Thread, "start")
  )
  monkeypatch.setattr(owner, name, refuse)
  server = serve(ends, tmp_path)
  ends(channel.Client, tmp_path, "a", {})
  assert take(server.inbox)[0] == "a"
  assert refusals == [0]
  monkeypatch.undo()


def test_peer_that_takes_nothing_in_holds_up_nobody(
  ends, tmp_path, monkeypatch
):
  monkeypatch.setattr(wire, "_SEND_SECS", 0.2)
  server = serve(ends, tmp_path)
  end = wire_to(tmp_path, "stopped")
  assert end.send({"peer": "stopped", "pid": 5})
  take(server.inbox)
  message = {"text": "x" * 10_000_000}
  started = time.monotonic()
  while server.send("stopped", message):
    assert time.monotonic() < started + _PATIENCE_SECS
  assert take(server.inbox) == ("stopped", {"type": "lost", "pid": 5})
  end.close()


def test_second_connection_of_a_peer_takes_the_place_of_the_first(
  ends, tmp_path
):
  server = serve(ends, tmp_path)
  first, second = (wire_to(tmp_path, "a") for _ in range(2))
  first.send({"peer": "a", "pid": 1})
  assert take(server.inbox)[1]["pid"] == 1
  second.send({"peer": "a", "pid": 2})
  # The loss is told before the hello: what follows belongs to the new one.
  assert take(server.inbox) == ("a", {"type": "lost", "pid": 1})
  assert take(server.inbox) == ("a", {"peer": "a", "pid": 2})
  with pytest.raises(EOFError):
    first.receive()
  first.close()
  # The end of the first is no end of the second.
  eventually(lambda: len(server._wires) == 1)
  assert server.inbox.empty()
  assert server.send("a", {"type": "program"})
  assert second.receive() == {"type": "program"}
  second.hang_up()
  second.close()
  assert take(server.inbox) == ("a", {"type": "lost", "pid": 2})
  assert not server.send("a", {})


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


def test_close_leaves_no_threads(ends, tmp_path):
  before = set(threading.enumerate())
  server = serve(ends, tmp_path)
  clients = [
    ends(channel.Client, tmp_path, f"island-{m}", {}) for m in range(3)
  ]
  for _ in clients:
    take(server.inbox)
  place = place_of(tmp_path)
  with socket.create_connection((place["host"], place["port"])):
    server.close()
    for client in clients:
      client.close()
    eventually(lambda: set(threading.enumerate()) <= before)


def test_role_leaves_a_controller_that_was_replaced_and_is_stopped(
  ends, tmp_path
):
  first = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "island-0", {})
  take(first.inbox)
  second = serve(ends, tmp_path)  # the first hangs nobody up
  eventually(
    lambda: client.send({"type": "status"}) or not second.inbox.empty()
  )
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
  eventually(lambda: client.alone_secs() == 0.0)
  client.send({"type": "done"})
  assert take(server.inbox)[1]["type"] == "done"
