"""Launching a run from absl flags: `diloco train`.

--config=FILE.py[:VARIANT]   a file with get_config() or get_config(variant)
--config.FIELD=VALUE         overrides one field, set in the file or not
--workdir=DIR                directory of the run
"""

import contextlib
import difflib
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from diloco import config as config_lib
from diloco import errors, methods, own_file, process, typed
from diloco import run as run_lib
from diloco.report import waste

_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")
# Options belong to the task, which knows their names.
_FREE = "config.task.options"


def main(argv: Sequence[str]) -> int:
  """Trains as flags say, the program's name left out; returns the exit code.

  Raises:
    UserError: flags, file, configuration or directory will not do.
  """
  argv = ["diloco train", *argv]
  values = flags.FlagValues()  # `commands.runs` has their help
  for name in ("config", "workdir"):
    flags.DEFINE_string(name, None, "", flag_values=values)
  for name in ("json", "quiet"):
    flags.DEFINE_bool(name, False, "", flag_values=values)
  # Which fields can be overridden is known once the file has been loaded.
  values.set_gnu_getopt(True)
  overrides = _parse(values, argv, known_only=True)
  for argument in overrides:
    if argument.startswith("-") and not _OVERRIDE.match(argument):
      name = argument.lstrip("-").partition("=")[0]
      raise _unknown_flag(name, list(values))
  for name in ("config", "workdir"):
    if not values[name].value:
      raise errors.UserError(
        f"--{name}", "it is missing", f"give --{name}=..., see --help"
      )
  methods_given = re.findall(r"--?config\.method=(\S+)", "\n".join(overrides))
  config = load_config(values.config, *methods_given[-1:])
  override(config, overrides)
  return run(
    config,
    pathlib.Path(values.workdir),
    as_json=values.json,
    quiet=values.quiet,
  )


def run(
  config: Mapping[str, Any] | ml_collections.ConfigDict,
  workdir: pathlib.Path,
  *,
  as_json: bool = False,
  quiet: bool = False,
  cut: str | None = None,
) -> int:
  """Trains and says how it went; returns the exit code."""
  if told := waste.overshoot(config_lib.from_mapping(config)):
    print(f"warning: {told}", file=sys.stderr)
  result = run_lib.train(config, workdir, quiet=quiet, cut=cut)
  if as_json:
    json.dump(result.summary, sys.stdout, indent=2)
    print()
  done = result.status in ("finished", "stopped")
  why = "" if done else f": {result.summary['reason']}"
  told = "".join(f"; WARNING: {w}" for w in result.summary["warnings"])
  print(
    f"run {result.status}{why}{told}; report: {result.report}", file=sys.stderr
  )
  return 0 if done else process.EXIT_FAILED


def load_config(
  place: str | os.PathLike[str], method: str = ""
) -> ml_collections.ConfigDict:
  """Loads a configuration and fills in every field it leaves out.

  Args:
    place: "FILE.py" or "FILE.py:VARIANT".
    method: takes the place of its own, see `methods.exchanged`; it says what
      some fields are that the file leaves out.

  Raises:
    UserError: there is no such file, or it cannot be used.
  """
  config: Mapping[str, Any] = read_config(place)
  if method:
    written = typed.plain(config)
    config = methods.exchanged(written, method)
  whole = methods.completed(config)
  if method and (news := _replaced(written, whole)):
    print(f"config.method = {method!r} has {news}", file=sys.stderr)
  return _filled(typed.build(config_lib.RunConfig, whole, "config"))


