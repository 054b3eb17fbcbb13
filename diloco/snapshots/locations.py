"""Where a snapshot store is: URLs, and what TensorStore makes of them.

    file:///directory
    s3://bucket/prefix?endpoint=https://host:port&region=name
    gs://bucket/prefix

What an `s3` URL leaves out is taken from the environment as other clients of
S3 take it: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or
AWS_DEFAULT_REGION. Credentials are never in a URL, which every log may show.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import urllib.parse
from collections.abc import Iterator
from typing import Any

import tensorstore as ts

from diloco import errors

_SHAPES = "file:///directory, s3://bucket/prefix or gs://bucket/prefix"
_QUERY = frozenset(["endpoint", "region"])
# What fails is asked for again, some seconds in all and with jitter: a conflict
# (409) with another writer too. After that it is an error, and up to the
# procedure that asked.
_RETRIES = {"max_retries": 4, "initial_delay": "100ms", "max_delay": "1s"}
# A request that gets no answer ends, and lets go of the memory it was to fill.
_LIMITS = {
  "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "5",
  "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "10",
  "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "256",
}


def bound_requests(url: str) -> None:
  """Gives every request to a store over a network its deadline.

  TensorStore reads its limits from this process's environment, when it first
  needs them; what is set there already counts.
  """
  if urllib.parse.urlsplit(url).scheme in ("s3", "gs"):
    for name, limit in _LIMITS.items():
      os.environ.setdefault(name, limit)


def check(url: str, name: str = "config.store") -> None:
  """Refuses what is no URL of a store; touches nothing.

  Raises:
    UserError: it cannot be parsed, or names no kind of store there is.
  """
  what = f"{name} = {url!r}"
  try:
    parts = urllib.parse.urlsplit(url)
    query = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
    ends = [urllib.parse.urlsplit(end) for end in query.get("endpoint", ())]
  except ValueError as error:
    why = f"it is no URL of a store ({error})"
    raise errors.UserError(what, why, f"write {_SHAPES}") from error
  for one in (parts, *ends):
    if "@" in one.netloc:
      raise errors.UserError(
        f"{name} = '{one.scheme}://...@{one.hostname}{one.path}'",
        "credentials are not given in a URL, which every log may show",
        "leave them out, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
      )
  why = ""
  if parts.scheme not in ("file", "s3", "gs"):
    why = "it is no URL of a store"
  elif parts.scheme == "file" and (parts.netloc or not parts.path[1:]):
    why = "it names no directory"
  elif parts.scheme != "file" and not parts.netloc:
    why = "it names no bucket"
  elif strange := set(query) - (_QUERY if parts.scheme == "s3" else set()):
    why = f"{sorted(strange)[0]!r} is no option of {parts.scheme!r} stores"
  elif empty := [option for option, given in query.items() if "" in given]:
    why = f"its {empty[0]} is empty"
  elif any(e.scheme not in ("http", "https") or not e.netloc for e in ends):
    why = "its endpoint does not begin with http://host or https://host"
  elif parts.fragment:
    why = "'#' cannot be in it"
  else:
    try:
      ts.KvStore.Spec(kvstore(url))
    except ValueError as error:
      why = errors.one_line(error)
  if why:
    raise errors.UserError(what, why, f"write {_SHAPES}")


def below(url: str, name: str) -> str:
  """URL of what is at `name/` in the store at a URL."""
  parts = urllib.parse.urlsplit(url)
  path = f"{parts.path.rstrip('/')}/{name}/"
  return urllib.parse.urlunsplit(parts._replace(path=path))


def lies_in(url: str, folder: str | os.PathLike[str]) -> bool:
  """Whether a store is a directory below another."""
  place = directory(url)
  return place is not None and place.resolve().is_relative_to(
    pathlib.Path(folder).resolve()
  )


def directory(url: str) -> pathlib.Path | None:
  """Where a store is in the file system; None if it is elsewhere."""
  parts = urllib.parse.urlsplit(url)
  if parts.scheme != "file":
    return None
  return pathlib.Path(urllib.parse.unquote(parts.path))


@contextlib.contextmanager
def left_as_found(url: str) -> Iterator[None]:
  """Empty directories of a store that were not there are removed at the end.

  TensorStore makes them with the first write, and leaves them behind.
  """
  place = directory(url)
  chain = (place, *place.parents) if place else ()
  made = [path for path in chain if not path.exists()]
  try:
    yield
  finally:
    with contextlib.suppress(OSError):  # somebody else uses it by now
      for path in made:
        path.rmdir()


def kvstore(url: str) -> Any:
  """What TensorStore opens for a store's URL; keys begin right below it."""
  parts = urllib.parse.urlsplit(url)
  path = urllib.parse.unquote(parts.path).strip("/")
  place = {"bucket": parts.netloc, "path": f"{path}/" if path else ""}
  if parts.scheme == "gs":
    return {"driver": "gcs", **place, "gcs_request_retries": _RETRIES}
  if parts.scheme != "s3":
    return url if url.endswith("/") else url + "/"
  query = dict(urllib.parse.parse_qsl(parts.query))
  endpoint = query.get("endpoint") or _first(
    "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"
  )
  region = query.get("region") or _first("AWS_REGION", "AWS_DEFAULT_REGION")
  spec: dict[str, Any] = {
    "driver": "s3",
    **place,
    # Else TensorStore asks first and writes then, on endpoints it knows not.
    "use_conditional_write": True,
    "s3_request_retries": _RETRIES,
  }
  if endpoint:
    spec["endpoint"] = endpoint.rstrip("/")
    region = region or "us-east-1"  # most others than Amazon's have none
  if region:
    spec["aws_region"] = region
  if "AWS_ACCESS_KEY_ID" in os.environ:
    # It would look for files first, and complain of each that is not there.
    spec["aws_credentials"] = {"type": "environment"}
  return spec


def _first(*names: str) -> str:
  return next(filter(None, map(os.environ.get, names)), "")
