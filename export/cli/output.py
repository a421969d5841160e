"""Tables and lines that commands print about a conversion, and their progress."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from halfserve.export.certificate.certificate import BudgetExceeded, Certificate
from halfserve.export.certificate.table import Line, certificate_table, size_line, weights_line
from halfserve.export.conversion_results import Converted, SearchFailed
from halfserve.protos.certificates import SAMPLES

if TYPE_CHECKING:
    from halfserve.export.onnx_fp16.conversion_report import ConversionReport, KeptNode
    from halfserve.export.placement.audit import Placement
    from halfserve.export.placement.cuda_kernels import CudaWarning
    from halfserve.export.search.result import KeptNodeCost, SearchResult

SHOWN = 20  # entries of a list; the rest is counted
EXAMPLES = 3  # nodes named for one reason
LISTED = 8  # entries of a list within a line
NODES_SHOWN = 40  # nodes of a search
KEPT = "kept in float32: "  # the texts of repairs that keep nodes begin so
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
    console.print(certificate_table(error.certificate), crop=False)
    if isinstance(error, SearchFailed):
        console.print(search_lines(error.search), crop=False)


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
    certified = done.certificate is not None
    parts: list[RenderableType] = [
        conversion_lines(
            done.report,
            source_bytes=done.source_bytes,
            size_bytes=done.size_bytes,
            certified=certified,
            search=done.search,
        )
    ]
    if done.search is not None:
        parts += map(Line, _search_facts(done.search))
    if isinstance(placed, str):
        lines = [f"placement {placed}", *cuda_lines(done.cuda)]
    else:
        lines = placement_lines(placed)
        parts += [placement_list(placed)] if in_full else []
    if done.growth is not None:
        lines.append(f"larger    {done.growth}")
    if done.certificate is not None and SAMPLES in done.certificate.files:
        lines.append(
            f"samples   some lie in {SAMPLES} beside the model, so that servers can check their answers; delete the file if "
            "they are confidential"
        )
    console.print(*parts, *map(Line, lines), crop=False, sep="\n")
    # Paths are not wrapped.
    for name in done.superseded:
        text = f"left over {name}: only the model before used it; remove it when no process reads that model"
        console.print(Text(text), soft_wrap=True)
    if done.certificate is None:
        console.print(Line("verdict   none: not verified"))
    else:
        console.print("", certificate_table(done.certificate, converted=False), crop=False, sep="\n")
    console.print(Text(f"written   {done.place}"), soft_wrap=True)


def conversion_lines(
    report: ConversionReport,
    *,
    source_bytes: int | None = None,
    size_bytes: int | None = None,
    certified: bool = False,
    search: SearchResult | None = None,
) -> Group:
    """Lists of float32 nodes, repairs and weights that lost numbers, where there are any, and lines with the totals.

    `certified` leaves the size to the certificate's table, which follows. The nodes that `search` found have its reasons.
    """
    lists = (*_kept(report.kept, search), *_repairs(report), *_weights(report))
    return Group(*lists, *map(Line, _facts(report, source_bytes, size_bytes, certified=certified)))


def _kept(kept: Sequence[KeptNode], search: SearchResult | None) -> Iterator[Line]:
    """Yield each reason with its nodes, the most frequent reason first, then the nodes that the search found."""
    if not kept:
        return
    found = frozenset(search.keep_fp32_nodes if search is not None else ())
    reasons: dict[str, list[KeptNode]] = {}
    for node in kept:
        if node.name not in found:
            reasons.setdefault(node.reason, []).append(node)
    yield _heading(f"{_counted(len(kept), 'node')} in float32")
    named = SHOWN if len(kept) <= SHOWN else EXAMPLES
    for reason, nodes in sorted(reasons.items(), key=lambda group: -len(group[1]))[:SHOWN]:
        yield _entry(f"{_counted(len(nodes), 'node')}: {reason}")
        yield from (_entry(_place(f"{node.name} ({node.op_type})", node.module, node.source), 4) for node in nodes[:named])
        yield from _rest(len(nodes), named, 4)
    yield from _rest(len(reasons), SHOWN)
    if search is not None and found:
        yield _entry(f"{_counted(len(found), 'node')}: found by the search")
        yield from _found(search, 4)


def _repairs(report: ConversionReport) -> Iterator[Line]:
    """Yield each repair with its nodes. `_kept` lists the nodes that a repair kept in float32."""
    repairs = [repair for repair in report.repairs if not repair.text.startswith(KEPT)]
    if not repairs:
        return
    yield _heading(f"{_counted(len(repairs), 'repair')} before the conversion")
    for repair in repairs[:SHOWN]:
        more = f" and {len(repair.nodes) - EXAMPLES} more" if len(repair.nodes) > EXAMPLES else ""
        yield _entry(f"{repair.text or repair.pass_name}: {', '.join(repair.nodes[:EXAMPLES])}{more}")
    yield from _rest(len(repairs), SHOWN)


def _weights(report: ConversionReport) -> Iterator[Line]:
    """Rounded weights with numbers that overflowed or became 0; subnormal ones lost digits only, and are in the totals."""
    rounded = (weight for weight in report.weights if weight.action != "kept")
    lost = [weight for weight in rounded if weight.ledger.overflow or weight.ledger.flushed]
    if not lost:
        return
    yield _heading("weights that lost numbers")
    for weight in sorted(lost, key=lambda weight: (-weight.ledger.overflow, -weight.ledger.flushed))[:SHOWN]:
        effects = weights_line(asdict(weight.ledger), report.dtype, {}).removeprefix("weights").strip()
        yield _entry(f"{weight.name}: of {weight.elements:,} numbers {effects}")
    yield from _rest(len(lost), SHOWN)


def _facts(report: ConversionReport, source_bytes: int | None, size_bytes: int | None, *, certified: bool) -> list[str]:
    ledger, nodes = report.ledger, _counted(report.float_nodes, "node")
    without = f", {report.unsupported_nodes} more have no {report.dtype}" if report.unsupported_nodes else ""
    casts = _counted(abs(report.casts_added), "cast") + (" fewer" if report.casts_added < 0 else " added")
    lines = [f"{report.dtype:<9} {report.fp16_nodes} of the {nodes} that compute on floats{without}; {casts}"]
    if report.converted_before:
        lines.insert(0, "the model had been converted with these settings before, and is unchanged")
    if report.random_nodes:
        more = f" and {len(report.random_nodes) - EXAMPLES} more" if len(report.random_nodes) > EXAMPLES else ""
        drawn = f"{', '.join(report.random_nodes[:EXAMPLES])}{more}"
        lines.append(f"random    {drawn}: their outputs differ from run to run, and a comparison proves little about them")
    lines.append(weights_line(asdict(ledger), report.dtype, report.actions))
    if not certified and size_bytes is not None and source_bytes:
        lines.append(size_line(size_bytes, source_bytes, size_bytes / source_bytes))
    return lines


def _heading(text: str) -> Line:
    return Line(text, hanging=0, style="bold")


def _entry(text: str, indent: int = 2) -> Line:
    return Line(f"{' ' * indent}{text}", hanging=indent + 2)


def _place(name: str, *where: str | None) -> str:
    return ", ".join(part for part in (name, *where) if part)


def _rest(total: int, shown: int, indent: int = 2) -> Iterator[Line]:
    if total > shown:
        yield _entry(f"and {total - shown} more; --json lists all", indent)


def _counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def placement_lines(placement: Placement) -> list[str]:
    """Return the placement in a few lines: nodes per provider, casts, copies, float32 nodes, and CUDA's warnings."""
    nodes = [f"{_counted(sum(counts.values()), 'node')} on {_provider(name)}" for name, counts in placement.assigned.items()]
    casts = f"{_counted(placement.casts_in_file, 'cast')} in the file"
    if placement.casts_at_runtime is not None:
        casts += f" and {placement.casts_at_runtime} once it is optimized"
    parts = [", ".join(nodes) or "no nodes", casts]
    parts += [f"{_counted(placement.copies, 'copy', 'copies')} between CPU and GPU"] if placement.copies else []
    if placement.islands:
        parts.append(f"{_counted(len(placement.islands), 'group')} of float32 nodes between casts")
    lines = [f"placement in ONNX Runtime {placement.runtime}: {'; '.join(parts)}"]
    lines += [f"runtime   {crash}" for crash in placement.crashes]
    lines += cuda_lines(placement.cuda)
    return lines


