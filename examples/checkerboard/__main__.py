"""A picture learned from its pixels' coordinates, once in float32 and once in mixed precision, side by side.

A network of 1x1 convolutions (2 -> 256 -> 256 -> 256 -> 1, BatchNorm and ReLU between) is given the grid of coordinates of an
image and learns the brightness of each pixel, with Adam and a mean squared error. Each precision starts from the same weights:

    python -m halfserve.examples.checkerboard
    python -m halfserve.examples.checkerboard --steps 200 --size 64 --dtype bfloat16 --out runs/checkerboard.png
    python -m halfserve.examples.checkerboard --device cuda --size 512 --json

It prints a table of final losses and times (on CUDA also the peak memory) and draws the target and what each precision made of
it, with matplotlib (pip install matplotlib). What mixed precision gains shows on a GPU. A CPU without fp16 arithmetic gains no
speed from float16: it takes many times as long as float32, and what the table shows there is that the losses agree. bfloat16 is
faster than float32 only on a CPU that has instructions for it.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from halfserve.examples.checkerboard.training import (
    SIZE_ON_ACCELERATOR,
    SIZE_ON_CPU,
    CheckerboardError,
    CheckerboardResult,
    CheckerboardSettings,
    checkerboard,
    device_named,
    train,
)
from halfserve.files.atomic_files import atomic_file


def table(outcomes: Sequence[CheckerboardResult]) -> Table:
    """Return one row for each precision, compared with the first, which is float32."""
    first = outcomes[0]
    with_memory = first.peak_bytes is not None
    headings = ["dtype", "final loss", "seconds", "ms a step", "speed", "skipped steps"]
    result = Table(*headings, *(["peak memory"] if with_memory else []), box=None, pad_edge=False)
    for column in result.columns[1:]:
        column.justify = "right"
    for outcome in outcomes:
        speed = first.milliseconds_per_step / outcome.milliseconds_per_step
        cells = [outcome.dtype, f"{outcome.loss:.5f}", f"{outcome.seconds:.2f}", f"{outcome.milliseconds_per_step:.2f}"]
        cells += [f"{speed:.2f}x", str(outcome.skipped_steps)]
        result.add_row(*cells, *([f"{(outcome.peak_bytes or 0) / 2**20:.0f} MiB"] if with_memory else []))
    return result


def remarks(outcomes: Sequence[CheckerboardResult], device: torch.device) -> list[str]:
    """Return a sentence for each precision that took longer than float32, with the reason."""
    first = outcomes[0]
    ratios = {o.dtype: o.milliseconds_per_step / first.milliseconds_per_step for o in outcomes[1:]}
    reason = (
        "a CPU without instructions for it has to convert all the time; compare the losses, not the times"
        if device.type == "cpu"
        else "the image is too small to fill the device; try a larger --size"
    )
    return [f"{dtype} took {ratio:.1f} times as long as float32: {reason}" for dtype, ratio in ratios.items() if ratio > 1.05]


def summary(settings: CheckerboardSettings, outcomes: Sequence[CheckerboardResult], picture: str) -> dict[str, object]:
    """Return the results for `--json`; a loss that is not finite is null."""
    settled = {name: getattr(settings, name) for name in ("steps", "size", "policy")}
    rows = [{name: value for name, value in vars(outcome).items() if name != "image"} for outcome in outcomes]
    for row in rows:
        row["loss"] = row["loss"] if math.isfinite(row["loss"]) else None
        row |= {name: round(row[name], 4) for name in ("seconds", "milliseconds_per_step")}
    return {"device": str(settings.device), **settled, "picture": picture, "outcomes": rows}


INCHES_PER_PANEL = 3.0
DOTS_PER_INCH = 100


def draw(target: Tensor, outcomes: Sequence[CheckerboardResult]) -> bytes:
    """Return a PNG of 300x330 pixels per panel: the target of shape (size, size), between 0 and 1, and each outcome's image."""
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


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class LowDtype(StrEnum):
    """The low-precision dtype of mixed precision."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@app.command()
def run(
    dtype: Annotated[
        list[LowDtype] | None,
        typer.Option(help="What to compare with float32; may be repeated; by default both.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 120,
    size: Annotated[
        int | None, typer.Option(help=f"Pixels a side; by default {SIZE_ON_CPU} on the CPU, else {SIZE_ON_ACCELERATOR}.")
    ] = None,
    squares: Annotated[int, typer.Option(help="Squares a side.")] = 4,
    width: Annotated[int, typer.Option(help="Channels of the hidden layers.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Of Adam.")] = 1e-2,
    policy: Annotated[str, typer.Option(help="Which operation runs in which dtype: native, cuda, ...")] = "native",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to draw the pictures, a PNG.")] = Path("runs/checkerboard.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")] = False,
) -> None:
    """Learn a checkerboard from its pixels' coordinates, in float32 and in mixed precision, and compare the two.

    Example: python -m halfserve.examples.checkerboard --steps 200 --size 64 --dtype bfloat16
    """
    where = device_named(device)
    settings = CheckerboardSettings(
        device=where,
        steps=steps,
        size=size if size is not None else SIZE_ON_CPU if where.type == "cpu" else SIZE_ON_ACCELERATOR,
        squares=squares,
        width=width,
        learning_rate=learning_rate,
        policy=policy,
        seed=seed,
    )
    _check_place(out)  # before the work, not after it
    outcomes = _train_each(settings, ["float32", *dict.fromkeys(map(str, dtype or LowDtype))], show_progress=not as_json)
    with atomic_file(out) as file:
        file.write(draw(checkerboard(settings.size, settings.squares)[0, 0], outcomes))
    if as_json:
        typer.echo(json.dumps(summary(settings, outcomes, str(out))))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(table(outcomes))
    for line in [*remarks(outcomes, where), f"drawn in {out}"]:
        console.print(line)


def _check_place(out: Path) -> None:
    if out.is_dir():
        raise CheckerboardError(f"{out} is a folder; expected the name of a PNG to write, such as {out / 'checkerboard.png'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckerboardError(f"cannot write into the folder {out.parent}: {error.strerror or error}") from error


def _train_each(settings: CheckerboardSettings, dtypes: list[str], *, show_progress: bool) -> list[CheckerboardResult]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (show_progress and console.is_terminal)) as progress:
        bars = {dtype: progress.add_task(dtype, total=settings.steps) for dtype in dtypes}
        return [train(settings, dtype, lambda bar=bars[dtype]: progress.advance(bar)) for dtype in dtypes]  # type: ignore[misc]


def main() -> None:
    """Run the command; exits with 1 and one line for errors that the user can fix, 2 for wrong usage."""
    try:
        app(prog_name="python -m halfserve.examples.checkerboard")
    except torch.OutOfMemoryError:
        typer.echo("checkerboard: the device has too little memory for this image; try a smaller --size or --width", err=True)
        sys.exit(1)
    except (CheckerboardError, OSError) as error:
        typer.echo(f"checkerboard: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
