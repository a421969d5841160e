"""Tables and lines that commands print about a conversion, and their progress."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from halfserve.export.certificate.certificate import BudgetExceeded, Certificate
from halfserve.export.certificate.table import certificate_table
from halfserve.export.conversion_results import Converted, SearchFailed
from halfserve.protos.certificates import SAMPLES

if TYPE_CHECKING:
    from halfserve.export.onnx_fp16.conversion_report import ConversionReport, KeptNode
    from halfserve.export.placement.audit import Placement
    from halfserve.export.placement.cuda_kernels import CudaWarning
    from halfserve.export.search.result import KeptNodeCost, SearchResult

SHOWN = 20  # rows of a table; the rest is counted
EXAMPLES = 3  # nodes named for one reason
LISTED = 8  # entries of a list within a line
NODES_SHOWN = 40  # nodes of a search
COSTS = ("alone", "at\noutputs", "casts", "bytes")  # columns of a search's nodes
SECONDS_BETWEEN_LINES = 10.0
LONG_STEPS = ("fetching", "searching")  # these may take long, so their first lines appear at once


def run_explained(work: Callable[..., Converted]) -> Converted:
    """Run a conversion with its progress on standard error; explain a model that is over budget."""
    stderr = Console(stderr=True)
    try:
        with progress_on(stderr) as progress:
            done = work(progress=progress)
    except BudgetExceeded as error:
        explain(stderr, error)
        raise
    if done.certificate is not None:
        _warn_of_precisions(stderr, done.certificate)
    return done


def _warn_of_precisions(console: Console, certificate: Certificate) -> None:
    for name, verdict in certificate.not_proved.items():
        text = (
            f"warning: the model is written in {certificate.precision} and not proved in {name}: {verdict.worst_violation}. "
            f"No server computes this file in {name}; --dtype {name} makes one for that."
        )
        console.print(Text(text, style="bold red"), soft_wrap=True)


def explain(console: Console, error: BudgetExceeded) -> None:
    """Print the figures of a model that is over budget, and the best result of a search."""
    console.print(certificate_table(error.certificate))
    if isinstance(error, SearchFailed):
        console.print(search_table(error.search))


def as_plain(done: Converted) -> dict[str, Any]:
    """Return everything about a conversion, in JSON's own types."""
    return {
        "path": done.place,
        "size_bytes": done.size_bytes,
        "source_bytes": done.source_bytes,
        "conversion": done.report.to_json(),
        "certificate": done.certificate and done.certificate.to_json(),
        "search": done.search and done.search.to_json(),
        "placement": {"error": done.placement} if isinstance(done.placement, str) else done.placement.to_json(),
        "superseded": list(done.superseded),
        "cuda": [asdict(warning) for warning in done.cuda],
        "growth": done.growth,
    }


def print_conversion(done: Converted, *, in_full: bool = False) -> None:
    """Print everything about a conversion; `in_full` lists the placement of every node."""
    console, placed = Console(), done.placement
    console.print(
        conversion_table(
            done.report, source_bytes=done.source_bytes, size_bytes=done.size_bytes, certified=done.certificate is not None
        )
    )
    if done.search is not None:
        console.print(search_table(done.search))
    if isinstance(placed, str):
        lines = [f"placement {placed}", *cuda_lines(done.cuda)]
    elif in_full:
        console.print(placement_table(placed))
        lines = []
    else:
        lines = placement_lines(placed)
    if done.certificate is not None:
        console.print(certificate_table(done.certificate))
    else:
        lines.append("verdict   none: not verified")
    if done.growth is not None:
        lines.append(f"larger    {done.growth}")
    if done.certificate is not None and SAMPLES in done.certificate.files:
        lines.append(
            f"samples   a few lie in {SAMPLES} beside the model, for servers to check; remove it if they must not travel"
        )
    lines += [
        f"left over {name}: only the model before used it; remove it when no process reads that model"
        for name in done.superseded
    ]
    for line in [*lines, f"written   {done.place}"]:
        console.print(Text(line), soft_wrap=True)


def conversion_table(
    report: ConversionReport, *, source_bytes: int | None = None, size_bytes: int | None = None, certified: bool = False
) -> Group:
    """Tables of float32 nodes, repairs and weights that lost numbers, where there are any, and lines with the totals.

    `certified` leaves size and rounding to the certificate's table, which follows.
    """
    tables = [table for table in (_kept(report.kept), _repairs(report), _weights(report)) if table is not None]
    return Group(*tables, *(Text(line) for line in _facts(report, source_bytes, size_bytes, certified=certified)))


def _kept(kept: Sequence[KeptNode]) -> Table | None:
    if not kept:
        return None
    title = f"{_counted(len(kept), 'node')} in float32"
    if len(kept) > SHOWN:
        return _by_reason(kept, title)
    table = _new_table(title, "node and reason", "operator")
    for node in kept:
        where = " ".join(part for part in (node.module, node.source) if part)
        _add(table, _story(node.name, where, node.reason), node.op_type)
    return table


