"""`python -m examples.checkerboard`; see the package's docstring."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from amp_core.atomic_file import atomic_file
from examples.checkerboard.image import checkerboard
from examples.checkerboard.picture import draw
from examples.checkerboard.report import remarks, summary, table
from examples.checkerboard.settings import SIZE_ON_ACCELERATOR, SIZE_ON_CPU, CheckerboardError, Settings, device_named
from examples.checkerboard.training import Outcome, train

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class LowDtype(StrEnum):
    """What mixed precision mixes float32 with."""

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

    Example: python -m examples.checkerboard --steps 200 --size 64 --dtype bfloat16
    """
    where = device_named(device)
    settings = Settings(
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


def _train_each(settings: Settings, dtypes: list[str], *, show_progress: bool) -> list[Outcome]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (show_progress and console.is_terminal)) as progress:
        bars = {dtype: progress.add_task(dtype, total=settings.steps) for dtype in dtypes}
        return [train(settings, dtype, lambda bar=bars[dtype]: progress.advance(bar)) for dtype in dtypes]  # type: ignore[misc]


def main() -> None:
    """Run the command; 1 and one line for what its user can mend, 2 for wrong usage."""
    try:
        app(prog_name="python -m examples.checkerboard")
    except torch.OutOfMemoryError:
        typer.echo("checkerboard: the device has too little memory for this image; try a smaller --size or --width", err=True)
        sys.exit(1)
    except (CheckerboardError, OSError) as error:
        typer.echo(f"checkerboard: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
