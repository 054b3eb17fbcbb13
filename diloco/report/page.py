"""The bare page of a report: layout, colours and small pieces of HTML."""

import html
from collections.abc import Iterable, Sequence

_CSS = """
:root { --ink: #18202b; --dim: #5d6978; --page: #f6f7f9; --panel: #ffffff;
  --line: #dfe3e8; --accent: #2f6fde; --good: #1d8a5f; --bad: #c22f3d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #97a3b3;
  --page: #12161c; --panel: #1a2029; --line: #2d3642; --accent: #7da6f5;
  --good: #4cc896; --bad: #f0727d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, "Segoe UI", "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 0 0 6px; }
p { margin: 6px 0; max-width: 105ch; }
.dim { color: var(--dim); }
.small { font-size: 13px; }
.cards { display: grid; gap: 12px; margin: 20px 0 8px;
  grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); }
.card, .panel { background: var(--panel); border: 1px solid var(--line);
  border-radius: 10px; }
.card { padding: 12px 14px; }
.card b { display: block; font-size: 25px; line-height: 1.25;
  font-weight: 650; letter-spacing: -0.02em; white-space: nowrap; }
.card span { color: var(--dim); font-size: 13px; display: block; }
.panel { padding: 14px 16px; margin: 0 0 12px; min-width: 0; }
.pair { display: grid; gap: 0 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
svg { display: block; width: 100%; height: auto; }
figure.chart { margin: 0; position: relative; }
.chart text { font: 11.5px system-ui, sans-serif; fill: var(--dim); }
.chart path { fill: none; } .chart .place > svg { touch-action: pan-y; }
.chart .line { stroke-width: 1.5; stroke-linejoin: round; }
.chart .grid { stroke: var(--line); stroke-width: 1; }
.chart .seam { stroke: var(--ink); stroke-dasharray: 2 3; }
.chart .cursor { stroke: var(--dim); stroke-width: 1; }
.chart .box { fill: var(--accent); fill-opacity: 0.15; }
.chart .mark { fill: var(--panel); stroke: var(--ink); stroke-width: 1.6; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; overflow-y: auto;
  max-height: 84px; }
.legend > * { font: 12.5px system-ui, sans-serif; color: var(--ink); border: 0;
  padding: 2px 0; background: none; display: flex; align-items: center; }
.legend button { cursor: pointer; }
.legend i { width: 14px; height: 3px; border-radius: 2px; margin-right: 6px; }
.legend .icon { width: 14px; margin-right: 5px; }
.legend [aria-pressed=false] { opacity: 0.4; text-decoration: line-through; }
.legend .whole { color: var(--accent); }
.tip { position: absolute; top: 12px; background: var(--panel); font-size: 12px;
  border: 1px solid var(--line); border-radius: 6px; padding: 5px 9px;
  pointer-events: none; box-shadow: 0 2px 10px #0003; white-space: nowrap; }
.scroll { overflow: auto; max-height: 75vh; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--dim); font-size: 12px;
  vertical-align: bottom; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
.num { text-align: right; white-space: nowrap; }
td:has(> .dot) { white-space: nowrap; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 3px;
  margin-right: 7px; }
.equation { font-size: 15px; display: flex; flex-wrap: wrap; gap: 4px 14px;
  align-items: baseline; }
.equation div { text-align: center; }
.equation small { display: block; color: var(--dim); font-size: 12px; }
.bar { display: flex; height: 12px; border-radius: 6px; overflow: hidden;
  margin: 12px 0 4px; background: var(--line); }
.bar i { display: block; }
.good { color: var(--good); } .bad { color: var(--bad); }
.tag { border: 1px solid var(--line); border-radius: 20px; font-size: 12px;
  padding: 1px 9px; color: var(--dim); margin-left: 8px; vertical-align: 4px; }
code { font-size: 12.5px; overflow-wrap: anywhere; }
dl { display: grid; gap: 2px 18px; margin: 0; font-size: 13.5px;
  grid-template-columns: max-content 1fr; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 560px) { main { padding: 18px 10px 40px; }
  .panel { padding: 10px; } td { min-width: 84px; }
  dl { grid-template-columns: 1fr; } }
@media print { :root { --ink: #18202b; --dim: #4d5866; --page: #fff;
  --panel: #fff; --line: #ccd2d9; } .tip, .cursor, .box { display: none; }
  .scroll { max-height: none; overflow: visible; }
  .num { white-space: normal; } .pair { grid-template-columns: 1fr; }
  body { font-size: 12px; } table { font-size: 10.5px; }
  h2 { break-after: avoid; }
  * { print-color-adjust: exact; } .panel, .card { break-inside: avoid; } }
"""


def page(title: str, parts: Iterable[str]) -> str:
  """Returns a whole page; `parts` are HTML, the title is text."""
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{text(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
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
