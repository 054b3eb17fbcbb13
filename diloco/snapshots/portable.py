"""Parameters outside a run, in files that other programs read and write.

Tensors have the '/'-joined names of the task's leaves; facts about them are
texts beside them: the header of `safetensors`, the custom metadata of an Orbax
checkpoint, the entry `__metadata__` of an `npz`, as JSON.
"""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diloco import errors

Params = Mapping[str, np.ndarray]
Metadata = Mapping[str, str]

_METADATA = "__metadata__"  # in an npz, which has no other place for it
_NAMED = 3  # tensors, in a message


def write(
  path: str | os.PathLike[str], form: str, params: Params, metadata: Metadata
) -> None:
  """Writes parameters, whole or not at all, in one of `FORMATS`.

  Raises:
    UserError: something is there already, or it cannot be written.
  """
  path = pathlib.Path(path).absolute()
  check_free(path)
  try:
    with tempfile.TemporaryDirectory(
      prefix=f".{path.name}.", dir=path.parent
    ) as folder:
      made = pathlib.Path(folder) / path.name
      _WRITERS[form](made, params, metadata)
      if made.is_dir():
        made.rename(path)
      else:
        os.link(made, path)  # unlike a rename it replaces nothing
  except FileExistsError:
    check_free(path)
    raise
  except OSError as error:
    raise errors.UserError(
      f"--out={path}", f"it cannot be written ({error})", "choose another place"
    ) from error


def check_free(path: pathlib.Path) -> None:
  """Refuses a place where something is.

  Raises:
    UserError: something is there, or its folder is not.
  """
  if os.path.lexists(path):
    raise errors.UserError(
      f"--out={path}", "it is there already", "delete it, or choose another"
    )
  if not path.parent.is_dir():
    raise errors.UserError(
      f"--out={path}", "its folder does not exist", "make it first"
    )


def read(what: str, path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Reads parameters in any of the formats, as float32 by '/'-joined name.

  `what` is how to call them in a refusal.

  Raises:
    UserError: there is nothing, or nothing of this kind.
  """
  path = pathlib.Path(path).absolute()
  if not path.exists():
    raise errors.UserError(what, "there is no such file", "check the path")
  try:
    if path.is_dir():
      found = _read_orbax(path)
    elif zipfile.is_zipfile(path):
      found = _read_npz(path)
    else:
      found = _read_safetensors(path)
    return {name: _float32(name, values) for name, values in found.items()}
  except errors.UserError:
    raise
  except Exception as error:  # these libraries raise many kinds
    raise errors.UserError(
      what,
      f"it cannot be read ({errors.one_line(error)})",
      f"give what 'diloco export' writes: {', '.join(FORMATS)}",
    ) from error


def _float32(name: str, values: Any) -> np.ndarray:
  if "float" not in (kind := np.dtype(values.dtype).name):
    raise ValueError(f"{name!r} is {kind}, and parameters are float32")
  return np.asarray(values, dtype=np.float32, order="C")


def check_fits(
  what: str, params: Params, shapes: Mapping[str, tuple[int, ...]]
) -> None:
  """Refuses parameters of another model.

  Raises:
    UserError: names or shapes differ; it names the first that do.
  """
  differences = []
  for name in sorted({*params, *shapes}):
    if name not in params:
      differences.append(f"{name!r} is missing")
    elif name not in shapes:
      differences.append(f"{name!r} is not the task's")
    elif params[name].shape != tuple(shapes[name]):
      found, wanted = list(params[name].shape), list(shapes[name])
      differences.append(f"{name!r} is {found}, the task's {wanted}")
    elif not np.isfinite(params[name]).all():
      differences.append(f"{name!r} is not finite")
  if differences:
    more = len(differences) - _NAMED
    named = ", ".join(differences[:_NAMED])
    raise errors.UserError(
      what,
      f"its tensors are not the task's: {named}"
      + (f" and {more} more" if more > 0 else ""),
      "give those of the same model, or the task the model they are of",
    )


def _write_npz(path: pathlib.Path, params: Params, metadata: Metadata) -> None:
  told = {_METADATA: np.array(json.dumps(metadata))}
  with path.open("xb") as file:  # not by name, to which a suffix is added
    np.savez(file, allow_pickle=False, **told, **params)


def _read_npz(path: pathlib.Path) -> dict[str, Any]:
  with np.load(path, allow_pickle=False) as found:
    return {name: found[name] for name in found.files if name != _METADATA}


def _read_safetensors(path: pathlib.Path) -> dict[str, Any]:
  # Unlike the one for numpy it knows bfloat16.
  return dict(_safetensors("flax").load_file(path))


def _safetensors(part: str) -> Any:
  return errors.needed(f"safetensors.{part}", "a file of safetensors")


def _write_orbax(
  path: pathlib.Path, params: Params, metadata: Metadata
) -> None:
  import orbax.checkpoint as ocp  # it loads JAX

  with ocp.StandardCheckpointer() as writer:
    writer.save(path, nested(params), custom_metadata=dict(metadata))


def _read_orbax(path: pathlib.Path) -> dict[str, Any]:
  import jax
  import orbax.checkpoint as ocp

  with ocp.StandardCheckpointer() as reader:
    tree = reader.restore(path)
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(where, simple=True, separator="/"): leaf
    for where, leaf in leaves
  }


def nested(flat: Params) -> dict[str, Any]:
  """Parameters by '/'-joined names as nested dicts.

  Raises:
    UserError: one has the name of a group of others.
  """
  tree: dict[str, Any] = {}
  for path, value in flat.items():
    *parents, leaf = path.split("/")
    inner = tree
    for i in range(1, len(parents) + 1):
      group = "/".join(parents[:i])
      errors.require(
        group not in flat,
        f"the parameter {group!r}",
        f"{path!r} is within it, which nested dicts cannot have",
        "take them by their names, or export them as npz or safetensors",
      )
    for name in parents:
      inner = inner.setdefault(name, {})
    inner[leaf] = value
  return tree


_WRITERS: Mapping[str, Callable[[pathlib.Path, Params, Metadata], None]] = {
  "safetensors": lambda path, params, told: _safetensors("numpy").save_file(
    dict(params), path, dict(told)
  ),
  "orbax": _write_orbax,
  "npz": _write_npz,
}
FORMATS = tuple(_WRITERS)
