"""Control channels over real loopback sockets."""

import contextlib
import json
import os
import queue
import socket
import stat
import threading
import time
from multiprocessing import connection

import pytest

from diloco import channel, errors

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


def test_alone_secs_counts_from_birth_and_from_every_loss(ends, tmp_path):
  client = ends(channel.Client, tmp_path, "a", {})
  eventually(lambda: client.alone_secs() > 0.05)
  client.send({"type": "nobody hears this"})
  server = serve(ends, tmp_path)
  assert take(server.inbox)[1]["type"] == "hello"
  eventually(lambda: client.alone_secs() == 0)
  server.close()
  eventually(lambda: client.alone_secs() > 0)
  assert client.alone_secs() < _PATIENCE_SECS


@pytest.mark.parametrize(
  "content", ["", "{", "[]", "null", "{}", '{"host": 1, "port": 2}']
)
def test_client_survives_any_announcement(ends, tmp_path, content):
  path = channel.address_path(tmp_path)
  path.parent.mkdir()
  path.write_text(content)
  ends(channel.Client, tmp_path, "a", {})
  time.sleep(0.05)  # some attempts
  assert take(serve(ends, tmp_path).inbox)[0] == "a"


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
  monkeypatch.setattr(channel, "_HANDSHAKE_SECS", 0.2)
  server = serve(ends, tmp_path)
  place = place_of(tmp_path)
  with socket.create_connection((place["host"], place["port"])) as silent:
    ends(channel.Client, tmp_path, "a", {})
    assert take(server.inbox)[0] == "a"
    silent.settimeout(_PATIENCE_SECS)
    while silent.recv(1024):  # the challenge, then the end
      pass


def test_established_peer_may_be_silent(ends, tmp_path, monkeypatch):
  monkeypatch.setattr(channel, "_HANDSHAKE_SECS", 0.2)
  server = serve(ends, tmp_path)
  client = ends(channel.Client, tmp_path, "a", {})
  take(server.inbox)
  with pytest.raises(queue.Empty):
    server.inbox.get(timeout=0.5)
  assert client.alone_secs() == 0
  assert server.send("a", {"still": "there"})
  assert take(client.inbox) == {"still": "there"}


@pytest.mark.parametrize("hello", [b"\xff", b"[1]", b"{}", b"", b"3"])
def test_peer_that_talks_nonsense_is_refused(ends, tmp_path, hello):
  server = serve(ends, tmp_path)
  place = place_of(tmp_path)
  conn = connection.Client(
    (place["host"], place["port"]), authkey=place["authkey"].encode()
  )
  conn.send_bytes(hello)
  with pytest.raises((EOFError, OSError)):
    conn.recv_bytes()
  conn.close()
  ends(channel.Client, tmp_path, "a", {})
  assert take(server.inbox)[0] == "a"


def test_peer_that_takes_nothing_in_holds_up_nobody(
  ends, tmp_path, monkeypatch
):
  monkeypatch.setattr(channel, "_SEND_SECS", 0.2)
  server = serve(ends, tmp_path)
  place = place_of(tmp_path)
  conn = connection.Client(
    (place["host"], place["port"]), authkey=place["authkey"].encode()
  )
  conn.send_bytes(json.dumps({"peer": "stopped", "pid": 5}).encode())
  take(server.inbox)
  message = {"text": "x" * 10_000_000}
  started = time.monotonic()
  while server.send("stopped", message):
    assert time.monotonic() < started + _PATIENCE_SECS
  assert take(server.inbox) == ("stopped", {"type": "lost", "pid": 5})
  conn.close()


def test_second_connection_of_a_peer_takes_the_place_of_the_first(
  ends, tmp_path
):
  server = serve(ends, tmp_path)
  ends(channel.Client, tmp_path, "a", {"life": 1, "pid": 1})
  assert take(server.inbox)[1]["life"] == 1
  second = ends(channel.Client, tmp_path, "a", {"life": 2, "pid": 2})
  # The loss is told before the hello: what follows belongs to the new one.
  assert take(server.inbox) == ("a", {"type": "lost", "pid": 1})
  assert take(server.inbox)[1]["life"] == 2
  assert server.send("a", {"type": "program"})
  assert take(second.inbox) == {"type": "program"}


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
