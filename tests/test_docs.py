"""The documents say what the code says."""

import ast
import dataclasses
import json
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

import diloco
from diloco import config as config_lib
from diloco import hyper
from diloco.commands import table
from diloco.tape import events, fates
from diloco.workbench import frozen

ROOT = pathlib.Path(diloco.__file__).parent.parent
DOCS = ROOT / "docs"


def rows(name):
  """Cells of table rows of a document, by the name in the first cell.

  A name that comes again, such as an event that is a fate too, counts once.
  """
  found: dict = {}
  for line in (DOCS / name).read_text().splitlines():
    cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
    if line.startswith("| `") and len(cells) > 1:
      found.setdefault(cells[0].strip("`"), cells[1:])
  return found


def config_fields(kind, prefix="config"):
  """(dotted name, default as JSON) of every field that holds a value."""
  for field in dataclasses.fields(kind):
    name = f"{prefix}.{field.name}"
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
      default = field.default_factory()
    if dataclasses.is_dataclass(default):
      yield from config_fields(type(default), name)
    elif name in ITEMS:
      yield from config_fields(ITEMS[name], f"{name}[]")
    elif default is dataclasses.MISSING:
      yield name, "required"
    else:
      yield name, json.dumps(default)


ITEMS = {
  "config.fleet.slices": config_lib.SliceConfig,
  "config.faults": config_lib.FaultConfig,
}


def test_glossary_has_exactly_the_config_fields_with_their_defaults():
  fields = {
    name: f"`{default}`"
    for name, default in config_fields(config_lib.RunConfig)
  }
  told = {
    name: cells[0]
    for name, cells in rows("glossary.md").items()
    if name.startswith("config.")
  }
  assert told == fields


EVENTS = {name: value for name, value in vars(events).items() if name.isupper()}


def test_tape_document_has_every_event():
  assert sorted(set(EVENTS.values()) - set(rows("tape.md"))) == []


