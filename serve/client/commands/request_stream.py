"""What `halfserve infer --stream` sends: a request per line of JSON, or per so many rows of the given arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from serve.client.commands.input_arguments import fitted_inputs, read_inputs
from serve.client.commands.input_files import STDIN, InputArgumentError, parsed_json, tensors_of_json
from serve.client.errors import InvalidRequest

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelMetadataResponse

LINES = ".jsonl"
Note = Callable[[str], None]


def requests_of(
    arguments: Sequence[str], metadata: ModelMetadataResponse, rows: int, note: Note
) -> Iterator[Mapping[str, Any]]:
    """The inputs of each request, in order.

    Args:
        arguments: one of "-" or FILE.jsonl (a JSON object per line), or those of `read_inputs`, whose rows are sent in parts.
        metadata: the model's.
        rows: in one request, where arrays are sent in parts.
        note: is told of changes that are made to the inputs.

    Raises:
        InputArgumentError: an input cannot be read.
        InvalidRequest: arrays do not fit the model; what stands in lines is judged request by request.
    """
    if len(arguments) == 1 and (arguments[0] == STDIN or arguments[0].endswith(LINES)):
        return _of_lines(arguments[0], metadata)
    if any(argument == STDIN or argument.endswith(LINES) for argument in arguments):
        raise InputArgumentError("--stream: lines of JSON hold all inputs of a request; give them as the only --input")
    fitted, notes = fitted_inputs(read_inputs(arguments), metadata)
    for line in notes:
        note(line)
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in fitted.items()}
    if len(set(counts.values())) != 1:
        raise InvalidRequest(f"--stream: the inputs have different numbers of rows: {counts}; expected one")
    total = next(iter(counts.values()))
    return ({name: array[at : at + rows] for name, array in fitted.items()} for at in range(0, total, rows))


def _of_lines(path: str, metadata: ModelMetadataResponse) -> Iterator[Mapping[str, Any]]:
    if path == STDIN:
        yield from _of_open_file("standard input", sys.stdin.buffer, metadata)
        return
    if not Path(path).is_file():
        raise InputArgumentError(f"--input {path}: there is no file {path}")
    with Path(path).open("rb") as file:
        yield from _of_open_file(path, file, metadata)


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
            yield tensors  # the stream answers it with its error, as any request that does not fit
