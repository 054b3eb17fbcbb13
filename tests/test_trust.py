"""Nothing that is read from a store, a file or a channel is ever executed."""

import ast
import pathlib

import pytest

import diloco

ROOT = pathlib.Path(diloco.__file__).parent

MODULES = sorted(ROOT.rglob("*.py"))

# Ways to turn bytes into objects or code of the sender's choice.
UNSAFE_MODULES = {
  "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve",
  "joblib", "jsonpickle", "yaml",
}  # fmt: skip
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
# `Connection.recv` unpickles; `recv_bytes` does not.
UNSAFE_METHODS = {"recv", "loads_pickle"}
PARENTS = {"promises.py"}  # what they receive is from children of their own
# The user's own configuration, sweep and fleet files, task and loop, by the
# name the user gave on the command line or in the configuration.
OWN_CODE = {
  "exec_module": {"own_file.py"},
  "import_module": {"own_file.py"},
}
# What is named in our own tables, and loaded once it is asked for.
OURS = {"__init__.py", "entry.py", "errors.py"}


def _problems(source, name):
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found = {alias.name.partition(".")[0] for alias in node.names}
      yield from sorted(found & UNSAFE_MODULES)
    elif isinstance(node, ast.ImportFrom):
      yield from sorted({(node.module or "").split(".")[0]} & UNSAFE_MODULES)
    elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
      if not isinstance(node.value, ast.Constant) or node.value.value:
        yield "allow_pickle"
    elif isinstance(node, ast.Call):
      function = node.func
      if isinstance(function, ast.Name) and function.id in UNSAFE_CALLS:
        yield function.id
      elif isinstance(function, ast.Attribute):
        attribute = function.attr
        owners = OWN_CODE.get(attribute, {name})
        if attribute == "import_module":
          owners = owners | OURS
        unsafe = attribute in UNSAFE_METHODS and name not in PARENTS
        if unsafe or name not in owners:
          yield attribute


def test_no_module_executes_what_it_reads():
  found = {p: list(_problems(p.read_text(), p.name)) for p in MODULES}
  assert len(found) > 100
  assert {path: problems for path, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
  "source",
  [
    "import pickle",
    "from marshal import loads",
    "numpy.load(f, allow_pickle=True)",
    "connection.recv()",
    "eval(text)",
    "loader.exec_module(m)",
  ],
)
def test_what_would_execute_is_found(source):
  assert list(_problems(source, "other.py"))
