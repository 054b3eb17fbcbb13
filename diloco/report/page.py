"""The bare page of a report: layout, colours and small pieces of HTML."""

import html
import pathlib
from collections.abc import Iterable, Sequence


def page(title: str, parts: Iterable[str]) -> str:
  """Returns a whole page; `parts` are HTML, the title is text."""
  style = pathlib.Path(__file__).with_suffix(".css").read_text()
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
    "<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
  )


def text(value: object) -> str:
  """Returns text as HTML."""
  return html.escape(str(value), quote=True)


def cards(items: Iterable[tuple[str, str, str]]) -> str:
  """Returns headline figures: label, figure, and what else to know."""
  made = [
    f'<div class="card"><span>{text(label)}</span><b>{text(figure)}</b>'
    f"<span>{text(note)}</span></div>"
    for label, figure, note in items
  ]
  return '<div class="cards">' + "".join(made) + "</div>"


def panel(content: str, title: str = "", note: str = "") -> str:
  """Returns a framed block of HTML with a title and a remark, both text."""
  head = f"<h3>{text(title)}</h3>" if title else ""
  foot = f'<p class="dim small">{text(note)}</p>' if note else ""
  return f'<section class="panel">{head}{content}{foot}</section>'


def pair(*panels: str) -> str:
  """Puts panels side by side where the page is wide enough."""
  return '<div class="pair">' + "".join(panels) + "</div>"


def table(
  heads: Sequence[str], rows: Iterable[Sequence[str]], words: int
) -> str:
  """Returns a table of cells that are HTML under heads that are text.

  So many columns at the left hold words, the others numbers.
  """

  def cell(tag: str, column: int, content: str) -> str:
    kind = "" if column < words else ' class="num"'
    return f"<{tag}{kind}>{content}</{tag}>"

  top = "".join(cell("th", i, text(head)) for i, head in enumerate(heads))
  body = "".join(
    "<tr>" + "".join(cell("td", i, c) for i, c in enumerate(row)) + "</tr>"
    for row in rows
  )
  return (
    f'<div class="scroll"><table><thead><tr>{top}</tr></thead>'
    f"<tbody>{body}</tbody></table></div>"
  )


def facts(pairs: Iterable[tuple[str, object]]) -> str:
  """Returns a list of named values, all of them text."""
  items = [f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in pairs]
  return "<dl>" + "".join(items) + "</dl>"


def dot(colour: str) -> str:
  """Returns a spot of colour, to stand before a name."""
  return f'<span class="dot" style="background:{text(colour)}"></span>'
