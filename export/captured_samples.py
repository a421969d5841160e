"""Captured requests of a server as samples: batches for an ONNX model, arrays for a module, texts and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from halfserve.export.export_errors import ExportError
from halfserve.export.verification.samples import (
    Array,
    Feed,
    Input,
    SampleSet,
    inputs_of,
    is_batched,
    load_samples,
    make_feeds,
)
from halfserve.protos.captured_requests import (
    CapturedRequest,
    CapturedRequestsError,
    CapturedTraffic,
    SampledTraffic,
    read_traffic,
)

if TYPE_CHECKING:
    from halfserve.export.onnx_files.model_file import ModelFile

MOST = 1024  # samples, by default
MAX_BYTES = 1 << 30  # of all samples
ROWS = 32  # of a batch
HALVES = frozenset({"float16", "bfloat16"})


def given_samples(
    source: Path | Mapping[str, Array], model: ModelFile, *, most: int = MOST, batch_size: int = ROWS
) -> SampleSet:
    """Return the samples in a file, a mapping or a folder of captured requests, which fit the model (see `load_samples`).

    At most `most` captured rows are taken. Those of one shape become batches of at most `batch_size` rows.

    Raises:
        ExportError: They cannot be read, or do not fit the model.
    """
    if not isinstance(source, Path) or not source.is_dir():
        return SampleSet(inputs=load_samples(source, model))
    traffic = _read(source, most)
    wanted = inputs_of(model.outline)
    batches: list[Feed] = []
    used, misfit = 0, ""
    for group in _by_shape(traffic.requests) if is_batched(wanted) else [[request] for request in traffic.requests]:
        try:
            feeds = make_feeds(wanted, load_samples(_joined(group, wanted), model), batch_size)
        except ExportError as error:
            misfit = misfit or str(error)
            continue
        batches += feeds.batches
        # A model with a fixed batch leaves a remainder out.
        used += sum(end <= feeds.samples for end in accumulate(request.rows for request in group)) if len(group) > 1 else 1
    if not batches:
        raise ExportError(
            f"the captured requests in {source} do not fit the model: {misfit}; give the folder of the model that they were "
            "captured of, or capture others"
        )
    return SampleSet(inputs=batches, traffic=traffic.sampled(used))


def captured_arrays(
    folder: Path, most: int, padding: Mapping[str, int] | None = None
) -> tuple[dict[str, Array], SampledTraffic]:
    """Return the captured requests of the commonest shape, joined by input: [rows, ...]; half precision becomes float32.

    Tokens [rows, length] of texts of all lengths become one shape with `padding`: the value behind a text, by input.

    Raises:
        ExportError: There are none, or an input holds texts or files.
    """
    traffic = _read(folder, most)
    tokens = [request for request in traffic.requests if padding and _are_tokens(request, padding)]
    group = tokens or _by_shape(traffic.requests)[0]
    arrays = {
        name: array[:most].astype(np.float32) if array.dtype.name in HALVES else array[:most]
        for name, array in _joined(group, padding=padding if tokens else None).items()
    }
    return arrays, traffic.sampled(len(group), "of another shape")


def captured_files(folder: Path, most: int) -> tuple[list[bytes], SampledTraffic]:
    """Return the texts in UTF-8, or the pictures' files, of captured requests; none where they hold tensors alone.

    Raises:
        ExportError: There are no requests.
    """
    traffic = _read(folder, most)
    found = [
        [element for array in request.inputs.values() if array.dtype == object for element in array.flat]
        for request in traffic.requests
    ]
    return [element for elements in found for element in elements][:most], traffic.sampled(sum(map(bool, found)))


def _read(folder: Path, most: int) -> CapturedTraffic:
    try:
        return read_traffic(folder, most_rows=most, most_bytes=MAX_BYTES)
    except CapturedRequestsError as error:
        raise ExportError(str(error)) from error


def _are_tokens(request: CapturedRequest, padding: Mapping[str, int]) -> bool:
    arrays = request.inputs.values()
    return request.inputs.keys() == padding.keys() and all(array.ndim == 2 and array.dtype == np.int64 for array in arrays)


def _by_shape(requests: Sequence[CapturedRequest]) -> list[list[CapturedRequest]]:
    """Return the requests of each shape of a row, those with the most rows first."""
    groups: dict[object, list[CapturedRequest]] = {}
    for request in requests:
        shape = tuple((name, array.dtype.str, array.ndim, array.shape[1:]) for name, array in sorted(request.inputs.items()))
        groups.setdefault(shape, []).append(request)
    return sorted(groups.values(), key=lambda group: -sum(request.rows for request in group))


def _joined(
    requests: Sequence[CapturedRequest], wanted: Sequence[Input] = (), padding: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """Return the inputs of requests, joined by their rows; texts for a model that takes texts itself.

    Raises:
        ExportError: An input has texts or files that the model does not take, or inputs have different numbers of rows.
    """
    counts = [{array.shape[:1] for array in request.inputs.values()} for request in requests]
    if len(requests) > 1 and any(len(own) > 1 or () in own for own in counts):
        raise ExportError("the inputs of a request have different numbers of rows, expected one number")
    takes_texts = {value.name for value in wanted if value.dtype.kind == "U"}
    joined = {}
    for name in requests[0].inputs:
        parts = [request.inputs[name] for request in requests]
        if parts[0].dtype == object:
            if name not in takes_texts:
                raise ExportError(
                    f"input {name!r} holds texts or files, which the server prepares for the model: prove it with `halfserve "
                    "export` of the Hugging Face folder or timm:NAME and the same --samples"
                )
            parts = [
                np.array([[e.decode("utf-8", "replace") for e in part.flat]], np.str_).reshape(part.shape) for part in parts
            ]
        if padding:
            longest = max(part.shape[1] for part in parts)
            parts = [np.pad(part, ((0, 0), (0, longest - part.shape[1])), constant_values=padding[name]) for part in parts]
        joined[name] = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return joined
