"""What `halfserve convert` and `halfserve export` print and write about a conversion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.text import Text

from export.certificate.certificate import BudgetExceeded, Certificate
from export.certificate.table import certificate_table
from export.conversion_table import conversion_table
from export.file_conversion import Beside, Converted, SearchFailed
from export.placement.audit import placement_lines, placement_table

if TYPE_CHECKING:
    from export.search.result import SearchResult


def explain(console: Console, error: BudgetExceeded) -> None:
    """Print the figures of a model that is over budget, and the best that a search found."""
    console.print(certificate_table(error.certificate))
    if isinstance(error, SearchFailed):
        console.print(_search_table(error.search))


def _search_table(found: SearchResult) -> Group:
    from export.search.result import search_table  # noqa: PLC0415  (needed only where float16 fails)

    return search_table(found)


def verdict_files(path: Path | None, page: Path | None) -> Beside:
    """What is written with a model: its certificate as JSON, and as a page, where a path is given."""

    def files(certificate: Certificate) -> Sequence[tuple[Path, bytes]]:
        found = [] if path is None else [(path, certificate.to_bytes())]
        if page is not None:
            from export.certificate.html import certificate_page  # noqa: PLC0415  (plots are slow to import)

            found.append((page, certificate_page(certificate).encode()))
        return found

    return files


def as_plain(done: Converted) -> dict[str, Any]:
    """Everything about a conversion, as JSON's own types."""
    return {
        "path": str(done.path),
        "size_bytes": done.size_bytes,
        "source_bytes": done.source_bytes,
        "conversion": done.report.to_json(),
        "certificate": done.certificate and done.certificate.to_json(),
        "search": done.search and done.search.to_json(),
        "placement": {"error": done.placement} if isinstance(done.placement, str) else done.placement.to_json(),
        "superseded": list(done.superseded),
    }


def print_conversion(done: Converted, *, in_full: bool = False) -> None:
    """Print everything about a conversion; `in_full` shows every node's place."""
    console, placed = Console(), done.placement
    console.print(
        conversion_table(
            done.report, source_bytes=done.source_bytes, size_bytes=done.size_bytes, certified=done.certificate is not None
        )
    )
    if done.search is not None:
        console.print(_search_table(done.search))
    if isinstance(placed, str):
        lines = [f"placement {placed}"]
    elif in_full:
        console.print(placement_table(placed))
        lines = []
    else:
        lines = placement_lines(placed)
    if done.certificate is not None:
        console.print(certificate_table(done.certificate))
    else:
        lines.append("verdict   none: not verified")
    lines += [
        f"left over {name}: only the model before used it; remove it when nobody reads that any more"
        for name in done.superseded
    ]
    for line in [*lines, f"written   {done.path}"]:
        console.print(Text(line), soft_wrap=True)
