"""An S3 server of one bucket that answers badly when it is told to."""

import contextlib
import hashlib
import http.server
import threading

LOST = "lost"  # the answer to what was done


class _Requests(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"  # connections are used again

  def log_message(self, *args):
    pass

  def _answer(self, code, body=b""):
    self.send_response(code)
    self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def do_GET(self):
    held = self.server.held.get(self.path)
    self._answer(404 if held is None else 200, held or b"")

  def do_PUT(self):
    server, headers = self.server, self.headers
    data = self.rfile.read(int(headers["Content-Length"]))
    wanted = headers["If-Match"] or headers["If-None-Match"]
    with server.lock:
      fault = server.faults.pop(0) if wanted and server.faults else None
      held = server.held.get(self.path)
      etag = "*" if held is None else f'"{hashlib.md5(held).hexdigest()}"'
      if isinstance(fault, int):
        return self._answer(fault, b"<Error><Code>SlowDown</Code></Error>")
      if wanted not in (None, etag):
        return self._answer(412)
      server.held[self.path] = data
    if fault == LOST:
      self.close_connection = True
    else:
      self._answer(200)


@contextlib.contextmanager
def serving():
  """A server; what is in `faults` becomes of writes on a condition, in turn."""
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Requests)
  server.daemon_threads, server.lock = True, threading.Lock()
  server.held, server.faults = {}, []
  server.url = f"s3://bucket/x?endpoint=http://127.0.0.1:{server.server_port}"
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  yield server
  server.shutdown()
  server.server_close()
  thread.join()
