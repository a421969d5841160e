"""`halfserve infer` and `halfserve models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from zipfile import ZipFile

import numpy as np
import typer
from rich.console import Console

from serve.client.atomic_file import checked_output, written_whole
from serve.client.display import models_table, outputs_json, outputs_table, provider_of, tensors_json
from serve.client.errors import InferenceClientError
from serve.client.inference_client import InferenceClient
from serve.client.input_arguments import InputArgumentError, fitted_inputs, read_inputs
from serve.client.messages import infer_request, output_arrays
from serve.client.tensors import Array

EXIT_CODES: dict[type[Exception], int] = {InputArgumentError: 2, InferenceClientError: 1, OSError: 1}

Address = Annotated[str, typer.Option(help="HOST:PORT of the server's gRPC port.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.001)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def infer(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    *,
    inputs: Annotated[
        list[str], typer.Option("--input", help="NAME=FILE.npy, NAME=FILE.npz, NAME=JSON, or FILE.npz; once per input.")
    ],
    address: Address = "127.0.0.1:8001",
    version: Annotated[str, typer.Option(help="The model's version; without it, the server's choice.")] = "",
    output_file: Annotated[Path | None, typer.Option(help="Write the outputs to this .npz file.")] = None,
    timeout: Timeout = 10.0,
    as_json: AsJson = False,
) -> None:
    """Ask a running server for a prediction.

    Inputs are converted to the model's datatype, if their values fit it, and get the batch dimension if only that is missing.

    Example: halfserve infer digits --input image=digit.npy
    """
    if output_file is not None:
        checked_output(output_file, "--output-file")
    given = read_inputs(inputs)
    with InferenceClient(address, timeout_s=timeout) as client:
        metadata = client.model_metadata(model, version)
        fitted, notes = fitted_inputs(given, metadata)
        for note in notes:
            typer.echo(note, err=True)
        response = client.infer_message(infer_request(metadata, fitted, version=version))
    arrays = output_arrays(response)
    if output_file is not None:
        _write_npz(output_file, arrays)
    if as_json:
        typer.echo(json.dumps(outputs_json(response, arrays), allow_nan=False))
    else:
        Console().print(outputs_table(response, arrays))


def models(*, address: Address = "127.0.0.1:8001", timeout: Timeout = 10.0, as_json: AsJson = False) -> None:
    """List the models of a running server: version, state, platform, provider, inputs and outputs.

    Example: halfserve models --address 127.0.0.1:8001
    """
    with InferenceClient(address, timeout_s=timeout) as client:
        rows = [_model_row(client, entry.name, entry.version, entry.state, entry.reason) for entry in client.models()]
    if as_json:
        typer.echo(json.dumps({"address": address, "models": rows}))
    else:
        Console().print(models_table(rows))


def _model_row(client: InferenceClient, name: str, version: str, state: str, reason: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "version": version, "state": state, "reason": reason, "platform": "", "provider": None}
    if state != "READY":
        # A model that is not loaded has a name and a reason, and nothing else to tell.
        return row | {"inputs": [], "outputs": []}
    metadata, config = client.model_metadata(name, version), client.model_config(name, version)
    return row | {
        "platform": metadata.platform,
        "provider": provider_of(config),
        "inputs": tensors_json(metadata.inputs),
        "outputs": tensors_json(metadata.outputs),
    }


def _write_npz(path: Path, arrays: dict[str, Array]) -> None:
    # Objects can only be stored as pickles, which nobody should have to trust; numpy's fixed-width bytes store BYTES instead.
    plain = {name: array.astype(bytes) if array.dtype == object else array for name, array in arrays.items()}
    for name, array in arrays.items():
        if array.dtype == object and any(e.endswith(b"\0") for e in array.ravel()):
            raise InferenceClientError(f"output {name!r} has bytes that end in zero, which a .npz file cannot keep; use --json")
    # np.savez takes the arrays as keywords, where an output named "file" has no place.
    with written_whole(path) as file, ZipFile(file, "w") as archive:
        for name, array in plain.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
