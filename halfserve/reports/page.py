"""The frame of a report: one HTML file with the stylesheet that all reports share, light and dark, from a phone's width on."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

WHOLE_CELL, WHOLE_WORD = 16, 24  # characters of a cell that stay in one line, and of a word that is not broken
# Characters that XML 1.0 forbids: control characters, lone surrogates and two non-characters.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# The series' colours are those of Okabe and Ito, which colour-blind readers can tell apart, changed until each has a contrast
# of 3 to its background; texts have 4.5 (WCAG 2.2, level AA).
STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #16202c; --quiet: #55616f; --line: #dfe4ea; --axis: #8794a2;
  --wash: #eef2f8; --good: #156239; --good-wash: #e3f4ea; --bad: #a3231a; --bad-wash: #fce8e6; --warn: #8a4b00;
  --s0: #0072b2; --s1: #d55e00; --s2: #008562; --s3: #b0568a; --s4: #9a6b00; --s5: #3a8fc0; --s6: #16202c; --s7: #8794a2; }
@media (prefers-color-scheme: dark) { :root { --page: #0f141a; --ink: #e8edf3; --quiet: #9aa8b8; --line: #2a3440;
  --axis: #6d7b8a; --wash: #1d2631; --good: #57c78a; --good-wash: #14301f; --bad: #ff8478; --bad-wash: #3a1a17;
  --warn: #f0a650; --s0: #5ab0f0; --s1: #f5893d; --s2: #2cc39a; --s3: #e39bc6; --s4: #f0b93a; --s5: #9ad0f5; --s6: #e8edf3;
  --s7: #8794a2; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; background: var(--page); color: var(--ink); max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1, h2, p, li, dd, figcaption { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin-bottom: .3rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h1, h2, .caption { break-after: avoid; }
.quiet, figcaption, dt, .caption { color: var(--quiet); } .quiet { margin-top: 0; } .warning { color: var(--warn); }
code, pre { font: .82rem/1.5 ui-monospace, Menlo, Consolas, monospace; background: var(--wash); border-radius: 4px; }
code { padding: .1rem .3rem; overflow-wrap: anywhere; } pre { padding: .5rem .7rem; overflow-x: auto; }
.scroll { overflow-x: auto; margin: 1rem 0; background: linear-gradient(90deg, var(--page) 50%, transparent) left / 2rem 100%,
  linear-gradient(270deg, var(--page) 50%, transparent) right / 2rem 100%,
  linear-gradient(90deg, var(--line), transparent) left / .7rem 100%,
  linear-gradient(270deg, var(--line), transparent) right / .7rem 100%;
  background-repeat: no-repeat; background-attachment: local, local, scroll, scroll; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; } tr { break-inside: avoid; }
.caption { font-weight: 600; margin: 1rem 0 -.7rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: pre-line; overflow-wrap: anywhere; box-sizing: content-box; max-width: 36rem; }
th { color: var(--quiet); font-weight: 600; vertical-align: bottom; }
th.number, td.number { text-align: right; white-space: pre; overflow-wrap: normal; }
tr.broken td { color: var(--bad); }
.verdict { padding: .6rem 1rem; border-radius: 6px; font-weight: 600; margin: 1rem 0; }
.passed { background: var(--good-wash); color: var(--good); } .failed { background: var(--bad-wash); color: var(--bad); }
dl { display: grid; grid-template-columns: fit-content(35%) minmax(0, 1fr); gap: .25rem 1rem; margin: 1rem 0;
  font-size: .9rem; }
dd { margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1.2rem; margin: 1rem 0; }
figure { margin: 0; min-width: 0; max-width: 30rem; break-inside: avoid; } figcaption { font-size: .9rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--quiet); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); } .axis { stroke: var(--axis); }
.limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 3; } .equal { stroke: var(--axis); stroke-dasharray: 4 3; }
.curve { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; } .dashed { stroke-dasharray: 5 3; }
.filled { fill: currentColor; } .faint { fill-opacity: .8; }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); } .s3 { color: var(--s3); }
.s4 { color: var(--s4); } .s5 { color: var(--s5); } .s6 { color: var(--s6); } .s7 { color: var(--s7); }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; list-style: none; margin: .3rem 0 0; padding: 0; font-size: .85rem; }
.key { display: inline-block; width: 1.3rem; border-top: 3px solid currentColor; vertical-align: middle; margin-right: .4rem; }
.key.dashes { border-top-style: dashed; } .key.limits { border-top-style: dashed; color: var(--bad); }
.key.dots { width: .55rem; height: .55rem; border: 0; border-radius: 50%; background: currentColor; }
.bars { display: grid; grid-template-columns: fit-content(40%) minmax(4rem, 1fr) auto; gap: .2rem .7rem; align-items: center;
  font-size: .85rem; overflow-wrap: anywhere; margin-top: .4rem; } .bars svg { height: .9rem; }
"""


