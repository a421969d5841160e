"""A record as a table and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from halfserve.amp_core.recorder.module_spans import OUTSIDE, ROOT
from halfserve.amp_core.recorder.record import LARGEST, SMALLEST_NORMAL, SMALLEST_SUBNORMAL, Magnitudes, Record, RecordEntry
from halfserve.files.atomic_files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_NAMES = {ROOT: "(model)", OUTSIDE: "(outside)"}


def module_name(path: str) -> str:
    return _NAMES.get(path, path)


def table(record: Record, *, limit: int = 40) -> Table:
    """Dtypes and ranges of all operations: entries that float16 would turn into infinity or zero come first.

    A row for each module, operation, direction, output and combination of dtypes; the caption tells the number of those beyond
    `limit`.
    """
    risky = record.risky()
    shown = dict.fromkeys((*risky, *record.entries))
    steps = f"{record.steps} recorded step{'' if record.steps == 1 else 's'}"
    title = f"{steps}: dtypes and ranges, and what float16 would lose"
    # Eighty columns are enough for names of two levels.
    result = Table(title=title, caption=_caption(record, len(risky), limit), box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    result.add_column("module", overflow="fold", min_width=11)
    result.add_column("op", overflow="fold", min_width=12)
    result.add_column("", no_wrap=True)
    result.add_column("dtype", overflow="fold")
    for heading in ("calls", "min", "max", "inf %", "0 %"):
        result.add_column(heading, justify="right", no_wrap=True)
    for entry in list(shown)[:limit]:
        style = "red" if entry.magnitudes.lost_above else "yellow" if entry.magnitudes.lost_below else None
        result.add_row(*_row(entry), style=style)
    return result


def _row(entry: RecordEntry) -> tuple[str, ...]:
    magnitudes = entry.magnitudes
    output = f" [{entry.output}]" if entry.output else ""
    return (
        module_name(entry.module),
        short_name(entry.op) + output,
        "fwd" if entry.direction == "forward" else "bwd",
        _dtypes(entry),
        f"{entry.calls:,}",
        _number(magnitudes.smallest),
        _number(magnitudes.largest),
        _percent(magnitudes.lost_above),
        _percent(magnitudes.lost_below),
    )


def short_name(op: str) -> str:
    """Return an operation's name without namespace and overload: `addmm` for `aten.addmm.default`."""
    return op.removeprefix("aten.").removesuffix(".default")


def _dtypes(entry: RecordEntry) -> str:
    given, made = [_SHORT.get(dtype, dtype) for dtype in dict.fromkeys(entry.inputs)], _SHORT.get(entry.dtype, entry.dtype)
    return made if given == [made] else f"{' '.join(given)}>{made}".lstrip()


def _number(magnitude: float | None) -> str:
    return "-" if magnitude is None else f"{magnitude:.1e}"


def _percent(share: float) -> str:
    return "-" if not share else "<0.01" if share < 0.0001 else f"{share:.2%}".removesuffix("%")


def _caption(record: Record, risky: int, limit: int) -> str:
    more = len(record.entries) - limit
    risk = f"{risky} of {len(record.entries)} would lose numbers in float16 (largest 65504, smallest 6e-08)"
    return f"{risk}; {more} rows more" if more > 0 else risk


_FORMATS = ("png", "svg", "pdf")
_FORWARD, _BACKWARD, _LIMIT = "#0072b2", "#e69f00", "#b2182b"  # distinguishable for the colour-blind too
_LIMITS = (
    (SMALLEST_SUBNORMAL, "$2^{-24}$\nbecomes 0", "right"),  # away from its neighbour, which comes close where the axis is long
    (SMALLEST_NORMAL, "$2^{-14}$\nloses digits", "left"),
    (LARGEST, "65504\noverflows", "center"),
)
_BAR = 0.36
_MOST_LETTERS = 48


