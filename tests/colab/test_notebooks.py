"""The notebooks are executed whole, and equal their text twins."""

import os
import pathlib
import sys

import jupytext
import nbclient
import nbformat
import pytest

import experiments

FOLDER = pathlib.Path(experiments.__file__).parent / "colab"
TWINS = sorted(FOLDER.glob("*.py"))
# A reader stays to see it learn; here its runs only have to go on.
SHORTER = {"30_000": "6_000", "merges=20": "merges=4", "merges=10": "merges=4"}


def cells(notebook):
  return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_every_notebook_has_a_twin():
  assert [t.stem for t in TWINS] == sorted(
    p.stem for p in FOLDER.glob("*.ipynb")
  )


@pytest.mark.parametrize("twin", TWINS, ids=lambda path: path.stem)
# What the kernel's own client warns of is not ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_notebook_runs_from_its_first_cell_to_its_last(
  twin, tmp_path, monkeypatch
):
  notebook = nbformat.read(twin.with_suffix(".ipynb"), as_version=4)
  assert cells(notebook) == cells(jupytext.read(twin))
  assert not any(cell.get("outputs") for cell in notebook.cells)
  root, programs = FOLDER.parent.parent, pathlib.Path(sys.executable).parent
  for name, first in (("PYTHONPATH", root), ("PATH", programs)):
    parts = filter(None, (str(first), os.environ.get(name, "")))
    monkeypatch.setenv(name, os.pathsep.join(parts))
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  for cell in notebook.cells:
    for long, short in SHORTER.items():
      cell.source = cell.source.replace(long, short)
  nbclient.NotebookClient(
    notebook,
    timeout=300,
    kernel_name="python3",
    shutdown_kernel="immediate",  # it would take JAX apart
    resources={"metadata": {"path": str(tmp_path)}},
  ).execute()
  shown = [o for cell in notebook.cells for o in cell.get("outputs", ())]
  pictures = [o for o in shown if "image/png" in o.get("data", {})]
  assert pictures
  assert not [o for o in shown if "error:" in str(o.get("text", ""))]