def recorded_fields():
  """(event, field) of every `record(events.NAME, field=...)` in the code."""
  for path in sorted((ROOT / "diloco").rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      if not isinstance(node, ast.Call) or not node.args:
        continue
      event = node.args[0]
      if (
        isinstance(event, ast.Attribute)
        and isinstance(event.value, ast.Name)
        and event.value.id == "events"
        and event.attr in EVENTS
      ):
        for keyword in node.keywords:
          if keyword.arg is not None:
            yield EVENTS[event.attr], keyword.arg


def test_tape_document_has_every_recorded_field():
  table = rows("tape.md")
  found = set(recorded_fields())
  assert ("published", "c_tokens") in found
  missing = [
    (event, field)
    for event, field in sorted(found)
    if f"`{field}`" not in table[event][0]
  ]
  assert missing == []


def test_tape_document_has_every_fate():
  names = {v for n, v in vars(fates).items() if n.isupper()}
  core = (ROOT / "diloco" / "syncer" / "core.py").read_text()
  gates = (ROOT / "diloco" / "syncer" / "gates.py").read_text()
  for pattern in (
    r'Discard\(\w+, "(\w+)"',
    r'reason = "(\w+)"',
    r'else "(\w+)"$',
    r'return f?"(\w+)',
  ):
    found = re.findall(pattern, core + gates, re.MULTILINE)
    assert found, pattern
    names |= set(found)
  assert sorted(names - set(rows("tape.md"))) == []


def layout():
  """Names of modules by package, as the design page lists them."""
  text = (DOCS / "design.md").read_text()
  block = text.partition("## 8. Layout")[2].partition("## 9.")[0]
  found: dict = {}
  package = ""
  for line in block.splitlines():
    if match := re.match(r"    (\w+/)\s*$", line):
      package = match[1]
    elif match := re.match(r"      (\S+/)\s+(.*)", line):
      folder = package + match[1]
      found.setdefault(folder, set()).update(re.findall(r"\w+", match[2]))
    elif match := re.match(r"      (\w+)\.py\s", line):
      found.setdefault(package, set()).add(match[1])
    elif match := re.match(r"       {8,}(.*)", line):
      found[folder].update(re.findall(r"\w+", match[1]))
  return found


def test_layout_matches_the_tree():
  tree: dict = {}
  for path in sorted((ROOT / "diloco").rglob("*.py")):
    folder = path.parent.relative_to(ROOT).as_posix() + "/"
    if path.stem != "__init__":
      tree.setdefault(folder, set()).add(path.stem)
  told = {k: v for k, v in layout().items() if k.startswith("diloco/")}
  assert told == tree


def test_site_builds_without_a_warning(tmp_path):
  """Links between pages, references to code and the code's own docstrings."""
  command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
  built = subprocess.run(
    [
      *command,
      "-d",
      str(tmp_path / "cache"),
      str(DOCS),
      str(tmp_path / "site"),
    ],
    capture_output=True,
    text=True,
  )
  assert built.returncode == 0, built.stderr
  assert (tmp_path / "site" / "index.html").exists()


def test_tests_that_the_pages_name_are_there():
  tests = sorted((ROOT / "tests").rglob("*.py"))
  there = {path.stem for path in tests}
  for path in tests:
    there |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
  pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
  named = set(re.findall(r"\b(test_\w+)", pages))
  assert len(named) > 50
  assert sorted(named - there) == []


def test_no_page_installs_what_no_index_has():
  pages = [*DOCS.glob("*.md"), *(ROOT / "experiments" / "colab").glob("*.py")]
  for page in (ROOT / "README.md", *pages):
    assert not re.search(r"pip install \W*diloco\b", page.read_text()), page


def typed_commands():
  """(page, arguments) of every `diloco` command in an example of a page."""
  pages = {*DOCS.glob("*.md")} - {DOCS / "results.md"}  # which has ranges
  for page in (ROOT / "README.md", *sorted(pages)):
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(
      r"^(?: {4}|\$ )?(?:\.venv/bin/)?diloco (.*?)(?: > \S+)?$", text, re.M
    ):
      yield page.name, shlex.split(line, comments=True)


def test_commands_of_the_pages_are_understood():
  shown = list(typed_commands())
  assert len(shown) > 12
  for page, arguments in shown:
    command = table.find(arguments)
    _, rest = command.make_parser().parse_known_args(arguments[1:])
    assert all(word.startswith("--config.") for word in rest), (page, rest)


def test_sweep_of_the_tutorial_can_be_swept(tmp_path):
  text = (DOCS / "tutorial.md").read_text()
  (code,) = re.findall(
    r"```python\n(.*?)```", text.split("`rates.py`")[1], re.S
  )
  path = tmp_path / "rates.py"
  path.write_text(textwrap.dedent("   " + code.lstrip()))
  points, trains = hyper.load(str(path))
  made = frozen.build(str(path), points, "train" if trains else "simulate")
  assert [point.name for point in made.points] == [
    f"every={every},learning_rate={rate}"
    for every in (12, 24)
    for rate in (0.5, 1.0)
  ]


def test_every_bench_of_the_results_can_be_run():
  parts = re.findall(r"`diloco bench (\w+)", (DOCS / "results.md").read_text())
  assert {"study", "merge"} <= set(parts)
  for part in parts:
    table.find(["bench"]).make_parser().parse_args([part])


def test_symptoms_are_in_the_words_of_the_code():
  source = "".join(p.read_text() for p in (ROOT / "diloco").rglob("*.py"))
  said = re.sub(r'"\s*f?"', "", source)  # a text over several lines is one
  lines = (DOCS / "troubleshooting.md").read_text().splitlines()
  quoted = [
    part.strip()
    for line in lines
    if line.startswith("| ")
    for words in re.findall("`([^`]+)`", line.split(" | ")[0])
    for part in re.split(r"…|error:|config\.…", words)
    if " " in part.strip()
  ]
  assert len(quoted) > 8
  assert [part for part in quoted if part not in said] == []
