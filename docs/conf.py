"""The site: `make docs` builds it into `build/site`; warnings are errors."""

import os

from docutils import nodes
from docutils.parsers import rst

from diloco.commands import table

project = "diloco"
copyright = "the diloco authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "diloco"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"


class Commands(rst.Directive):
  """What `--help` says of every command."""

  def run(self) -> list[nodes.Node]:
    """Returns a section for each."""
    os.environ["COLUMNS"] = "80"
    sections: list[nodes.Node] = []
    for command in table.TABLE:
      name = f"diloco {command.name}"
      section = nodes.section(ids=[nodes.make_id(name)])
      text = command.make_parser().format_help()
      section += nodes.title(text=name)
      section += nodes.literal_block(text, text, language="none")
      sections.append(section)
    return sections


def setup(app) -> None:
  """Called by Sphinx."""
  app.add_directive("commands", Commands)
