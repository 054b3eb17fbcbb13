import html
import pathlib

import pytest

from diloco import config as config_lib
from diloco import hyper
from diloco.workbench import frozen
from experiments.studies import base, figures

STUDIES = sorted(
  path
  for path in pathlib.Path(base.__file__).parent.glob("*.py")
  if "get_sweep" in path.read_text()
)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
@pytest.mark.parametrize("variant", ["small", "medium", "smoke"])
def test_every_point_of_a_study_keeps_its_rules(path, variant):
  points, trains = hyper.load(str(path))
  assert trains
  sweep = frozen.build(f"{path}:{variant}", points, "train")
  assert {sweep.islands(point) for point in sweep.points} == {1}  # one thread
  for point in sweep.points:
    config = config_lib.from_mapping(point.config)
    assert config.engine == "virtual"
    options = config.task.options
    tokens = options["batch_size"] * options.get("seq_len", 1)
    steps = config.total_tokens / tokens / len(config.fleet.slices)
    short = variant == "smoke" or path.stem == "quickstart"
    if not short and config.method != "data_parallel":
      assert steps >= 100 * config.sync.every, point.name


def test_method_may_be_swept(tmp_path):
  path = tmp_path / "family.py"
  path.write_text(
    "from diloco import hyper\n"
    "from experiments.studies import base\n\n"
    "def get_config():\n"
    "  config = base.get_config('family', 'smoke', 3)\n"
    "  config.sync.update(quorum=1, grace='adaptive', adoption='carry')\n"
    "  return config\n\n"
    "def get_sweep():\n"
    "  fragments = [{'sync.num_fragments': 6, 'method': 'streaming'}]\n"
    "  whole = hyper.sweep('method', ['diloco', 'data_parallel'])\n"
    "  return hyper.chain(whole, fragments)\n"
  )
  points, _ = hyper.load(str(path))
  sweep = frozen.build(str(path), points, "train")
  found = [config_lib.from_mapping(p.config) for p in sweep.points]
  assert [c.sync.quorum for c in found] == [3, 1, 3]
  assert [c.fleet.islands for c in found] == [3, 1, 3]
  assert [c.sync.num_fragments for c in found] == [1, 1, 6]


_PAGE = """
## Studies of learning: one

  | arm | seed 1 | against `x` | goal |
  | --- | --- | --- | --- |
  | plain | 1.0 | **+2.18 %** [+1.90, +2.46] | +0.3 % |
  | the same, `often` | 1.0 | **-0.12 %** [-0.62, +0.38] | - |
  | another | 1.0 | +0.5 % | - |

## Something else

| arm | lost |
| --- | --- |
| foreign | **+1.00 %** [+0.50, +1.50] |
"""


def test_costs_are_those_that_tables_of_studies_tell_with_an_interval():
  assert figures.costs(_PAGE) == [
    figures.Cost("one", "plain", 2.18, 1.9, 2.46, 0.3),
    figures.Cost("one", "plain, often", -0.12, -0.62, 0.38, None),
  ]


def test_picture_of_the_studies_is_of_the_tables_there_are(tmp_path):
  text = figures.RESULTS.read_text()
  figures.draw(text, tmp_path / "anew.svg")
  anew, drawn = (
    html.unescape(path.read_text())
    for path in (tmp_path / "anew.svg", figures.PICTURE)
  )
  names = [cost.arm for cost in figures.costs(text)]
  names += [*figures.curves(text), *(name for name, _ in figures.changes(text))]
  rates, momenta, lost = figures.grid(text)
  names += [*rates, *momenta, *(f"{x:+.1f} %" for row in lost for x in row)]
  assert [name for name in names if name not in anew] == []
  assert [name for name in names if name not in drawn] == []
