"""`halfserve check`: the lines at which a model would leave float16 or bfloat16, before anything is converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from halfserve.export.cli.shared_options import AsJson
from halfserve.export.dtype_check.findings import leak_table, totals
from halfserve.export.errors import ExportError, UsageError
from halfserve.export.half_types import HalfName

if TYPE_CHECKING:
    from torch import nn

    from halfserve.export.samples import ModelInputs


class LeaksFoundError(Exception):
    """The model has errors or warnings; the text counts them."""


EXIT_CODES: dict[type[Exception], int] = {LeaksFoundError: 4, UsageError: 2, ExportError: 1}


def check(
    model: Annotated[
        str, typer.Argument(help="MODULE:FACTORY of a function that returns the model, or a checkpoint.", show_default=False)
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="Example input, DTYPE[SIZES]; repeatable. Whole numbers under N: int64[2,12]<N. By name: mask=bool[2,12].",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="MODULE:FACTORY of the data, as for `halfserve train`: its first samples.")
    ] = None,
    dtype: Annotated[HalfName, typer.Option(help="The half-precision type to check.")] = "float16",
    *,
    as_json: AsJson = False,
) -> None:
    """Find the lines of a model that leave half precision, hold numbers that it cannot, or crash in it.

    Runs the model in float32 and in --dtype on example inputs, captures it with torch.export, and names for each leak the
    file and line, what happens, and the word to write instead. Exit code 0: no errors or warnings; 4: some; 1: it could not be
    checked.

    Example: halfserve check halfserve.examples.digits.model:model --input "float32[2,1,8,8]"
    """
    if inputs and data:
        raise UsageError("both --input and --data are given; expected one of them")
    # torch takes seconds to import; --help and wrong usage answer before it.
    from halfserve.export.dtype_check.finder import find_dtype_leaks  # noqa: PLC0415  (see above)

    module, given = _prepared(model, inputs or [], data)
    with Console(stderr=True).status(f"running the model in float32 and {dtype}"):
        report = find_dtype_leaks(module, *given.args, dtype=dtype, **given.kwargs)
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        Console().print(leak_table(report))
    if not report.clean:
        raise LeaksFoundError(totals(report))


def _prepared(model: str, descriptions: list[str], data: str | None) -> tuple[nn.Module, ModelInputs]:
    from halfserve.export.samples import from_checkpoint, inputs_from_data, inputs_from_descriptions, model_of  # noqa: PLC0415  (see above)

    chosen = inputs_from_descriptions(descriptions) if descriptions else None
    if Path(model).is_file():
        module, samples = from_checkpoint(model)
        return module, chosen or (inputs_from_data(data, module) if data else samples)
    if ":" not in model and (Path(model).suffix or len(Path(model).parts) > 1):
        raise ExportError(f"there is no checkpoint at {model}; give one that `halfserve train` wrote, or MODULE:FACTORY")
    module = model_of(model)
    if chosen is None and data is None:
        raise UsageError('nothing to run the model on; give --input "float32[2,3,32,32]", or --data MODULE:FACTORY')
    return module, chosen or inputs_from_data(data or "", module)
