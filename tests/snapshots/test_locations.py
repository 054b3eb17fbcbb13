"""What is a URL of a store, and where that is."""

import os
import pathlib

import pytest

from diloco import errors
from diloco.snapshots import locations


@pytest.mark.parametrize(
  ("url", "why"),
  [
    ("/var/run", "no URL of a store"),
    ("memory://", "no URL of a store"),
    ("http://host/run", "no URL of a store"),
    ("s3://[", "no URL of a store"),
    ("s3://b?endpoint=http://[", "no URL of a store"),
    ("file://host/run", "it names no directory"),
    ("file:///", "it names no directory"),
    ("s3:///run", "it names no bucket"),
    ("gs:", "it names no bucket"),
    ("s3://b/run?profile=me", "'profile' is no option of 's3' stores"),
    ("gs://b/run?region=c", "'region' is no option of 'gs' stores"),
    ("file:///run?region=c", "'region' is no option of 'file' stores"),
    ("s3://b?endpoint=http://h&region=", "its region is empty"),
    ("s3://b?endpoint=", "its endpoint is empty"),
    ("s3://b?endpoint=h:90", "its endpoint does not begin with http"),
    ("s3://b?endpoint=http://", "its endpoint does not begin with http"),
    ("gs://b/run#2", "'#' cannot be in it"),
    ("s3://me:secret@b/run", "credentials are not given in a URL"),
    ("s3://b?endpoint=https://me:secret@h", "credentials are not given"),
    ("s3://b/run", "Invalid S3 bucket name"),
    ("s3://bucket/a//../b?region=c", ""),
    ("s3://bucket", ""),
    ("gs://bucket/run", ""),
    ("file:///a%20b", ""),
  ],
)
def test_what_is_no_store_is_refused_and_no_secret_told(url, why):
  if not why:
    return locations.check(url)
  with pytest.raises(errors.UserError, match=why) as refused:
    locations.check(url, "--store")
  assert refused.value.what.startswith("--store = ")
  assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
  ("url", "spec"),
  [
    ("file:///a%20b", "file:///a%20b/"),
    ("file:///a/", "file:///a/"),
    ("gs://b/a%20b/", {"driver": "gcs", "bucket": "b", "path": "a b/"}),
    ("s3://b", {"driver": "s3", "bucket": "b", "path": ""}),
  ],
)
def test_keys_begin_right_below_a_url(monkeypatch, url, spec):
  monkeypatch.setattr("os.environ", {})
  found = locations.kvstore(url)
  if isinstance(found, dict):
    assert "aws_credentials" not in found
    found = {name: found[name] for name in ("driver", "bucket", "path")}
  assert found == spec


def test_secrets_of_the_environment_are_looked_for_nowhere_else(monkeypatch):
  monkeypatch.setattr("os.environ", {"AWS_ACCESS_KEY_ID": "me"})
  found = locations.kvstore("s3://b")
  assert found["aws_credentials"] == {"type": "environment"}


@pytest.mark.parametrize("url", ["s3://b?region=c", "gs://b", "file:///run"])
def test_requests_over_a_network_end_and_as_the_user_says(monkeypatch, url):
  mine = {"TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "90"}
  monkeypatch.setattr("os.environ", dict(mine))
  locations.bound_requests(url)
  expected = mine if url.startswith("file") else locations._LIMITS | mine
  assert os.environ == expected


def test_place_in_a_store_and_on_the_disk(tmp_path):
  assert locations.below("s3://b/a/?region=c", "d") == "s3://b/a/d/?region=c"
  assert locations.below("gs://b", "d") == "gs://b/d/"
  assert locations.directory("file:///a%20b/c") == pathlib.Path("/a b/c")
  assert locations.directory("s3://b/a") is None
  (tmp_path / "link").symlink_to(tmp_path / "run")
  for inside, place in [
    *((True, "run"), (True, "run/store"), (True, "link/store")),
    *((False, "runs"), (False, "run/../store")),
  ]:
    url = f"file://{tmp_path}/{place}"
    assert locations.lies_in(url, tmp_path / "run") == inside, place
  assert not locations.lies_in("s3://b/a", "/")


@pytest.mark.parametrize(
  ("url", "environ", "endpoint", "region"),
  [
    ("s3://b/p", {}, None, None),
    ("s3://b", {"AWS_DEFAULT_REGION": "c", "AWS_REGION": "d"}, None, "d"),
    ("s3://b", {"AWS_ENDPOINT_URL": "http://a/"}, "http://a", "us-east-1"),
    (
      "s3://b",
      {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://c"},
      *("http://c", "us-east-1"),
    ),
    (
      "s3://b?endpoint=http://d&region=e",
      {"AWS_ENDPOINT_URL_S3": "http://c", "AWS_REGION": "f"},
      *("http://d", "e"),
    ),
  ],
)
def test_nearest_word_on_where_a_bucket_is_counts(
  monkeypatch, url, environ, endpoint, region
):
  monkeypatch.setattr("os.environ", environ)
  spec = locations.kvstore(url)
  assert spec.get("endpoint") == endpoint and spec.get("aws_region") == region
