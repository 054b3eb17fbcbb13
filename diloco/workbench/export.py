"""`diloco export`: a run's global parameters as a file for other programs."""

import hashlib
import json
import os
import pathlib
from typing import Any

from diloco.snapshots import portable
from diloco.workbench import opened


def export(
  run: opened.Run,
  form: str,
  out: str | os.PathLike[str],
  version: int | None = None,
  cut: int | None = None,
) -> dict[str, Any]:
  """Writes parameters of a run, whole or not at all.

  Args:
    run: which.
    form: one of `portable.FORMATS`.
    out: file or directory to make.
    version: as for `opened.Run.params`.
    cut: as for `opened.Run.params`.

  Returns:
    What was written, as plain values.

  Raises:
    UserError: there is no such version, or something at `out` already.
    CorruptSnapshotError: the version is damaged.
  """
  out = pathlib.Path(out)
  portable.check_free(out.absolute())
  values = run.values(version, cut)
  config = json.dumps(run.settings.to_dict(), sort_keys=True)
  facts = {
    "run": run.settings.name,
    "task": run.settings.task.name,
    "versions": values.versions,
    "cut": cut,
    "merged_tokens": run.merged_tokens(values.versions),
    "config_digest": hashlib.sha256(config.encode()).hexdigest()[:16],
  }
  told = {
    name: value if isinstance(value, str) else json.dumps(value)
    for name, value in facts.items()
  }
  portable.write(out, form, values.params, told)
  sizes = [leaf.size for leaf in values.params.values()]
  return {
    "out": str(out),
    "format": form,
    "tensors": len(sizes),
    "parameters": sum(sizes),
    **facts,
  }


def describe(facts: dict[str, Any]) -> str:
  """What was written, in words."""
  versions = facts["versions"]
  which = f"version {versions[0]}" if len(set(versions)) == 1 else ""
  which = which or f"versions {min(versions)} to {max(versions)} by fragment"
  return (
    f"{facts['out']}: {facts['parameters']:,} parameters in"
    f" {facts['tensors']} tensors, {which},"
    f" {facts['merged_tokens']:,} tokens merged"
  )