def placement_list(placement: Placement) -> Group:
    """Return the operators per provider, and the groups of float32 nodes with their reasons."""
    lines = [_heading(f"placement by ONNX Runtime {placement.runtime}, optimized at {placement.level}")]
    lines += [
        _entry(f"{_counted(sum(counts.values()), 'node')} on {_provider(name)}: {_kinds(counts)}")
        for name, counts in placement.assigned.items()
    ]
    if placement.islands:
        lines.append(_heading("groups of float32 nodes between casts"))
    for island in placement.islands:
        more = f" and {len(island.nodes) - LISTED} more" if len(island.nodes) > LISTED else ""
        lines.append(_entry(f"{_kinds(island.op_types)}: {'; '.join(island.reasons) or 'the model has it so'}"))
        lines.append(_entry(f"{', '.join(island.nodes[:LISTED])}{more}", 4))
    return Group(*lines)


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


def search_lines(result: SearchResult) -> Group:
    """Render the nodes to keep where they meet the budget, the totals, and what is over budget."""
    heading = [_heading(f"{_counted(len(result.kept), 'node')} to keep in float32")] if result.passed and result.kept else []
    return Group(*heading, *(_found(result, 2) if result.passed else ()), *map(Line, _search_facts(result)))


def _search_facts(result: SearchResult) -> list[str]:
    spent = f"{_counted(result.runs, 'run')}, {result.seconds / 60:.1f} min"
    lines = [f"searched  {_counted(result.candidates, 'node')} in {spent}: {_outcome(result)}"]
    lines += [f"over      {text}" for text in result.violations[:NODES_SHOWN]]
    if result.explanation:
        lines.append(f"note      {result.explanation}")
    return lines


