"""`halfserve infer`: one request, or a stream of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Literal
from zipfile import ZipFile

import numpy as np
import typer

from halfserve.files.atomic_files import atomic_file, checked_output
from halfserve.option_groups import takes_option_groups
from halfserve.protos.inference_pb2 import ModelMetadataResponse
from halfserve.protos.request_parameters import TIMINGS
from halfserve.serve.client.array_conversion import Array
from halfserve.serve.client.cli.connection_options import AsJson, Connection
from halfserve.serve.client.cli.display import (
    PipedConsole,
    answer_json,
    outputs_json,
    outputs_table,
    parameters_json,
    printable,
)
from halfserve.serve.client.cli.inputs import (
    STDIN,
    InputArgumentError,
    fitted_inputs,
    parsed_json,
    read_inputs,
    tensors_of_json,
)
from halfserve.serve.client.client import Client
from halfserve.serve.client.errors import ClientError, InvalidRequest
from halfserve.serve.client.infer_exchange import RequestOptions
from halfserve.serve.client.infer_messages import InferAnswer

LINES = ".jsonl"
SUFFIXES = (".npz", ".json")
FAILED_EXIT_CODE = 1  # a request of a stream failed
_request = partial(typer.Option, rich_help_panel="Request")
_answer = partial(typer.Option, rich_help_panel="Answer")
_streaming = partial(typer.Option, rich_help_panel="Many requests over one call")


@dataclass(frozen=True, kw_only=True)
class InferArguments:
    inputs: Annotated[
        list[str],
        _request(
            "--input",
            help="NAME=FILE.npy, .npz or .json; NAME=JSON; NAME=@FILE for bytes as they are; NAME=- for standard input; or "
            "FILE.npz, FILE.json or - for several inputs at once. Once per input.",
        ),
    ]
    version: Annotated[str, _request(help="The model's version; by default the server chooses.")] = ""
    outputs: Annotated[list[str] | None, _answer("--output", help="An output to return; by default all; may be repeated.")] = (
        None
    )
    top_k: Annotated[int | None, _answer(help="Print the K classes with the highest scores instead of the numbers.", min=1)] = (
        None
    )
    priority: Annotated[int, _request(help="1 is the most urgent; 0 leaves it to the model.", min=0)] = 0
    parameters: Annotated[
        list[str] | None, _request("--parameter", help="NAME=VALUE of a request parameter, as JSON or text; may be repeated.")
    ] = None
    output_file: Annotated[Path | None, _answer(help="Write the outputs to this .npz or .json file.")] = None
    stream: Annotated[
        bool,
        _streaming(
            "--stream",
            help="Send one request per line of --input FILE.jsonl or -, or one per --rows rows of the inputs. Prints a "
            "line of JSON per answer.",
        ),
    ] = False
    rows: Annotated[int, _streaming(help="Rows of one request, with --stream.", min=1)] = 1
    in_flight: Annotated[int, _streaming(help="Requests in flight at once, with --stream.", min=1, max=65536)] = 32
    timings: Annotated[
        bool,
        _answer(
            "--timings", help="Print how long the request waited, how long it was computed, and the total time in the server."
        ),
    ] = False
    shared_memory: Annotated[
        bool,
        _request("--shared-memory", help="Pass large tensors to a server on this machine in shared memory; not with --stream."),
    ] = False
    compression: Annotated[Literal["gzip", "deflate"] | None, _request(help="Compression of the request.")] = None
    as_json: AsJson = False

    def request_options(self) -> RequestOptions:
        """Check the parameters. Raises InputArgumentError for a malformed --parameter."""
        options: RequestOptions = {"outputs": self.outputs or None, "top_k": self.top_k, "priority": self.priority}
        parameters = dict(_parameter(text) for text in self.parameters or ())
        if self.timings:
            parameters[TIMINGS] = True
        if parameters:
            options["parameters"] = parameters
        return options


@takes_option_groups
def infer(
    model: Annotated[str, typer.Argument(help="The model's name.")], *, connection: Connection, arguments: InferArguments
) -> None:
    """Ask a running server for a prediction.

    Inputs are converted to the model's datatype, if their values fit it, and get the batch dimension if only that is missing.

    Example: halfserve infer digits --input image=digit.npy
    """
    options = arguments.request_options()
    if arguments.stream and arguments.output_file is not None:
        raise InputArgumentError("--output-file holds one answer; with --stream, send standard output to a file instead")
    if arguments.stream and arguments.shared_memory:
        raise InputArgumentError("--shared-memory is for single requests; with --stream, the tensors travel in the messages")
    with connection.client(compression=arguments.compression, shared_memory=arguments.shared_memory) as client:
        (_infer_stream if arguments.stream else _infer_once)(client, model, arguments, options)


def _infer_once(client: Client, model: str, arguments: InferArguments, options: RequestOptions) -> None:
    if arguments.output_file is not None:
        if arguments.output_file.suffix not in SUFFIXES:
            raise InputArgumentError(
                f"--output-file {arguments.output_file}: expected a name that ends in {' or '.join(SUFFIXES)}"
            )
        checked_output(arguments.output_file, "--output-file")  # before the server is asked for the outputs
    given = read_inputs(arguments.inputs)
    fitted, notes = fitted_inputs(given, client.model_metadata(model, arguments.version))
    for note in notes:
        typer.echo(note, err=True)
    answer = client.infer_detailed(model, fitted, version=arguments.version, **options)
    if arguments.output_file is not None:
        _write_answer(arguments.output_file, answer)
    if arguments.as_json:
        typer.echo(json.dumps(answer_json(answer), allow_nan=False))
        return
    PipedConsole().print(outputs_table(answer))
    for name, value in answer.parameters.items():
        typer.echo(printable(f"{name}: {value}"))


def _infer_stream(client: Client, model: str, arguments: InferArguments, options: RequestOptions) -> None:
    requests = _requests(arguments, client.model_metadata(model, arguments.version))
    answers: list[dict[str, Any]] = []
    failed = 0
    for answer in client.stream_infer(model, requests, version=arguments.version, in_flight=arguments.in_flight, **options):
        shown: dict[str, Any] = {"index": answer.index}
        if answer.error is None:
            shown |= {"outputs": outputs_json(answer.outputs), **parameters_json(answer.parameters)}
        else:
            failed += 1
            shown |= {"error": str(answer.error), "code": answer.error.code}
        if arguments.as_json:
            answers.append(shown)
        else:
            typer.echo(json.dumps(shown, allow_nan=False))
            sys.stdout.flush()
    if arguments.as_json:
        typer.echo(json.dumps({"model": model, "answers": answers, "failed": failed}, allow_nan=False))
    if failed:
        raise typer.Exit(FAILED_EXIT_CODE)


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputArgumentError(f"--parameter {text}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def _requests(arguments: InferArguments, metadata: ModelMetadataResponse) -> Iterator[Mapping[str, Any]]:
    """Return the inputs of each request of a stream: one per line of JSON, or one per `rows` rows of the given arrays.

    Raises:
        InputArgumentError: an input cannot be read.
        InvalidRequest: arrays do not fit the model. A line that does not fit is sent, and fails alone.
    """
    given, rows = arguments.inputs, arguments.rows
    if len(given) == 1 and (given[0] == STDIN or given[0].endswith(LINES)):
        return _of_lines(given[0], metadata)
    if any(argument == STDIN or argument.endswith(LINES) for argument in given):
        raise InputArgumentError("--stream: lines of JSON hold all inputs of a request; give them as the only --input")
    fitted, notes = fitted_inputs(read_inputs(given), metadata)
    for note in notes:
        typer.echo(note, err=True)
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in fitted.items()}
    if len(set(counts.values())) != 1:
        raise InvalidRequest(f"--stream: the inputs have different numbers of rows: {counts}; expected one")
    total = next(iter(counts.values()))
    return ({name: array[at : at + rows] for name, array in fitted.items()} for at in range(0, total, rows))


def _of_lines(path: str, metadata: ModelMetadataResponse) -> Iterator[Mapping[str, Any]]:
    if path != STDIN and not Path(path).is_file():
        raise InputArgumentError(f"--input {path}: there is no file {path}")
    with nullcontext(sys.stdin.buffer) if path == STDIN else Path(path).open("rb") as file:
        yield from _of_open_file("standard input" if path == STDIN else path, file, metadata)


def _of_open_file(name: str, file: IO[bytes], metadata: ModelMetadataResponse) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"--input {name}, line {number}"
        tensors = tensors_of_json(parsed_json(line, where), where)
        if "" in tensors:
            raise InputArgumentError(f"{where}: expected a JSON object such as {{{metadata.inputs[0].name!r}: [...]}}")
        try:
            yield fitted_inputs(tensors, metadata)[0]
        except InvalidRequest:
            yield tensors  # the stream answers it with its error


def _write_answer(path: Path, answer: InferAnswer) -> None:
    """Write the outputs atomically. Raises ClientError: a .npz file cannot keep an output; or OSError."""
    if path.suffix == ".json":
        with atomic_file(path) as file:
            file.write(json.dumps(answer_json(answer), allow_nan=False).encode())
        return
    plain = {name: _storable(name, array) for name, array in answer.outputs.items()}
    # np.savez takes the arrays as keywords, which excludes an output named "file".
    with atomic_file(path) as file, ZipFile(file, "w") as archive:
        for name, array in plain.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _storable(name: str, array: Array) -> Array:
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32)  # numpy's files lack the dtype; float32 has all its values
    if array.dtype != object:
        return array
    # Objects can only be stored as pickles, which are unsafe to load; numpy's fixed-width bytes store BYTES instead.
    if any(element.endswith(b"\0") for element in array.ravel()):
        raise ClientError(f"output {name!r} has bytes that end in zero, which a .npz file cannot keep; write .json")
    return array.astype(bytes)
