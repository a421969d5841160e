"""`halfserve infer`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from serve.client.commands.connection_options import (
    ADDRESS,
    TIMEOUT_S,
    Address,
    AsJson,
    Credentials,
    Retries,
    Timeout,
    connect,
    takes_credentials,
)
from serve.client.commands.console import PipedConsole, printable
from serve.client.commands.display import answer_json, outputs_json, outputs_table
from serve.client.commands.input_arguments import InputArgumentError, fitted_inputs, read_inputs
from serve.client.commands.output_files import checked_output_file, write_answer
from serve.client.commands.request_stream import requests_of
from serve.client.inference_client import InferenceClient
from serve.client.options import RequestOptions

_streaming = partial(typer.Option, rich_help_panel="Many requests over one call")
FAILED_EXIT_CODE = 1  # some request of a stream was not answered


@takes_credentials
def infer(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    *,
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            help="NAME=FILE.npy, .npz or .json; NAME=JSON; NAME=@FILE for bytes as they are; NAME=- for standard input; or "
            "FILE.npz, FILE.json or - for several inputs at once. Once per input.",
        ),
    ],
    address: Address = ADDRESS,
    version: Annotated[str, typer.Option(help="The model's version; without it, the server's choice.")] = "",
    outputs: Annotated[list[str] | None, typer.Option("--output", help="An output wanted; without it, all.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Name the K best classes instead of the numbers.", min=1)] = None,
    priority: Annotated[int, typer.Option(help="1 is the most urgent; 0 leaves it to the model.", min=0)] = 0,
    parameters: Annotated[
        list[str] | None, typer.Option("--parameter", help="NAME=VALUE for the model: JSON, or else text.")
    ] = None,
    output_file: Annotated[Path | None, typer.Option(help="Write the outputs to this .npz or .json file.")] = None,
    stream: Annotated[
        bool,
        _streaming(
            "--stream",
            help="Send one request per line of --input FILE.jsonl or -, or one per --rows rows of the inputs. Prints a "
            "line of JSON per answer.",
        ),
    ] = False,
    rows: Annotated[int, _streaming(help="Rows of one request, with --stream.", min=1)] = 1,
    in_flight: Annotated[int, _streaming(help="Requests under way at once, with --stream.", min=1, max=65536)] = 32,
    shared_memory: Annotated[
        bool,
        typer.Option(
            "--shared-memory", help="Leave large tensors in shared memory; without --stream, of a server on this machine."
        ),
    ] = False,
    compression: Annotated[Literal["gzip", "deflate"] | None, typer.Option(help="Compress what is sent.")] = None,
    timeout: Timeout = TIMEOUT_S,
    retries: Retries = 0,
    credentials: Credentials,
    as_json: AsJson = False,
) -> None:
    """Ask a running server for a prediction.

    Inputs are converted to the model's datatype, if their values fit it, and get the batch dimension if only that is missing.

    Example: halfserve infer digits --input image=digit.npy
    """
    asked: RequestOptions = {"outputs": outputs or None, "top_k": top_k, "priority": priority}
    if parameters:
        asked["parameters"] = dict(_parameter(text) for text in parameters)
    question = Question(model=model, version=version, inputs=inputs, options=asked, as_json=as_json)
    if stream and output_file is not None:
        raise InputArgumentError("--output-file holds one answer; with --stream, send standard output to a file instead")
    if stream and shared_memory:
        raise InputArgumentError("--shared-memory is for single requests; with --stream, the tensors travel in the messages")
    with connect(
        address, credentials, timeout=timeout, retries=retries, compression=compression, shared_memory=shared_memory
    ) as client:
        if stream:
            _ask_stream(client, question, rows, in_flight)
        else:
            _ask(client, question, output_file)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a model.

    Attributes:
        model: its name.
        version: empty for the server's choice.
        inputs: as they stand on the command line.
        options: of the request.
        as_json: whether one JSON object is to be printed.
    """

    model: str
    version: str
    inputs: Sequence[str]
    options: RequestOptions
    as_json: bool


def _ask(client: InferenceClient, question: Question, output_file: Path | None) -> None:
    if output_file is not None:
        checked_output_file(output_file)
    given = read_inputs(question.inputs)
    metadata = client.model_metadata(question.model, question.version)
    fitted, notes = fitted_inputs(given, metadata)
    for note in notes:
        typer.echo(note, err=True)
    answer = client.infer_detailed(question.model, fitted, version=question.version, **question.options)
    if output_file is not None:
        write_answer(output_file, answer)
    if question.as_json:
        typer.echo(json.dumps(answer_json(answer), allow_nan=False))
        return
    PipedConsole().print(outputs_table(answer))
    for name, value in answer.parameters.items():
        typer.echo(printable(f"{name}: {value}"))


def _ask_stream(client: InferenceClient, question: Question, rows: int, in_flight: int) -> None:
    metadata = client.model_metadata(question.model, question.version)
    requests = requests_of(question.inputs, metadata, rows, lambda note: typer.echo(note, err=True))
    answers: list[dict[str, Any]] = []
    failed = 0
    for answer in client.stream_infer(
        question.model, requests, version=question.version, in_flight=in_flight, **question.options
    ):
        shown: dict[str, Any] = {"index": answer.index}
        if answer.error is None:
            shown["outputs"] = outputs_json(answer.outputs)
        else:
            failed += 1
            shown |= {"error": str(answer.error), "code": answer.error.code}
        if question.as_json:
            answers.append(shown)
        else:
            typer.echo(json.dumps(shown, allow_nan=False))
            sys.stdout.flush()
    if question.as_json:
        typer.echo(json.dumps({"model": question.model, "answers": answers, "failed": failed}, allow_nan=False))
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
