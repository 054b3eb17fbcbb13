"""Every experiment's configuration, whole and as a smoke run."""

import ast
import dataclasses
import json
import pathlib
import re

import pytest

from diloco import config as config_lib
from diloco import errors, launch, run
from experiments import configs

FOLDER = pathlib.Path(configs.__file__).parent
FILES = {
  path.stem: path
  for path in sorted(FOLDER.glob("*.py"))
  if path.stem != "__init__"
}


def load(name, variant=""):
  return launch.load_config(f"{FILES[name]}{variant and ':'}{variant}")


def test_there_are_configs():
  assert "quickstart" in FILES


@pytest.mark.parametrize("variant", ["", "smoke"])
@pytest.mark.parametrize("name", FILES)
def test_config_is_valid_and_survives_its_file(name, variant):
  config = config_lib.from_mapping(load(name, variant))
  text = json.dumps(config.to_dict(), allow_nan=False)
  assert config_lib.from_mapping(json.loads(text)) == config


@pytest.mark.parametrize("name", FILES)
def test_smoke_run_is_the_smaller_one(name):
  whole, smoke = (
    config_lib.from_mapping(load(name, variant)) for variant in ("", "smoke")
  )
  assert smoke.total_tokens < whole.total_tokens
  assert smoke.name == whole.name


@pytest.mark.parametrize("name", FILES)
def test_docstring_says_what_it_is_for_and_what_to_expect(name):
  docstring = ast.get_docstring(ast.parse(FILES[name].read_text()))
  assert docstring
  parts = re.findall(r"^(\w+): ", docstring, re.MULTILINE)
  wanted = ["Question", "Command", "Cost", "Expected", "Reference"]
  assert [part for part in parts if part in wanted] == wanted
  command = re.search(r"`(diloco train [^`]*)`", docstring)[1]
  assert f"--config=experiments/configs/{name}.py" in command
  assert "--workdir=DIR" in command
  for variant in re.findall(r"`:(\w+)`", docstring):
    config_lib.from_mapping(load(name, variant))


@pytest.mark.parametrize("name", FILES)
def test_smoke_run_could_begin(name, tmp_path, monkeypatch):
  config = config_lib.from_mapping(load(name, "smoke"))
  if config.engine == "ray":  # and all that it lacks here is a cluster
    monkeypatch.setattr(run.cluster, "check", lambda config: None)
  if config.store:  # which names no bucket, for there is none here
    with pytest.raises(errors.UserError, match="names no bucket"):
      run.preflight(config, tmp_path / "run")
    config = dataclasses.replace(config, store=(tmp_path / "store").as_uri())
  run.preflight(config, tmp_path / "run")


@pytest.mark.parametrize("name", FILES)
def test_unknown_variant_is_refused(name):
  with pytest.raises(errors.UserError, match="smok") as caught:
    load(name, "smok")
  assert len(str(caught.value).splitlines()) == 1
