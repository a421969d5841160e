"""How training went, as a picture: loss, held-out accuracy, and the loss scale with its skipped steps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

# From Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
DOTS_PER_INCH = 150


def training_plot(steps: Sequence[dict[str, Any]], epochs: Sequence[dict[str, Any]]) -> bytes:
    """Draw a PNG with three panels over the optimizer steps.

    Args:
        steps: lines of train.jsonl, one per step: "step", "loss", "scale", "skipped".
        epochs: lines of train.jsonl, one per epoch: "evaluation_loss", "accuracy".
    """
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy, scale = figure.subplots(3, 1, sharex=True)
    numbers = [step["step"] for step in steps]
    ends = [round((i + 1) * len(steps) / max(1, len(epochs))) for i in range(len(epochs))]

    loss.plot(numbers, [_finite(step["loss"]) for step in steps], color=BLUE, alpha=0.55, linewidth=1, label="training")
    loss.plot(ends, [epoch["evaluation_loss"] for epoch in epochs], "o-", color=ORANGE, linewidth=2, label="held out")
    loss.set_yscale("log")
    loss.set_ylabel("loss")
    loss.legend(frameon=False)

    accuracy.plot(ends, [epoch["accuracy"] for epoch in epochs], "o-", color=GREEN, linewidth=2)
    accuracy.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    accuracy.set_ylabel("held-out accuracy")

    scale.step(numbers, [step["scale"] for step in steps], where="post", color=BLUE, linewidth=2, label="loss scale")
    skipped = [step for step in steps if step["skipped"]]
    scale.plot(
        [s["step"] for s in skipped], [s["scale"] for s in skipped], "x", color=ORANGE, markersize=9, label="skipped step"
    )
    scale.set_yscale("log", base=2)
    scale.set_ylabel("loss scale")
    scale.set_xlabel("optimizer step")
    scale.legend(frameon=False)

    for axes in (loss, accuracy, scale):
        axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS_PER_INCH)
    return picture.getvalue()


def _finite(value: Any) -> float:
    """A loss that overflowed is written as null or as text; it leaves a gap in the line."""
    return float(value) if isinstance(value, int | float) else float("nan")