def _by_reason(kept: Sequence[KeptNode], title: str) -> Table:
    """Return a row for each reason, the most frequent first."""
    groups: dict[str, list[str]] = {}
    for node in kept:
        groups.setdefault(node.reason, []).append(node.name)
    table = _new_table(title, "nodes", "reason, and some of them")
    for reason, names in sorted(groups.items(), key=lambda group: -len(group[1]))[:SHOWN]:
        _add(table, str(len(names)), _story(reason, ", ".join(names[:EXAMPLES])))
    table.caption, table.caption_justify = Text("--json lists all"), "left"
    return table


def _repairs(report: ConversionReport) -> Table | None:
    if not report.repairs:
        return None
    table = _new_table(_counted(len(report.repairs), "repair"), "repair", "what was done, and to which nodes")
    for repair in report.repairs[:SHOWN]:
        more = f" and {len(repair.nodes) - EXAMPLES} more" if len(repair.nodes) > EXAMPLES else ""
        _add(table, repair.pass_name, _story(repair.text, ", ".join(repair.nodes[:EXAMPLES]) + more))
    return _ended(table, len(report.repairs))


def _weights(report: ConversionReport) -> Table | None:
    """Weights with numbers that overflowed or became 0; subnormal ones lost digits only, and are in the totals."""
    lost = [weight for weight in report.weights if weight.ledger.overflow or weight.ledger.flushed]
    if not lost:
        return None
    table = _new_table("weights that lost numbers", "tensor", "elements", "over\n65504", "became\n0", "subnormal")
    table.padding, table.show_edge = 0, False  # room for the names
    for weight in sorted(lost, key=lambda weight: (-weight.ledger.overflow, -weight.ledger.flushed))[:SHOWN]:
        counts = (weight.elements, weight.ledger.overflow, weight.ledger.flushed, weight.ledger.subnormal)
        _add(table, weight.name, *(f"{count:,}" for count in counts))
    return _ended(table, len(lost))


def _facts(report: ConversionReport, source_bytes: int | None, size_bytes: int | None, *, certified: bool) -> list[str]:
    ledger, nodes = report.ledger, _counted(report.float_nodes, "node")
    without = f", {report.unsupported_nodes} more have no {report.dtype}" if report.unsupported_nodes else ""
    casts = _counted(abs(report.casts_added), "cast") + (" fewer" if report.casts_added < 0 else " added")
    lines = [f"{report.dtype:<9} {report.fp16_nodes} of {nodes} that compute on floats{without}; {casts}"]
    if report.converted_before:
        lines.insert(0, "the model had been converted with these settings before, and is unchanged")
    if report.random_nodes:
        more = f" and {len(report.random_nodes) - EXAMPLES} more" if len(report.random_nodes) > EXAMPLES else ""
        drawn = f"{', '.join(report.random_nodes[:EXAMPLES])}{more}"
        lines.append(f"random    {drawn}: their outputs differ from run to run, and a comparison proves little about them")
    if certified:
        return lines
    lines.append(f"rounding  {ledger.overflow:,} overflow, {ledger.flushed:,} flushed, {ledger.subnormal:,} subnormal")
    if size_bytes is not None and source_bytes:
        lines.append(f"size      {size_bytes:,} bytes, {size_bytes / source_bytes:.0%} of float32's {source_bytes:,}")
    return lines


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _story(*parts: str) -> str:
    """Lines of one cell: names are long, and columns beside each other would break them."""
    return "\n  ".join(part for part in parts if part)


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))  # a Text: brackets in a model's names are no markup


def _ended(table: Table, total: int) -> Table:
    if total > SHOWN:
        table.caption = Text(f"and {total - SHOWN} more; --json lists all")
        table.caption_justify = "left"
    return table


def _counted(count: int, noun: str, form: str = "") -> str:
    return f"{count:{form}} {noun}" if count == 1 else f"{count:{form}} {noun}s"


def placement_lines(placement: Placement) -> list[str]:
    """Return the placement in a few lines: nodes per provider, casts, copies, islands, and CUDA's warnings."""
    nodes = ", ".join(f"{sum(counts.values())} on {_provider(name)}" for name, counts in placement.assigned.items()) or "none"
    casts = f"casts {placement.casts_in_file} in the file"
    if placement.casts_at_runtime is not None:
        casts += f", {placement.casts_at_runtime} when it runs; copies {placement.copies}"
    lines = [f"placement {nodes}; {casts}; float32 islands {len(placement.islands)}"]
    lines += [f"runtime   {crash}" for crash in placement.crashes]
    lines += cuda_lines(placement.cuda)
    return lines


