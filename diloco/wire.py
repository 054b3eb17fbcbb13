"""One connection of a control channel, whose ends have proved themselves.

Frames are a length and so many bytes; messages are JSON objects.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from typing import Any

Message = dict[str, Any]

HANDSHAKE_SECS = 5.0  # a peer that says nothing is hung up on
_SEND_SECS = 2.0  # a peer that takes nothing in, too; it may be stopped
_MAX_MESSAGE_BYTES = 1 << 24
_MAX_UNPROVEN_BYTES = 1 << 12  # of what is read from one
_MAC_BYTES = 32
_LENGTH = struct.Struct("!I")  # before every frame


def _sign(key: bytes, *parts: str) -> str:
  """What only a holder of `key` can say of these parts."""
  return hmac.digest(key, json.dumps(parts).encode(), "sha256").hex()


class Wire:
  """One connection. Only the thread that receives closes it.

  Any thread may send, and may hang up, which wakes the receiver.

  Both ends prove that they know the key by signing the peer's name, two fresh
  nonces and which end they are, so that no proof serves another connection,
  another role or the other direction. The same facts make the key with which
  every later message is signed, with its direction and number: one that is
  reflected, repeated, left out or changed ends the connection.
  """

  def __init__(self, conn: socket.socket):
    """Takes over an open connection whose peer has proved nothing yet."""
    self._socket = conn
    self._lock = threading.Lock()
    self._open = True
    self._deadline: float | None = time.monotonic() + HANDSHAKE_SECS
    self._key = b""  # of what is said after the proofs
    self._sides = "", ""  # this end's, the other's
    self._sent = self._received = 0
    self.pid: Any = None  # of the peer, once it has said hello

  def admit(self, authkey: bytes) -> str:
    """The accepting side; returns the name of the peer that proved itself."""
    nonce = secrets.token_hex(16)
    self._write(json.dumps({"nonce": nonce}).encode())
    answer = json.loads(self._read(_MAX_UNPROVEN_BYTES))
    facts = str(answer["peer"]), nonce, str(answer["nonce"])
    _check(answer["proof"], _sign(authkey, "client", *facts))
    proof = _sign(authkey, "server", *facts)
    self._write(json.dumps({"proof": proof}).encode())
    self._key = _sign(authkey, "session", *facts).encode()
    self._sides = "server", "client"
    return facts[0]

  def join(self, authkey: bytes, peer: str) -> None:
    """The connecting side, as `peer`."""
    nonce = secrets.token_hex(16)
    challenge = json.loads(self._read(_MAX_UNPROVEN_BYTES))
    facts = peer, str(challenge["nonce"]), nonce
    proof = _sign(authkey, "client", *facts)
    answer = {"peer": peer, "nonce": nonce, "proof": proof}
    self._write(json.dumps(answer).encode())
    told = json.loads(self._read(_MAX_UNPROVEN_BYTES))
    _check(told["proof"], _sign(authkey, "server", *facts))
    self._key = _sign(authkey, "session", *facts).encode()
    self._sides = "client", "server"

  def established(self) -> None:
    """From now on silence is no fault."""
    self._deadline = None
    self._socket.settimeout(None)
    limit = struct.pack("ll", int(_SEND_SECS), int(_SEND_SECS % 1 * 1e6))
    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

  def send(self, message: Message) -> bool:
    """Sends; False, and no connection any more, when that fails."""
    data = json.dumps(message).encode()
    with self._lock:
      if not self._open:
        return False
      mac = self._mac(self._sides[0], self._sent, data)
      self._sent += 1
      try:
        self._write(mac + data)
      except OSError:
        self._shut()  # part of the message may be on its way
        return False
    return True

  def receive(self) -> Message:
    """Waits for a message.

    Raises:
      OSError, EOFError: the connection has ended.
      ValueError: this is no message, or not the peer's next one.
    """
    frame = self._read(_MAX_MESSAGE_BYTES)
    mac, data = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
    if not hmac.compare_digest(
      mac, self._mac(self._sides[1], self._received, data)
    ):
      raise ValueError("a message that is not the peer's next one")
    self._received += 1
    message = json.loads(data)
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
      self._socket.close()

  def _mac(self, side: str, number: int, data: bytes) -> bytes:
    head = f"{side} {number} ".encode()
    return hmac.digest(self._key, head + data, "sha256")

  def _write(self, frame: bytes) -> None:
    self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

  def _read(self, limit: int) -> bytes:
    (size,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
    if size > limit:
      raise ValueError(f"{size} bytes, where {limit} are the most")
    return self._read_exactly(size)

  def _read_exactly(self, size: int) -> bytes:
    data = bytearray(size)
    left = memoryview(data)
    while left:
      if self._deadline is not None:
        # For all of the handshake: one that dribbles is silent too.
        self._socket.settimeout(max(self._deadline - time.monotonic(), 1e-3))
      count = self._socket.recv_into(left)
      if not count:
        raise EOFError("the peer hung up")
      left = left[count:]
    return bytes(data)

  def _shut(self) -> None:
    # Closing a socket does not wake a thread that reads from it.
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)


def _check(proof: object, expected: str) -> None:
  if not hmac.compare_digest(str(proof).encode(), expected.encode()):
    raise PermissionError("a wrong proof of the key")
