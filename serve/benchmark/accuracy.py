"""How far the answers of two models are apart when they are asked the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from serve.client.exchanges.messages import output_arrays
from serve.client.values.tensors import Array

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelInferRequest
    from serve.client import InferenceClient

MAX_REQUESTS = 16
SMALLEST = 1e-30


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of one output, over all requests compared.

    Attributes:
        output: its name.
        max_abs: the largest difference of two elements.
        scaled: the same over the largest magnitude in the reference's answer to the same request.
        mismatched: elements of which only one side is finite, or that differ though they are no numbers.
        agreement: share of rows [..., classes] whose largest element is at the same place; None for outputs without classes.
    """

    output: str
    max_abs: float
    scaled: float
    mismatched: int
    agreement: float | None

    def to_json(self) -> dict[str, Any]:
        """By the same names."""
        return dict(vars(self))


def differences(
    client: InferenceClient,
    requests: Sequence[ModelInferRequest],
    reference: InferenceClient,
    reference_requests: Sequence[ModelInferRequest],
) -> tuple[list[Difference], list[str]]:
    """Ask both sides the same and compare.

    Args:
        client: of the model that is judged.
        requests: for it.
        reference: of the model that it is compared with.
        reference_requests: the same inputs in that model's datatypes.

    Returns:
        One difference per output that both have, and the names of the outputs that only one side has.

    Raises:
        InferenceClientError: a request fails.
    """
    found: dict[str, list[tuple[Array, Array]]] = {}
    alone: set[str] = set()
    for ours, theirs in list(zip(requests, reference_requests, strict=False))[:MAX_REQUESTS]:
        first, second = _answers(client, ours), _answers(reference, theirs)
        alone |= first.keys() ^ second.keys()
        for name in first.keys() & second.keys():
            if first[name].shape == second[name].shape:
                found.setdefault(name, []).append((first[name], second[name]))
            else:
                alone.add(name)
    return [_difference(name, pairs) for name, pairs in sorted(found.items())], sorted(alone)


def _answers(client: InferenceClient, request: ModelInferRequest) -> Mapping[str, Array]:
    response = client.infer_message(request)
    bf16 = {tensor.name for tensor in response.outputs if tensor.datatype == "BF16"}
    arrays = output_arrays(response)
    return {name: _from_bf16(array) if name in bf16 else array for name, array in arrays.items()}


def _from_bf16(array: Array) -> Array:
    """float32 from bit patterns, which are its upper halves; other arrays as they are."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


def _has_numbers(array: Array) -> bool:
    return array.dtype.kind in "fiub" or array.dtype.name == "bfloat16"


def _difference(name: str, pairs: Sequence[tuple[Array, Array]]) -> Difference:
    max_abs = scaled = 0.0
    mismatched, agreements = 0, []
    for ours, theirs in pairs:
        if not (_has_numbers(ours) and _has_numbers(theirs)):
            mismatched += int((ours != theirs).sum())
            continue
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
        finite = np.isfinite(a) & np.isfinite(b)
        mismatched += int((np.isfinite(a) != np.isfinite(b)).sum())
        if finite.any():
            largest = float(np.abs(a[finite] - b[finite]).max())
            max_abs = max(max_abs, largest)
            scaled = max(scaled, largest / max(float(np.abs(b[finite]).max()), SMALLEST))
        if a.ndim >= 2 and a.shape[-1] > 1 and a.size:  # a detector may have found nothing
            agreements.append(float((a.argmax(-1) == b.argmax(-1)).mean()))
    agreement = sum(agreements) / len(agreements) if agreements else None
    return Difference(output=name, max_abs=max_abs, scaled=scaled, mismatched=mismatched, agreement=agreement)
