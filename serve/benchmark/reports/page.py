"""A measurement as one HTML page that needs nothing else: figures inline, no scripts, nothing to load."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path

from rich.table import Table

from serve.benchmark.reports.figures import curves_of, latency_percentiles, over_time, server_split, throughput_latency
from serve.benchmark.reports.report import Report
from serve.benchmark.reports.tables import percentiles_table, tables
from serve.client.commands.atomic_file import written_whole

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } caption { text-align: left; font-weight: bold }
th, td { padding: .2rem .7rem; text-align: right; white-space: pre-line; border-bottom: 1px solid #ddd }
th { border-bottom-color: #888 }
svg { max-width: 100%; height: auto } code { background: #f3f3f3; padding: .1rem .3rem } .warning { color: #b03a00 }
"""


def write_page(path: Path, report: Report) -> None:
    """Write the page.

    Raises:
        OSError: the file cannot be written; what stood there stays.
    """
    content = page(report).encode()
    with written_whole(path) as file:
        file.write(content)


def page(report: Report) -> str:
    """The page's text."""
    curves, facts = curves_of(report), report.to_json()
    split, timeline = server_split(curves), over_time(curves)
    machine = facts["machine"]
    measured_on = f"{machine['platform']}, {machine['cpus']} CPU cores"
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f"<p>{escape(report.address)}, {escape(facts['date'])}; load from {escape(measured_on)}</p>",
        f"<p><code>{escape(report.command)}</code></p>",
        *(f'<p class="warning">{escape(line)}</p>' for line in report.doubts()),
        *(_table(table) for table in tables(report)),
        *(f"<p>{escape(line)}</p>" for line in report.failures()),
        *_section("Throughput and latency", throughput_latency(curves)),
        *_section("Latency, percentile by percentile", latency_percentiles(curves)),
        *(_table(percentiles_table(name, levels)) for name, levels in curves.items()),
        *(_section("Where the time goes in the server", split) if split else []),
        *(_section("Throughput over time", timeline) if timeline else []),
    ]
    head = f'<meta charset="utf-8"><title>{escape(report.title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _section(heading: str, svg: str) -> list[str]:
    return [f"<h2>{escape(heading)}</h2>", svg]


def _table(table: Table) -> str:
    """The terminal's table as HTML."""
    text = io.StringIO()
    text.write(f"<table><caption>{escape(str(table.title))}</caption><tr>")
    text.writelines(f"<th>{escape(str(column.header))}</th>" for column in table.columns)
    text.write("</tr>")
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        text.write("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    text.write("</table>")
    return text.getvalue()