def report_page(title: str, body: Iterable[str]) -> str:
    """Return a whole page with these elements, as HTML that is well-formed XML too."""
    content = "\n".join(part for part in body if part)
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n'
        '<head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n{content}\n</body>\n</html>\n"
    )


def section(heading: str, content: str, about: str = "") -> str:
    """Return a heading, a sentence about what follows, and the content; nothing without content."""
    return f"<h2>{escaped(heading)}</h2>\n{paragraph(about)}{content}" if content else ""


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of the class `kind`, such as "quiet" or "warning"; nothing without text."""
    return f"<p{_class(kind)}>{escaped(text)}</p>" if text else ""


def bullets(texts: Iterable[str]) -> str:
    """Return a list; nothing without entries."""
    items = "".join(f"<li>{escaped(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def definitions(words: Mapping[str, str]) -> str:
    """Return a list of words with their explanations; nothing without words."""
    items = "".join(f"<dt>{escaped(word)}</dt><dd>{escaped(text)}</dd>" for word, text in words.items())
    return f"<dl>{items}</dl>" if items else ""


def table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Container[int] = (),
    broken: Container[int] = (),
    caption: str = "",
) -> str:
    """Return a table in a box of its own, which scrolls where the table is wider than the screen; nothing without rows.

    Args:
        names: Headings of the columns; none for a table without a head.
        rows: Texts of the cells.
        numbers: Indices of the columns that hold numbers.
        broken: Indices of the rows that are over a limit.
        caption: The table's title.
    """
    cells = list(rows)
    if not cells:
        return ""
    # The title is outside the box, so that it does not scroll with the table.
    title = paragraph(caption, "caption")
    head = f"<thead>{_line('th', names, numbers)}</thead>" if names else ""
    columns = [*zip(*([names] if names else []), *cells, strict=True)]
    lines = [_line("td", row, numbers, "broken" if i in broken else "", () if i else columns) for i, row in enumerate(cells)]
    # A box that scrolls takes the keyboard's focus, so that its arrows reach what is hidden.
    box = f'<div class="scroll" tabindex="0" role="region" aria-label={quoted(caption or "table")}>'
    return f"{title}{box}<table>{head}<tbody>{''.join(lines)}</tbody></table></div>"


def _line(
    tag: str, cells: Sequence[str], numbers: Container[int], kind: str = "", columns: Sequence[Sequence[str]] = ()
) -> str:
    """Return a row; with the texts of the whole columns, its cells are so wide that usual words stay whole."""
    shown = ""
    for index, cell in enumerate(cells):
        width = _width(columns[index]) if columns and index not in numbers else 0.0
        style = f' style="min-width: {width:.1f}ch"' if width else ""
        shown += f"<{tag}{_class('number' if index in numbers else '')}{style}>{escaped(cell)}</{tag}>"
    return f"<tr{_class(kind)}>{shown}</tr>"


def _width(texts: Iterable[str]) -> float:
    """Return the least width of a column of texts, in digits; letters may be wider."""
    cells = list(texts)
    longest_word = max((len(word) for text in cells for word in text.split()), default=0)
    return 1.15 * max(min(longest_word, WHOLE_WORD), min(max(map(len, cells)), WHOLE_CELL))


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def escaped(text: str) -> str:
    """Escape text for an element's content; forbidden characters become U+FFFD."""
    return escape(_FORBIDDEN.sub("\ufffd", text))


def quoted(text: str) -> str:
    """Escape text as an attribute's value, including the quotes."""
    return quoteattr(_FORBIDDEN.sub("\ufffd", text))
