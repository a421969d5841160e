"""The files that a report goes into; whatever would stop them is found before the measurement, not after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve.benchmark.errors import BenchmarkArgumentError
from serve.benchmark.reports.csv_file import write_csv
from serve.benchmark.reports.report import Report, write_json
from serve.client.commands.atomic_file import checked_output

Writer = Callable[[Report], None]
WriteFile = Callable[[Path, Report], None]


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where to write what; None for what is not wanted.

    Attributes:
        output: bench.json.
        csv: a line per level.
        html: the page.
        hgrm: the latency distributions.
        plot: a picture, PNG.
    """

    output: Path | None = None
    csv: Path | None = None
    html: Path | None = None
    hgrm: Path | None = None
    plot: Path | None = None

    def writers(self) -> list[Writer]:
        """One per file.

        Raises:
            BenchmarkArgumentError: two options name one file, of which the second would be left.
            OSError: a file cannot be written; the text names the option.
            ModuleNotFoundError: a package that draws is missing.
        """
        wanted: list[tuple[Path | None, str, Callable[[], WriteFile]]] = [
            (self.output, "--output", _json),
            (self.csv, "--csv", _csv),
            (self.html, "--html", _page),
            (self.hgrm, "--hgrm", _percentiles),
            (self.plot, "--plot", _plot),
        ]
        _check_apart([(path, option) for path, option, _ in wanted if path is not None])
        return [_writer(checked_output(path, option), find()) for path, option, find in wanted if path is not None]


def _check_apart(outputs: Sequence[tuple[Path, str]]) -> None:
    taken: dict[Path, str] = {}
    for path, option in outputs:
        if path.exists() and not path.is_file():
            continue  # /dev/null and pipes take whatever comes
        before = taken.setdefault(path.resolve(), option)
        if before != option:
            raise BenchmarkArgumentError(f"{before} and {option} {path}: are one file; expected a file for each")


def _writer(path: Path, write: WriteFile) -> Writer:
    return lambda report: write(path, report)


def _json() -> WriteFile:
    return write_json


def _csv() -> WriteFile:
    return write_csv


def _page() -> WriteFile:
    from serve.benchmark.reports.page import write_page  # noqa: PLC0415  (matplotlib is an extra, and slow to load)

    return write_page


def _percentiles() -> WriteFile:
    from serve.benchmark.reports.percentile_file import write_percentiles  # noqa: PLC0415  (hdrhistogram is an extra)

    return write_percentiles


def _plot() -> WriteFile:
    from serve.benchmark.reports.plot import write_plot  # noqa: PLC0415  (see _page)

    return write_plot
