"""Terminal tables of a report, and the progress bar during a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from halfserve.serve.benchmark.benchmark_report import BenchmarkReport
from halfserve.serve.benchmark.comparison import Spread
from halfserve.serve.benchmark.level import Level, Load, ServerTotals
from halfserve.serve.benchmark.load.spec import LoadStatistics
from halfserve.serve.client.cli.display import printable, short_names

LONGEST_NAME = 16  # longest name of a target in a comparison table
HEADINGS = ("p50 ms", "p99 ms", "max ms", "mean batch", "queue ms", "compute ms")


def tables(report: BenchmarkReport, *, narrow: bool = False) -> Iterator[Table]:
    """Yield a report's tables; `narrow` leaves out what does not fit into 80 columns, which the files of the report have."""
    if report.comparison:
        yield comparison_table(report, narrow=narrow)
        if report.differences:
            yield differences_table(report)
    else:
        yield levels_table(report, narrow=narrow)
    if any(len(level.models) > 1 for level in report.levels):
        yield models_table(report.levels)


def levels_table(report: BenchmarkReport, *, narrow: bool = False) -> Table:
    levels = report.levels
    per_row = any(level.batch_size > 1 for level in levels)
    sizes, goodput = len({level.batch_size for level in levels}) > 1, any(level.goodput_ms for level in levels)
    rates = any(level.load.rate is not None for level in levels)
    table = Table(title=report.title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    headings = [*(["rows"] if sizes else []), _load_heading(rates=rates), "requests/s"]
    headings += [*(["rows/s"] if per_row else []), *(["goodput/s"] if goodput else [])]
    left_out = ["max ms"] if narrow and (per_row or goodput) else []
    left_out += ["mean batch"] if narrow and (sizes or goodput) else []
    left_out += ["queue ms"] if narrow and per_row and goodput else []
    shown = [heading for heading in HEADINGS if heading not in left_out]
    for heading in (*headings, *shown, "errors"):
        table.add_column(heading, justify="right", no_wrap=True)
    for level in levels:
        cells = [f"{level.batch_size:g}"] if sizes else []
        cells += [f"{level.load.amount:g}", f"{level.requests_per_second:.0f}"]
        cells += [f"{level.requests_per_second * level.batch_size:.0f}"] if per_row else []
        cells += ["-" if level.goodput_per_second is None else f"{level.goodput_per_second:.0f}"] if goodput else []
        figures: dict[str, str] = dict(zip(HEADINGS, _figures(level), strict=True))
        cells += [*(figures[heading] for heading in shown), str(level.failed)]
        table.add_row(*cells, style="bold" if level is report.best else None)
    return table


def percentiles_table(name: str, levels: Sequence[Level]) -> Table:
    table = Table(title=f"{name}: latency in milliseconds", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("load")
    for figure in levels[0].latency.to_json():
        table.add_column(figure, justify="right")
    for level in levels:
        table.add_row(level.load.text, *(f"{value:.3f}" for value in level.latency.to_json().values()))
    return table


def models_table(levels: Sequence[Level]) -> Table:
    """Results of each model of a mixed load."""
    table = Table(title="by model", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("load")
    for heading in ("model", "requests/s", "p50 ms", "p99 ms"):
        table.add_column(heading, justify="right")
    for level in levels:
        for name, latencies in zip(level.models, level.tally.latencies, strict=False):
            if latencies.total:
                p50, p99 = latencies.percentiles_ms([50, 99])
                rate = latencies.total / level.tally.seconds
                table.add_row(level.load.text, name, f"{rate:.0f}", _ms(p50), _ms(p99))
    return table


def comparison_table(report: BenchmarkReport, *, narrow: bool = False) -> Table:
    """Return each target under each load: medians over the rounds, ratios with their spread."""
    rounds = len(report.comparison[0].rounds)
    base = report.comparison[0].name
    title = f"medians of {rounds} interleaved rounds; ratios to {base}: median, smallest-largest"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column(_load_heading(rates=report.comparison[0].load.rate is not None), justify="right")
    shown = short_names(table, [line.name for line in report.comparison], LONGEST_NAME, "target")
    table.add_column("target", no_wrap=True)
    batches = () if narrow else ("mean batch",)
    for heading in ("requests/s", "p50 ms", "p99 ms", *batches, "rate ratio", "p99 ratio", "errors"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in report.comparison:
        batch = "-" if line.mean_batch_size is None else f"{line.mean_batch_size:.1f}"
        figures = [f"{line.per_second.median:.0f}", _ms(line.p50_ms.median), _ms(line.p99_ms.median)]
        figures += [batch] if batches else []
        ratios = ("", "") if line.name == base else (_ratio(line.rate_ratio), _ratio(line.p99_ratio))
        table.add_row(f"{line.load.amount:g}", shown[line.name], *figures, *ratios, str(line.failed))
    return table


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f}\n{spread.low:.2f}-{spread.high:.2f}"


def differences_table(report: BenchmarkReport) -> Table:
    table = Table(title="answers to the same inputs", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    unequal = any(d.mismatched for one in report.differences for d in one.outputs)
    headings = ("differ", "error", "scaled error", "agreement", *(["unequal"] if unequal else []))
    table.add_column("target", no_wrap=True)
    table.add_column("output", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    targets = [line.name for line in report.comparison]
    shown = short_names(table, [one.name for one in report.differences], LONGEST_NAME, "target", targets)
    for one in report.differences:
        for d in one.outputs:
            agreement = "-" if d.agreement is None else f"{d.agreement:.2%}"
            errors = (f"{d.max_abs:.2g}", f"{d.scaled:.2g}", agreement, *([str(d.mismatched)] if unequal else []))
            table.add_row(shown[one.name], d.output, f"{d.differing}/{one.requests}", *errors)
        for output in one.not_compared:
            table.add_row(shown[one.name], f"{output} (not in both, or in other shapes)")
        if one.failed:
            table.add_row(shown[one.name], "(no answer on one side)", f"{one.failed}/{one.requests}")
    meaning = [
        *([] if any(one.outputs for one in report.differences) else ["no output has the same name and shape in both"]),
        "differ: answers that are not equal; error: the largest difference; scaled: as a share of the answer's largest value",
        *(["unequal: elements with NaN or infinity on one side only, or texts that differ"] if unequal else []),
    ]
    table.caption = "\n".join([*([str(table.caption)] if table.caption else []), *meaning])
    return table


def _load_heading(*, rates: bool) -> str:
    return "asked/s" if rates else "in flight"


def _figures(level: Level) -> list[str]:
    """Return the cells of HEADINGS."""
    latency, server = level.latency, level.server or ServerTotals()
    return [
        *(_ms(value) for value in (latency.p50, latency.p99, latency.max)),
        *("-" if value is None else _ms(value) for value in (server.mean_batch_size, server.queue_ms, server.compute_ms)),
    ]


def _ms(value: float) -> str:
    """Format with two decimals below 100, none above."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


class ProgressBar:
    """Progress line on standard error: the load, the last window's figures, and the number of loads done."""

    def __init__(self) -> None:
        what = TextColumn("{task.description}", markup=False)  # a model's name may look like markup, such as "[/a]"
        columns = (SpinnerColumn(), what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("connecting", total=None)

    def begin(self, what: str, measurements: int | None) -> None:
        self._progress.update(self._task, description=what, total=measurements)
        self._progress.start()

    def window(self, load: Load, tally: LoadStatistics) -> None:
        latency = tally.latency
        if latency.total and tally.seconds:
            p50 = latency.percentiles_ms([50])[0]
            text = f"{load.text}: {latency.total / tally.seconds:,.0f} requests/s, p50 {p50:.2f} ms"
            self._progress.update(self._task, description=text)

    def done(self, level: Level) -> None:
        text = f"{level.load.text}: {level.requests_per_second:,.0f} requests/s, p99 {level.latency.p99:.2f} ms"
        self._progress.update(self._task, advance=1, description=text)

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