def placement_table(placement: Placement) -> Group:
    """Return the whole placement: operators per provider, islands with their reasons, and CUDA's warnings."""
    providers = _new_table(
        f"placement by ONNX Runtime {placement.runtime} at {placement.level}", "provider", "nodes", "operators"
    )
    for name, counts in placement.assigned.items():
        _add(providers, _provider(name), str(sum(counts.values())), _kinds(counts))
    islands = _new_table("float32 islands", "reason and nodes", "operators")
    for island in placement.islands:
        names = ", ".join(island.nodes[:LISTED]) + (
            f" and {len(island.nodes) - LISTED} more" if len(island.nodes) > LISTED else ""
        )
        reason = "; ".join(island.reasons) or "the model has it so"
        _add(islands, f"{reason}\n  {names}", _kinds(island.op_types))
    return Group(providers, *([islands] if placement.islands else []), *(Text(line) for line in placement_lines(placement)))


def cuda_lines(warnings: tuple[CudaWarning, ...]) -> list[str]:
    """Return the nodes that CUDA does not compute as they are, one line for each kind."""
    texts = Counter(warning.text for warning in warnings)
    first = {warning.text: warning.node for warning in reversed(warnings)}
    lines = [f"{first[text]}{f' and {count - 1} more' if count > 1 else ''}: {text}" for text, count in texts.most_common()]
    lines = [*lines[:LISTED], *([f"{len(lines) - LISTED} more kinds of nodes"] if len(lines) > LISTED else [])]
    return [f"on CUDA   {line}" for line in lines]


def _kinds(counts: dict[str, int]) -> str:
    most = Counter(counts).most_common()
    text = ", ".join(name if count == 1 else f"{count} {name}" for name, count in most[:LISTED])
    return text + (f" and {len(most) - LISTED} more kinds" if len(most) > LISTED else "")


def _provider(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider")


def search_table(result: SearchResult) -> Group:
    """Render the nodes to keep where they meet the budget, the totals, and what is over budget."""
    spent = f"{_counted(result.runs, 'run', ',')}, {result.seconds / 60:.1f} min"
    lines = [f"searched  {_counted(result.candidates, 'node', ',')} in {spent}: {_outcome(result)}"]
    lines += [f"over      {text}" for text in result.violations[:NODES_SHOWN]]
    if result.explanation:
        lines.append(f"note      {result.explanation}")
    texts = [Text(line) for line in lines]
    return Group(_needed(result), *texts) if result.kept and result.passed else Group(*texts)


def _outcome(result: SearchResult) -> str:
    count = len(result.keep_fp32_nodes)
    if not result.passed:
        return f"none is enough, not even all {count} in float32"
    if not count:
        return "all can be float16"
    return f"{count} must stay float32" if result.minimal else f"{count} in float32 are enough, perhaps fewer"


def _needed(result: SearchResult) -> Table:
    table = Table(
        title=Text(f"{_counted(len(result.kept), 'node', ',')} to keep in float32"),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=0,
        show_edge=False,
    )
    rows = [_cells(kept) for kept in result.kept[:NODES_SHOWN]]
    # A narrow terminal has no room for empty columns.
    shown = [place for place in range(len(COSTS)) if any(row[place] for row in rows)]
    table.add_column("node and reason", overflow="fold")
    for place in shown:
        table.add_column(COSTS[place], justify="right", no_wrap=True)
    for kept, row in zip(result.kept, rows, strict=False):
        where = " ".join(part for part in (kept.module, kept.source) if part)
        _add(table, _story(f"{kept.node} ({kept.op_type})", where, kept.reason), *(row[place] for place in shown))
    if len(result.kept) > NODES_SHOWN:
        table.caption = Text(f"and {len(result.kept) - NODES_SHOWN} more; --json lists all")
        table.caption_justify = "left"
    return table


def _cells(kept: KeptNodeCost) -> tuple[str, ...]:
    return (
        _error_cell(kept.local_error),
        _error_cell(kept.propagated_error),
        f"{kept.cost.casts:+d}" if kept.cost.casts else "",
        f"{kept.cost.weight_bytes:,}" if kept.cost.weight_bytes else "",
    )


def _error_cell(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.1e}" if math.isfinite(error) else "NaN or inf"


@contextmanager
def progress_on(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield the function to call with each step: a spinner on a terminal, `ProgressLines` elsewhere."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda step: status.update(Text(step))
    else:
        yield ProgressLines(console)


class ProgressLines:
    """Prints the first step of a download or a search, and any step at least 10 s after the last line or the start."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._last, self._begun = clock(), set[str]()

    def __call__(self, step: str) -> None:
        kind = step.partition(" ")[0]
        is_first = kind in LONG_STEPS and kind not in self._begun
        self._begun.add(kind)
        now = self._clock()
        if is_first or now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            self._console.print(Text(step), soft_wrap=True)