def plot(record: Record, path: Path | str, *, limit: int = 120) -> None:
    """Draw the range of each module, forward and backward, against float16's limits, and write the picture.

    Backward is drawn as it ran; a line shows its range without the loss scale, if there was one.

    Args:
        record: The record to draw.
        path: The file; its ending chooses the format: .png, .svg or .pdf. An existing file stays if drawing fails.
        limit: The largest number of modules; those nearest to float16's limits are drawn.

    Raises:
        ValueError: If the path has another ending.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    path = Path(path)
    ending = path.suffix.removeprefix(".").lower()
    if ending not in _FORMATS:
        raise ValueError(f"{path.name!r} cannot be drawn: expected a file name that ends in .png, .svg or .pdf")
    figure = _draw(record, limit)
    with atomic_file(path) as file:
        figure.savefig(file, format=ending, dpi=120)


def _draw(record: Record, limit: int) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (slow, and installed only by who wants it)
    from matplotlib.figure import Figure  # noqa: PLC0415  (slow, and installed only by who wants it)

    forward, backward = record.ranges("forward"), record.ranges("backward")
    seen = [path for path in record.modules() if any(_has_range(part.get(path)) for part in (forward, backward))]
    shown = _nearest_limits(seen, forward, backward, limit)
    figure = Figure(figsize=(10, 1.9 + 0.3 * max(len(shown), 3)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for ranges, label, colour, shift in (
        (forward, "forward", _FORWARD, -_BAR / 2),
        (backward, "backward, as it ran", _BACKWARD, _BAR / 2),
    ):
        _bars(axes, [(row + shift, ranges[path]) for row, path in enumerate(shown) if path in ranges], label, colour)
    _unscaled(axes, record, shown, backward)
    _limits(axes)
    _label(axes, shown)
    figure.suptitle(_title(record, len(shown), len(seen)), fontsize=12)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(len(labels), 1), frameon=False)
    return figure


def _has_range(magnitudes: Magnitudes | None) -> bool:
    return magnitudes is not None and magnitudes.largest is not None


def _nearest_limits(seen: list[str], forward: dict[str, Magnitudes], backward: dict[str, Magnitudes], limit: int) -> list[str]:
    """Return the modules to draw, in the order of `seen`."""
    nothing = Magnitudes()

    def headroom(path: str) -> float:
        parts = [forward.get(path, nothing), backward.get(path, nothing)]
        above = [math.log2(LARGEST / part.largest) for part in parts if part.largest]
        below = [math.log2(part.smallest / SMALLEST_SUBNORMAL) for part in parts if part.smallest]
        return min((*above, *below), default=math.inf)

    nearest = set(sorted(seen, key=headroom)[:limit])
    return [path for path in seen if path in nearest]


def _bars(axes: Axes, rows: list[tuple[float, Magnitudes]], label: str, colour: str) -> None:
    spans = [(y, part.smallest, part.largest) for y, part in rows if part.smallest and part.largest]
    if spans:
        # A range of a single value is drawn as a thin line.
        widths = [max(high - low, low * 0.15) for _, low, high in spans]
        axes.barh([y for y, _, _ in spans], widths, left=[low for _, low, _ in spans], height=_BAR, color=colour, label=label)
    broken = [(y, part) for y, part in rows if part.non_finite]
    if broken:
        at = [part.largest or LARGEST for _, part in broken]
        name = f"{label.partition(',')[0]}: infinite or NaN too"
        axes.scatter(at, [y for y, _ in broken], marker="x", s=36, color=colour, label=name, zorder=4)


def _unscaled(axes: Axes, record: Record, shown: list[str], backward: dict[str, Magnitudes]) -> None:
    """Draw the range of the gradients without the loss scale, if there was one."""
    unscaled = record.unscaled_gradients()
    rows = [(row + _BAR / 2, path) for row, path in enumerate(shown) if path in unscaled]
    if any(unscaled[path] != (backward[path].smallest, backward[path].largest) for _, path in rows):
        low, high = zip(*(unscaled[path] for _, path in rows), strict=True)
        places = [y for y, _ in rows]
        axes.hlines(places, low, high, color="black", linewidth=1.2, label="backward without the loss scale", zorder=3)


def _limits(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    drawn = axes.dataLim  # infinite where nothing was drawn
    axes.set_xlim(min(drawn.minposx / 4, SMALLEST_SUBNORMAL / 16), max(drawn.x1 * 4, LARGEST * 16))
    for at, text, side in _LIMITS:
        axes.axvline(at, color=_LIMIT, linewidth=1, linestyle="--", zorder=3)
        axes.annotate(
            text, (at, 1), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points", ha=side, va="bottom",
            color=_LIMIT, fontsize=8,
        )  # fmt: skip
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel("magnitude of what the module's operations gave out (zeros left out)")


def _label(axes: Axes, shown: list[str]) -> None:
    axes.set_yticks(range(len(shown)), [_shortened(module_name(path)) for path in shown], fontsize=8)
    axes.set_ylim(max(len(shown), 1) - 0.5, -0.5)  # the module that ran first is on top
    if not shown:
        axes.text(0.5, 0.5, "nothing was recorded", transform=axes.transAxes, ha="center", va="center")


def _shortened(name: str) -> str:
    """Cut the middle of a long name."""
    half = _MOST_LETTERS // 2
    return name if len(name) <= _MOST_LETTERS else f"{name[: half - 1]}…{name[-half:]}"


def _title(record: Record, shown: int, seen: int) -> str:
    steps = f"{record.steps} recorded step{'' if record.steps == 1 else 's'}"
    return f"Ranges in {steps}, against float16" + (
        f": the {shown} of {seen} modules nearest its limits" if shown < seen else ""
    )
