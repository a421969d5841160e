"""A certificate as a terminal table with a verdict, and the texts that it shares with the HTML page."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from halfserve.export.certificate.budget import ColumnKind, ErrorFigures
    from halfserve.export.certificate.certificate import Certificate
    from halfserve.export.certificate.verdicts import Accuracy, AdversarialVerdict, OutputVerdict, PrecisionVerdict

KEPT_SHOWN = 5
RANGES_SHOWN = 4
RISKS_SHOWN = 3
VIOLATIONS_SHOWN = 8
LONGEST_NAME = 32  # characters of an output's name in the table; longer names stand below it
LABEL = 10  # characters before a line's text
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?(?=,)")  # in a note, which differs by it alone
EXECUTIONS = {
    "rounded": "simulated: every node's result is rounded to {half}, as a GPU does",
    "cuda": "simulated: numbers inside nodes are rounded to {half} too, as CUDA's kernels do",
    "runtime": "computed by ONNX Runtime on this CPU",
    "gpu": "computed by ONNX Runtime on this GPU",
}


@dataclass(frozen=True)
class Line:
    """A line of text that is wrapped between words only: the terminal breaks a name that is too long.

    Print it with `crop=False`.
    """

    text: str
    hanging: int = LABEL  # columns before the second line and those that follow
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        before = " " * min(self.hanging, options.max_width // 2)
        wrapped = textwrap.wrap(
            self.text, options.max_width, subsequent_indent=before, break_long_words=False, break_on_hyphens=False
        )
        yield Text("\n".join(wrapped), self.style, no_wrap=True, overflow="ignore")


def certificate_table(certificate: Certificate, *, converted: bool = True) -> Group:
    """Render the figures of every output, what the figures mean, and lines with sizes, accuracy and conversion.

    Figures in further precisions follow, and the verdicts come last. `converted` says whether the conversion is summarized too.
    """
    behind = f"compared with float32 on {certificate.samples} samples"
    parts = _figures(f"{certificate.model}: {certificate.precision} {behind}", certificate)
    texts = [*_legend(certificate), *_sizes(certificate), *_results(certificate)]
    texts += [*(_conversion(certificate) if converted else ()), *_doubts(certificate)]
    texts += [f"runtime   {crash}" for crash in certificate.probe.crashes]
    parts += map(Line, texts)
    for precision, verdict in certificate.precisions.items():
        parts += ["", *_figures(f"{certificate.model}: computed in {precision}, {behind}", verdict)]
        parts += map(Line, (*_results(verdict), *_doubts(verdict)))
    parts += _verdict(certificate, f" in {certificate.precision}" if certificate.precisions else "")
    for precision, verdict in certificate.precisions.items():
        parts += _verdict(verdict, f" in {precision}")
    return Group(*parts)


def _figures(title: str, verdict: PrecisionVerdict) -> list[RenderableType]:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("output (run)", overflow="fold")
    for heading in ("error", "scaled error", "agreement", "NaN or inf"):
        table.add_column(heading, justify="right", no_wrap=True)
    names = dict.fromkeys(output.name for output in verdict.outputs)
    shown = {name: name if len(name) <= LONGEST_NAME else f"output {place}" for place, name in enumerate(names, 1)}
    for output in verdict.outputs:
        cells = _row(output, shown[output.name])
        table.add_row(*(Text(cell) for cell in cells), style="red" if output.violations else None)
    names_below = (Line(f"{short:<9} {name}") for name, short in shown.items() if short != name)
    return [Line(title, 0), Text(), table, Text(), *names_below]


def _legend(verdict: Certificate) -> Iterator[str]:
    """Yield what the columns and runs of the table mean, with the limits."""
    budget = verdict.budget
    scaled, error = f" (limit {budget.max_scaled_error:g})", ""
    if budget.max_abs_error is not None:
        scaled, error = "", f" (limit {budget.max_abs_error:g})"
    yield f"error     largest difference from float32{error}; scaled: as a share of the output's largest magnitude{scaled}"
    yield f"agreement share of the samples with float32's argmax (at least {budget.min_agreement:.2%})"
    for execution in dict.fromkeys(output.execution for output in verdict.outputs):
        yield f"{execution:<9} {EXECUTIONS.get(execution, execution).format(half=verdict.precision)}"


def _row(verdict: OutputVerdict, name: str) -> list[str]:
    figures = verdict.figures
    errors = (f"{figures.max_abs_error:.2g}", f"{figures.max_scaled_error:.2g}")
    return [f"{name} ({verdict.execution})", *errors, agreement_cell(figures), str(figures.non_finite)]


def agreement_cell(figures: ErrorFigures) -> str:
    """Return the share of rows that agree; "none" where no row is evidence, "" where no row has a choice."""
    if figures.agreement is None:
        return "none" if figures.constant_rows else ""
    return f"{figures.agreement:.2%}"


def accuracy_text(accuracy: Accuracy) -> str:
    """Return the converted model's accuracy beside the reference's."""
    return f"{accuracy.rounded:.2%}, float32 {accuracy.reference:.2%}"


def sizes_text(certificate: Certificate) -> str:
    """Return the sizes that were tried of each dimension whose size may vary."""
    return "; ".join(f"{name} {', '.join(map(str, sizes))}" for name, sizes in certificate.sizes.items())


def origin_text(certificate: Certificate) -> str:
    """Return the hub, name, revision and commit of a model that was fetched; empty for a model from a disk."""
    return " ".join(f"{name} {value}" for name, value in certificate.origin.items())


def kind_lines(verdict: PrecisionVerdict) -> Iterator[str]:
    """Yield one line for each kind of columns: its columns, its scale and its largest error."""
    for output in verdict.outputs:
        yield from (f"{output.name} ({output.execution}): {_kind_line(output.figures, k)}" for k in output.figures.kinds)


def _kind_line(figures: ErrorFigures, kind: ColumnKind) -> str:
    ranges = [f"{first}" if first == last else f"{first}-{last}" for first, last in kind.columns[:RANGES_SHOWN]]
    more = f" and {len(kind.columns) - RANGES_SHOWN} more ranges" if len(kind.columns) > RANGES_SHOWN else ""
    return (
        f"columns {', '.join(ranges)}{more} on axis {figures.axis} reach {kind.scale:.3g}: error {kind.max_abs_error:.2g}, "
        f"{kind.max_scaled_error:.2g} of {kind.unit:.3g}, in column {kind.worst}"
    )


def _sizes(certificate: Certificate) -> Iterator[str]:
    if certificate.reference_bytes:
        share = certificate.onnx_bytes / certificate.reference_bytes
        yield size_line(certificate.onnx_bytes, certificate.reference_bytes, share)
    if certificate.origin:
        yield f"origin    {origin_text(certificate)}"
    if certificate.sizes:
        yield f"tried     the sizes {sizes_text(certificate)}"


def size_line(size: int, source: int, share: float) -> str:
    return f"size      {size:,} bytes, {share:.0%} of the float32 model's {source:,}"


def _results(verdict: PrecisionVerdict) -> Iterator[str]:
    if verdict.accuracy is not None:
        yield f"accuracy  {accuracy_text(verdict.accuracy)}"
    for output in verdict.outputs:
        for figure in output.task:
            yield f"task      {figure.name} {figure.value:.6f} ({output.execution}; at least {figure.least:g})"
    yield from (f"columns   {line}" for line in kind_lines(verdict))


def _doubts(verdict: PrecisionVerdict) -> Iterator[str]:
    yield from _extremes(verdict)
    for risk in verdict.risks[:RISKS_SHOWN]:
        yield f"sums      {risk}; safe where sums are float32"
    if len(verdict.risks) > RISKS_SHOWN:
        yield f"sums      and {len(verdict.risks) - RISKS_SHOWN} more"
    for note in verdict.notes:
        yield f"note      {note}"


def _conversion(certificate: Certificate) -> Iterator[str]:
    conversion = certificate.conversion
    if conversion is None:
        return
    names = [node["name"] for node in conversion.get("kept", ())] or conversion.get("fp32_modules", [])
    more = f" and {len(names) - KEPT_SHOWN} more" if len(names) > KEPT_SHOWN else ""
    yield f"float32   {', '.join(names[:KEPT_SHOWN]) or 'no node needs it'}{more}"
    yield weights_line(conversion.get("ledger", {}), certificate.precision, conversion.get("actions", {}))


def weights_line(ledger: Mapping[str, int], half: str, actions: Mapping[str, int]) -> str:
    """Return what rounding to the half type did to the numbers in the weights; `actions` counts the weights by action."""
    rounded = any(ledger.values()) or any(count for action, count in actions.items() if action != "kept")
    if actions.get("kept") and not rounded:
        return f"weights   none became {half}"
    effects = {"overflow": f"beyond the range of {half}", "flushed": "became 0", "subnormal": "so small that digits were lost"}
    texts = [f"{ledger[name]:,} {effect}" for name, effect in effects.items() if ledger.get(name)]
    return f"weights   {', '.join(texts) or f'every number is within the range of {half}'}"


def _extremes(verdict: PrecisionVerdict) -> Iterator[str]:
    lines = worst_verdicts(verdict)
    within = [line for line in lines if line.factor is None and line.note is None]
    if within:
        broken = ", ".join(line.case for line in within if line.violations)
        passed = ", ".join(line.case for line in within if not line.violations)
        texts = [f"within budget on {passed}" if passed else "", f"over budget on {broken}" if broken else ""]
        yield f"extremes  {'; '.join(filter(None, texts))}"
    notes: dict[str, list[AdversarialVerdict]] = {}
    for line in lines:
        if line.note is not None:
            notes.setdefault(_NUMBER.sub("", line.note), []).append(line)
    for left_out in notes.values():
        cases = ", ".join(line.case for line in left_out)
        yield f"left out  {cases}: {'on the first, ' if len(left_out) > 1 else ''}{left_out[0].note}"
    if verdict.headroom is not None and verdict.headroom > 1:
        yield f"headroom  inputs up to {verdict.headroom:g} times as large as the samples pass too"
    elif verdict.headroom is not None:
        yield "headroom  none: inputs larger than the samples do not pass"


def _verdict(verdict: PrecisionVerdict, where: str = "") -> list[Line]:
    """Return the verdict; `where` names the precision where there are several, as " in bfloat16"."""
    if verdict.passed:
        return [Line(f"verdict   within budget{where}", style="green")]
    texts = verdict.failures or ["nothing was compared"]
    lines = [f"verdict   over budget{where}: {text}" for text in texts[:VIOLATIONS_SHOWN]]
    if len(texts) > VIOLATIONS_SHOWN:
        lines.append(f"verdict   over budget{where} in {len(texts) - VIOLATIONS_SHOWN} more figures; --json lists all")
    return [Line(line, style="red") for line in lines]


def worst_verdicts(verdict: PrecisionVerdict) -> list[AdversarialVerdict]:
    """For each adversarial case in order, the verdict that is over budget, or the one with the largest scaled error."""
    worst: dict[str, AdversarialVerdict] = {}
    for line in verdict.adversarial:
        if line.case not in worst or _rank(line) > _rank(worst[line.case]):
            worst[line.case] = line
    return list(worst.values())


def _rank(line: AdversarialVerdict) -> tuple[bool, float]:
    error = line.figures.max_scaled_error if line.figures else 0.0
    return bool(line.violations), error if math.isfinite(error) else -1.0