def _replaced(written: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
  """Fields that another method has otherwise than the file wrote them."""
  return ", ".join(
    f"{group}.{field} = {typed.show(whole[group][field])} for {typed.show(was)}"
    for group, fields in written.items()
    if isinstance(fields, Mapping) and group in methods.GROUPS
    for field, was in fields.items()
    if whole[group].get(field, was) != was
  )


def read_config(place: str | os.PathLike[str]) -> ml_collections.ConfigDict:
  """Loads a configuration as its file has it; see `load_config`."""
  what = f"--config={place}"
  path, colon, variant = os.fspath(place).partition(":")
  with own_file.execute(what, path) as module:
    get_config = module.get_config
    config = get_config(variant) if colon else get_config()
    if isinstance(config, Mapping):
      config = ml_collections.ConfigDict(config)
  if not isinstance(config, ml_collections.ConfigDict):
    raise errors.UserError(
      what,
      f"its get_config returned {typed.show(config)}",
      "return a ConfigDict",
    )
  if not config:
    raise errors.UserError(
      what,
      "its get_config returned nothing to configure",
      "return a ConfigDict with fields; to train by the defaults alone give"
      " name = 'run'",
    )
  config.unlock()
  return config


def _filled(config: config_lib.RunConfig) -> ml_collections.ConfigDict:
  """All fields, as flags can set them: with tuples, and what may be open."""
  values = config.to_dict()
  for name, group in values.items():
    for field, value in group.items() if isinstance(group, dict) else ():
      if isinstance(value, list):
        group[field] = tuple(value)
      elif value is None:  # only truth values may be left open
        group[field] = ml_collections.config_dict.placeholder(bool)
    if isinstance(group, list):
      values[name] = tuple(group)
  return ml_collections.ConfigDict(values)


def override(config: ml_collections.ConfigDict, argv: Sequence[str]) -> None:
  """Applies every --config.FIELD=VALUE of `argv` to `config`.

  Raises:
    UserError: there is no such field, it takes no such value, or something
      else is among the arguments.
  """
  argv = ["", *_with_digits(config, argv)]
  values = flags.FlagValues()
  with _one_line():
    config_flags.DEFINE_config_dict(
      "config",
      config,
      flag_values=values,
      lock_config=False,
      accept_new_attributes=True,
      sys_argv=argv,
    )
  rest = _parse(values, argv)
  if rest:
    raise errors.UserError(
      f"argument {rest[0]!r}", "only flags are taken", "write --flag=value"
    )


def overridden(
  config: config_lib.RunConfig, argv: Sequence[str]
) -> ml_collections.ConfigDict:
  """A run's configuration with every --config.FIELD=VALUE; see `override`."""
  values = ml_collections.ConfigDict(config.to_dict())
  override(values, argv)
  return values


def _with_digits(
  config: ml_collections.ConfigDict, argv: Sequence[str]
) -> Iterator[str]:
  """Flags with whole numbers written out, for fields that take these."""
  flag = ""  # whose value, a whole number, is the next word
  for argument in argv:
    match = _OVERRIDE.match(argument)
    name, equals, text = argument.partition("=")
    if match is None and flag:
      yield _digits(flag, argument)
    elif match is None or type(_field(config, match[1])) is not int:
      yield argument
    elif equals:
      yield f"{name}={_digits(name, text)}"
    else:
      yield argument
      flag = argument
      continue
    flag = ""


def _digits(flag: str, text: str) -> str:
  try:
    return str(typed.whole(text))
  except ValueError as error:
    raise errors.UserError(
      f"{flag}={text}",
      "it must be a whole number",
      "write it as 1500000, 1e6 or 2.4M",
    ) from error


def _field(config: ml_collections.ConfigDict, path: str) -> Any:
  """The value at a path; refuses one no configuration has."""
  where: str = "config"
  node: Any = config
  for part in path.split("."):
    if not isinstance(node, dict | ml_collections.ConfigDict):
      return None
    name, bracket, index = part.partition("[")
    if name not in node:
      if where.startswith(_FREE):
        return None
      raise typed.unknown_field(where, name, list(node))
    where, node = f"{where}.{name}", node[name]
    if bracket and isinstance(node, list | tuple):
      number = index.removesuffix("]")
      if number not in map(str, range(len(node))):
        raise errors.UserError(
          f"{where}[{number}]",
          f"{where} has {len(node)} entries",
          "count them from 0",
        )
      where, node = f"{where}[{number}]", node[int(number)]
  return node


def _parse(
  values: flags.FlagValues, argv: Sequence[str], *, known_only: bool = False
) -> list[str]:
  with _one_line(list(values)):
    return values(list(argv), known_only=known_only)[1:]


@contextlib.contextmanager
def _one_line(known: Sequence[str] = ()) -> Iterator[None]:
  """Every way to get flags wrong becomes a `UserError`."""
  try:
    yield
  except flags.UnrecognizedFlagError as error:
    raise _unknown_flag(error.flagname, known) from error
  except (flags.Error, AttributeError, LookupError, ValueError, TypeError) as e:
    what, _, why = " ".join(str(e).split()).partition(": ")
    raise errors.UserError(
      what.removeprefix("flag "),
      why or "it cannot be read",
      "check the field's name and the value's type",
    ) from e


def _unknown_flag(name: str, known: Sequence[str]) -> errors.UserError:
  near = difflib.get_close_matches(name, known, n=1)
  return errors.UserError(
    f"--{name}",
    "there is no such flag",
    f"did you mean --{near[0]}?" if near else "see --help",
  )
