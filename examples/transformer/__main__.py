"""A small transformer that sorts the digits of a sequence, trained by `halfserve train` and ready for `halfserve export`.

Its three functions are what the command asks for: `model()`, `data()`, and a loss that leaves the padding out.

    halfserve train halfserve.examples.transformer.model:model --data halfserve.examples.transformer.data:data \
        --loss halfserve.examples.transformer.data:loss --learning-rate 0.01 --policy cuda --epochs 6 --out runs/transformer
    halfserve export runs/transformer/checkpoint.pt --repository runs/models --name sorter

With `--batch-size 16 --accumulate 4` each step still follows 64 sequences, with activations of only 16 in memory at a time.

The same in float32, float16 and bfloat16, with the share of digits put in their right places:

    python -m halfserve.examples.transformer
    python -m halfserve.examples.transformer --policy cuda+fp32:linear --accumulate 4 --json

The forward pass is right in every dtype: the mask takes the smallest number of the dtype in use rather than -1e9, which is
minus infinity in float16, and queries are divided by the root of their width before the product with the keys, not after it.
"""

from __future__ import annotations

import io
import json
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from halfserve import cli
from halfserve.amp_core.checkpoint import load_checkpoint
from halfserve.examples.transformer.data import accuracy

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
FACTORIES = ["halfserve.examples.transformer.model:model", "--data", "halfserve.examples.transformer.data:data"]
TASK_OPTIONS = ["--loss", "halfserve.examples.transformer.data:loss", "--learning-rate", "0.01"]
SEQUENCES_PER_STEP = 64
DTYPES = ("float32", "float16", "bfloat16")
Figures = dict[str, Any]


def _checked_batches(count: int) -> int:
    if SEQUENCES_PER_STEP % count:
        raise typer.BadParameter(f"{SEQUENCES_PER_STEP} sequences cannot be cut into {count} batches of one size.")
    return count


@app.command()
def run(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training sequences.")] = 6,
    policy: Annotated[str, typer.Option(help="Which operation runs in which dtype: native, cuda, ...")] = "cuda",
    accumulate: Annotated[
        int,
        typer.Option(
            min=1,
            max=SEQUENCES_PER_STEP,
            callback=_checked_batches,
            help=f"Batches that the {SEQUENCES_PER_STEP} sequences of a step are cut into.",
        ),
    ] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    out: Annotated[Path, typer.Option(help="A folder for each precision's checkpoint and log goes in there.")] = Path(
        "runs/transformer"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and not the commands.")] = False,
) -> None:
    """Train the same transformer in float32, float16 and bfloat16 by `halfserve train`, and compare what they learned.

    Example: python -m halfserve.examples.transformer --epochs 6
    """
    options = [*TASK_OPTIONS, "--policy", policy, "--epochs", str(epochs), "--device", device]
    options += ["--batch-size", str(SEQUENCES_PER_STEP // accumulate), "--accumulate", str(accumulate)]
    figures = {dtype: _train([*options, "--dtype", dtype, "--out", str(out / dtype)], show=not as_json) for dtype in DTYPES}
    if as_json:
        typer.echo(json.dumps({"policy": policy, "epochs": epochs, "dtypes": figures}))
    else:
        Console(highlight=False, soft_wrap=True).print(_table(figures))


def _train(options: list[str], *, show: bool) -> Figures:
    arguments = ["train", *FACTORIES, *options]
    if show:
        typer.echo(f"$ halfserve {shlex.join(arguments)}", err=True)
    result = _halfserve([*arguments, "--json"])
    checkpoint = load_checkpoint(result["checkpoint"])
    _, held_out = checkpoint.build_data()
    return {
        "accuracy": accuracy(checkpoint.build_model(), held_out),
        **{name: result[name] for name in ("evaluation_loss", "steps", "skipped_steps", "seconds", "checkpoint")},
    }


def _halfserve(arguments: list[str]) -> Figures:
    # In this process, which has loaded torch already. A command ends with SystemExit, after printing its error.
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            cli.main(arguments)
    except SystemExit as end:
        if end.code:
            raise
    figures: Figures = json.loads(printed.getvalue())
    return figures


def _table(figures: dict[str, Figures]) -> Table:
    table = Table("dtype", "digits in place", "held-out loss", "skipped steps", "seconds", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for dtype, row in figures.items():
        skipped = f"{row['skipped_steps']} of {row['steps']}"
        table.add_row(dtype, f"{row['accuracy']:.2%}", f"{row['evaluation_loss']:.4f}", skipped, f"{row['seconds']:.1f}")
    return table


if __name__ == "__main__":
    app(prog_name="python -m halfserve.examples.transformer")
