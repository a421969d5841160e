"""The target and what each precision made of it, side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from examples.checkerboard.training import Outcome

INCHES_PER_PANEL = 3.0
DOTS_PER_INCH = 100


def draw(target: Tensor, outcomes: Sequence[Outcome]) -> bytes:
    """A PNG of 300x330 pixels per panel.

    Args:
        target: Brightness between 0 and 1, shape (size, size).
        outcomes: Whose images to draw, clipped to the same range.
    """
    panels = [("target", target), *((f"{o.dtype}, loss {o.loss:.4f}", o.image) for o in outcomes)]
    figure = Figure(figsize=(INCHES_PER_PANEL * len(panels), INCHES_PER_PANEL * 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, image) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.imshow(image.numpy(), cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
        axes.set_title(title)
        axes.set_axis_off()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=DOTS_PER_INCH)
    return png.getvalue()
