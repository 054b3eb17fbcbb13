"""An S3 server on this machine, for tests and benchmarks: moto, in memory.

Question: what does a run do on an object store, and on a slow one?

Command: `python -m experiments.benchmarks.s3_server --delay_secs=0.05`; it
prints the URL to give as `config.store`, and serves until it is ended. Give
runs any credentials: AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x.

`--delay_secs` is waited before each request is served, whatever others do
meanwhile, as on a store that far away. GET /counts tells the requests served,
by method.
"""

import argparse
import collections
import contextlib
import functools
import io
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

BUCKET = "bucket"


class _Paced:
  """A web application that counts its requests and takes its time for each."""

  def __init__(self, app: Callable[..., Iterable[bytes]], delay_secs: float):
    self._app = app
    self._delay_secs = delay_secs
    self._counts: collections.Counter[str] = collections.Counter()
    self._lock = threading.Lock()

  def __call__(
    self, environ: dict[str, Any], start: Callable[..., Any]
  ) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/counts":
      start("200 OK", [("Content-Type", "application/json")])
      return [json.dumps(self._counts).encode()]
    kind = environ["REQUEST_METHOD"]
    if "list-type" in environ["QUERY_STRING"]:
      kind = "LIST"
    with self._lock:
      self._counts[kind] += 1
    time.sleep(self._delay_secs)
    return self._app(environ, start)


class Server:
  """A server in a process of its own, which ends with `close`."""

  def __init__(self, delay_secs: float = 0.0):
    """Starts it and makes the bucket."""
    self._process = subprocess.Popen(
      [
        sys.executable,
        *("-W", "ignore", str(pathlib.Path(__file__).resolve())),
        f"--delay_secs={delay_secs}",
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    assert self._process.stdout is not None
    self.url = self._process.stdout.readline().strip()
    self.endpoint = self.url.partition("endpoint=")[2]

  def place(self, prefix: str) -> str:
    """URL of a store of its own."""
    return self.url.replace("/?", f"/{prefix}?")

  def counts(self) -> dict[str, int]:
    """Requests served so far, by method."""
    with urllib.request.urlopen(f"{self.endpoint}/counts") as answer:
      found: dict[str, int] = json.load(answer)
    return found

  def pause(self) -> None:
    """Answers nobody: connections stand open, as when a network is cut."""
    self._process.send_signal(signal.SIGSTOP)

  def go_on(self) -> None:
    """Answers all that was asked meanwhile."""
    self._process.send_signal(signal.SIGCONT)

  def close(self) -> None:
    """Ends it; nothing is left."""
    self._process.kill()
    self._process.communicate()


@contextlib.contextmanager
def serving(delay_secs: float = 0.0) -> Iterator[Server]:
  """A server, while it is needed; this process has credentials for it."""
  for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    os.environ.setdefault(name, "any")
  server = Server(delay_secs)
  try:
    yield server
  finally:
    server.close()


def _keeping(werkzeug: Any) -> Any:
  """A handler whose connections last, as those of stores used in earnest.

  Werkzeug's own closes each after one answer, and looks for what may be left in
  it for ten milliseconds.
  """

  class Handler(werkzeug.WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # heads and bodies are sent by themselves

    def run_wsgi(self) -> None:
      environ, told = self.make_environ(), []
      asked = self.rfile.read(int(environ.get("CONTENT_LENGTH") or 0))
      environ["wsgi.input"] = io.BytesIO(asked)
      answer = self.server.app(environ, lambda *given: told.extend(given[:2]))
      body = b"".join(answer)
      if hasattr(answer, "close"):
        answer.close()
      status, headers = told
      code, _, reason = status.partition(" ")
      self.send_response_only(int(code), reason)
      for name, value in headers:
        self.send_header(name, value)
      if "content-length" not in {name.lower() for name, _ in headers}:
        self.send_header("Content-Length", str(len(body)))
      self.end_headers()
      self.wfile.write(body)

  return Handler


def main() -> None:
  """Serves until it is ended."""
  # Only here: whoever only asks for a server needs none of it.
  from botocore import utils
  from moto import server as moto
  from werkzeug import serving as werkzeug

  # A listing would spend most of its time on parsing what it has just written.
  utils.parse_timestamp = functools.cache(utils.parse_timestamp)
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--delay_secs", type=float, default=0.0)
  parser.add_argument("--port", type=int, default=0)
  args = parser.parse_args()
  logging.getLogger("werkzeug").setLevel(logging.ERROR)
  paced = _Paced(moto.create_backend_app("s3"), args.delay_secs)
  server = werkzeug.make_server(
    "127.0.0.1", args.port, paced, True, request_handler=_keeping(werkzeug)
  )
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  endpoint = f"http://127.0.0.1:{server.server_port}"
  new = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
  urllib.request.urlopen(new).close()
  print(f"s3://{BUCKET}/?endpoint={endpoint}", flush=True)
  thread.join()


if __name__ == "__main__":
  main()
