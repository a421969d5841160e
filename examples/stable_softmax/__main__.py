"""`python -m examples.stable_softmax`; see the package's docstring."""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from examples.stable_softmax.demonstration import Errors, measure_all

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
COLUMNS = {
    "naive": "textbook",
    "stable_in_float16": "stable/fp16",
    "stable": "stable/fp32",
    "torch": "torch",
}


@app.command()
def run(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print how far softmax, log-softmax and cross-entropy of float16 logits are from float64, computed in four ways.

    Example: python -m examples.stable_softmax
    """
    rows = list(measure_all())
    if as_json:
        typer.echo(json.dumps({"unit": "float16 resolution", "cases": [_json(row) for row in rows]}))
        return
    table = Table("function", "logits", *COLUMNS.values(), box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.case.function, row.case.title, *(_shown(getattr(row, name)) for name in COLUMNS))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print("\nLargest error in units of float16's resolution, 2^-10 of the value: rounded right it is at most 0.5.")


def _shown(error: float) -> str:
    if math.isnan(error):
        return "NaN"
    return "infinite" if math.isinf(error) else f"{error:,.2f}"


def _json(row: Errors) -> dict[str, object]:
    # JSON has no NaN and no infinity; null says that the result had no finite error.
    errors = {name: getattr(row, name) if math.isfinite(getattr(row, name)) else None for name in COLUMNS}
    return {"function": row.case.function, "logits": row.case.title, **errors}


if __name__ == "__main__":
    app(prog_name="python -m examples.stable_softmax")