def _outcome(result: SearchResult) -> str:
    count = len(result.keep_fp32_nodes)
    if not result.passed:
        return f"none is enough, not even all {count} in float32"
    if not count:
        return "all can be float16"
    return f"{count} must stay float32" if result.minimal else f"{count} in float32 are enough, perhaps fewer"


def _found(result: SearchResult, indent: int) -> Iterator[Line]:
    for kept in result.kept[:NODES_SHOWN]:
        yield _entry(_place(f"{kept.node} ({kept.op_type})", kept.module, kept.source), indent)
        yield _entry("; ".join((kept.reason, *_costs(kept))), indent + 2)
    yield from _rest(len(result.kept), NODES_SHOWN, indent)


def _costs(kept: KeptNodeCost) -> Iterator[str]:
    """Yield a node's errors in half precision, and what float32 costs."""
    errors = ((kept.local_error, "of its own result"), (kept.propagated_error, "at the model's outputs"))
    texts = [f"{_error(error)} {place}" for error, place in errors if error is not None]
    if texts:
        yield f"scaled error {' and '.join(texts)}"
    casts = kept.cost.casts or 0
    costs = [f"{_counted(abs(casts), 'cast')} {'more' if casts > 0 else 'fewer'}"] if casts else []
    costs += [f"{kept.cost.weight_bytes:,} bytes more"] if kept.cost.weight_bytes else []
    if costs:
        yield f"{' and '.join(costs)} than in half precision"


def _error(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "NaN or infinity"


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
