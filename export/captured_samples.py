"""Captured requests of a server as samples: batches for an ONNX model, arrays for a module, texts and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from halfserve.export.certificate.certificate import SampledTraffic
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
from halfserve.protos.captured_requests import CapturedRequest, CapturedRequestsError
from halfserve.protos.captured_traffic import CapturedTraffic, read_traffic, request_bytes

if TYPE_CHECKING:
    from halfserve.export.onnx_files.model_file import ModelFile

MOST = 1024  # samples, by default
MAX_BYTES = 1 << 30  # of all samples
ROWS = 32  # of a batch
HALVES = frozenset({"float16", "bfloat16"})
BEYOND, OTHER_SHAPE, MISFIT = "beyond the limit, spread over the time", "of another shape", "that do not fit the model"
Shape: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]


def given_samples(
    source: Path | Mapping[str, Array], model: ModelFile, *, most: int = MOST, batch_size: int = ROWS
) -> SampleSet:
    """Return the samples in a file, a mapping or a folder of captured requests, which fit the model (see `load_samples`).

    `most` limits captured samples; batches of them have `batch_size` rows at most.

    Raises:
        ExportError: They cannot be read, or do not fit the model.
    """
    if not isinstance(source, Path) or not source.is_dir():
        return SampleSet(inputs=load_samples(source, model))
    return captured_samples(source, model, most=most, batch_size=batch_size)


def captured_samples(folder: Path, model: ModelFile, *, most: int, batch_size: int) -> SampleSet:
    """Return captured requests as batches for a model: rows of one shape together, each shape by itself.

    Raises:
        ExportError: There are none, or none fits the model.
    """
    traffic = _read(folder, most)
    wanted = inputs_of(model.outline)
    batches: list[Feed] = []
    requests, misfit = 0, ""
    rows_join = is_batched(wanted)
    for group in _by_shape(traffic.requests, rows_join=rows_join):
        parts = [group] if rows_join else [[request] for request in group]
        for part in parts:
            try:
                feeds = make_feeds(wanted, load_samples(_joined(part, wanted), model), batch_size)
            except ExportError as error:
                misfit = misfit or str(error)
                continue
            batches += feeds.batches
            # A model with a fixed batch leaves a remainder out.
            requests += sum(end <= feeds.samples for end in accumulate(map(_rows, part))) if rows_join else 1
    if not batches:
        raise ExportError(
            f"the captured requests in {folder} do not fit the model: {misfit}; give the folder of the model that they were "
            "captured of, or capture others"
        )
    sampled = _sampled(traffic, requests, {MISFIT: len(traffic.requests) - requests})
    return SampleSet(inputs=batches, note=sampled.text, traffic=sampled)


def captured_arrays(
    folder: Path, most: int, padding: Mapping[str, int] | None = None
) -> tuple[dict[str, Array], SampledTraffic]:
    """Return the captured requests of the commonest shape, joined by input: [rows, ...]; half precision becomes float32.

    Tokens [rows, length] of texts of all lengths become one shape with `padding`: the value behind a text, by input.

    Raises:
        ExportError: There are none, or an input holds texts or files.
    """
    traffic = _read(folder, most)
    group = next(_by_shape(_padded(traffic.requests, padding or {}), rows_join=True))
    arrays = {
        name: array[:most].astype(np.float32) if array.dtype.name in HALVES else array[:most]
        for name, array in _joined(group).items()
    }
    return arrays, _sampled(traffic, len(group), {OTHER_SHAPE: len(traffic.requests) - len(group)})


def _padded(requests: Sequence[CapturedRequest], padding: Mapping[str, int]) -> list[CapturedRequest]:
    tokens = [one for one in requests if padding and one.inputs.keys() == padding.keys()]
    tokens = [one for one in tokens if all(array.ndim == 2 and array.dtype == np.int64 for array in one.inputs.values())]
    longest = max((array.shape[1] for one in tokens for array in one.inputs.values()), default=0)
    return [
        replace(
            one,
            inputs={
                name: np.pad(array, ((0, 0), (0, longest - array.shape[1])), constant_values=padding[name])
                for name, array in one.inputs.items()
            },
        )
        for one in tokens
    ] or list(requests)


def captured_files(folder: Path, most: int) -> tuple[list[bytes], SampledTraffic]:
    """Return the texts in UTF-8, or the pictures' files, of captured requests; none where they hold tensors alone.

    Raises:
        ExportError: There are no requests.
    """
    traffic = _read(folder, most)
    found = [
        [element for array in request.inputs.values() if array.dtype == object for element in array.ravel().tolist()]
        for request in traffic.requests
    ]
    used = sum(map(bool, found))
    files = [element for elements in found for element in elements][:most]
    return files, _sampled(traffic, used, {MISFIT: len(found) - used})


def _read(folder: Path, most: int) -> CapturedTraffic:
    def share(request: CapturedRequest) -> float:
        return max(_rows(request) / most, request_bytes(request) / MAX_BYTES)

    try:
        return read_traffic(folder, share)
    except CapturedRequestsError as error:
        raise ExportError(str(error)) from error


def _rows(request: CapturedRequest) -> int:
    return max((len(array) for array in request.inputs.values() if array.ndim), default=1) or 1


def _by_shape(requests: Sequence[CapturedRequest], *, rows_join: bool) -> Iterator[list[CapturedRequest]]:
    """Yield the requests of each shape, those with the most rows first; where rows join, their number makes no other shape."""
    groups: dict[Shape, list[CapturedRequest]] = {}
    for request in requests:
        counts = {len(array) for array in request.inputs.values() if array.ndim}
        own = int(not rows_join or len(counts) > 1)  # other numbers of rows in each input cannot be joined
        shape = tuple(
            (name, str(array.dtype), array.shape if own else array.shape[1:]) for name, array in sorted(request.inputs.items())
        )
        groups.setdefault(shape, []).append(request)
    return iter(sorted(groups.values(), key=lambda group: -sum(map(_rows, group))))


def _joined(requests: Sequence[CapturedRequest], wanted: Sequence[Input] = ()) -> dict[str, Array]:
    """Return the inputs of requests of one shape, joined by their rows; texts for a model that takes texts itself.

    Raises:
        ExportError: An input has texts or files that the model does not take, or inputs have different numbers of rows.
    """
    counts = {array.shape[:1] for array in requests[0].inputs.values()}
    if len(requests) > 1 and (len(counts) > 1 or () in counts):
        raise ExportError("the inputs of a request have different numbers of rows, expected one number")
    takes_texts = {value.name for value in wanted if value.dtype.kind == "U"}
    joined = {}
    for name, array in requests[0].inputs.items():
        parts = [request.inputs[name] for request in requests]
        if array.dtype == object:
            if name not in takes_texts:
                raise ExportError(
                    f"input {name!r} holds texts or files, which the server prepares for the model: prove it with `halfserve "
                    "export` of the Hugging Face folder or timm:NAME and the same --samples"
                )
            parts = [
                np.array([[e.decode("utf-8", "replace") for e in part.flat]], np.str_).reshape(part.shape) for part in parts
            ]
        joined[name] = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return joined


def _sampled(traffic: CapturedTraffic, requests: int, left_out: Mapping[str, int]) -> SampledTraffic:
    first, last = traffic.period
    reasons = {BEYOND: len(traffic.times_s) - len(traffic.requests), **left_out, "that the server refused": traffic.refused}
    return SampledTraffic(
        model=traffic.model,
        versions=tuple(sorted({request.version for request in traffic.requests})),
        requests=requests,
        left_out={reason: count for reason, count in reasons.items() if count},
        first_utc=first,
        last_utc=last,
        shards=traffic.shards,
        shards_sha256=traffic.shards_sha256,
    )
