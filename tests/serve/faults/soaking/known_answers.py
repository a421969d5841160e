"""Requests with known answers, byte for byte, so that answers need not be decoded.

The first answer of each kind is decoded with protobuf and compared by its values; from then on, answers of that kind must
have the same bytes, except for the id of their request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from halfserve.serve.benchmark.load.calls import framed
from tests.serve.faults.exchange import messages_in

Array = np.ndarray[Any, Any]
ID_BYTES = 10
ID_FIELD = bytes((3 << 3 | 2, ID_BYTES))  # tag and length of the id: https://protobuf.dev/programming-guides/encoding/
NO_ID = b"#" * ID_BYTES


@dataclass
class Known:
    """One request without its id."""

    kind: str  # model and shape
    message: bytes  # serialized message without an id
    expected: Array  # expected value of the only output
    answer: bytes | None = None  # bytes of every answer, with NO_ID for the id; None before the first

    def request(self, number: int) -> bytes:
        """The message to send, with a gRPC prefix; the number, below 10**ID_BYTES, becomes its id."""
        return framed(self.message + ID_FIELD + b"%0*d" % (ID_BYTES, number))

    def is_right(self, number: int, body: bytes) -> bool:
        request_id = b"%0*d" % (ID_BYTES, number)
        if self.answer is not None:
            return body == self.answer.replace(NO_ID, request_id, 1)
        if not self._is_right_by_value(request_id.decode(), body):
            return False
        self.answer = body.replace(request_id, NO_ID, 1)
        return True

    def _is_right_by_value(self, request_id: str, body: bytes) -> bool:
        try:
            (message,) = messages_in(body)
        except ValueError:
            return False
        response = ModelInferResponse.FromString(message)
        (output,), (raw,) = response.outputs, response.raw_output_contents
        shape = tuple(output.shape)
        return response.id == request_id and shape == self.expected.shape and raw == self.expected.tobytes()


def known_requests(seed: int, variants: int = 16) -> list[Known]:
    """Requests for the soak's models in fp16, in several shapes and with several contents each, well mixed.

    Args:
        seed: seed of the contents.
        variants: number of contents for each shape.
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(variants):
        found += [_known(random, "affine", (rows, 64), lambda x: 2 * x + 1) for rows in (1, 2, 5, 8)]
        found += [_known(random, "flip", shape, lambda x: -x) for shape in ((1, 7), (2, 64), (1, 333), (3, 12))]
    return [found[int(index)] for index in random.permutation(len(found))]


def large_requests(seed: int, variants: int = 4) -> Iterator[Known]:
    """Requests of 256 KiB a row in fp32, of 1 to 3 rows."""
    random = np.random.default_rng(seed)
    for number in range(variants):
        yield _known(random, "large", (1 + number % 3, 65_536), lambda x: x + x, np.float32)


def _known(
    random: np.random.Generator,
    model: str,
    shape: tuple[int, ...],
    answer: Callable[[Array], Array],
    dtype: type[np.generic] = np.float16,
) -> Known:
    x = random.integers(-500, 500, shape).astype(dtype)
    request = ModelInferRequest(model_name=model, raw_input_contents=[x.tobytes()])
    request.inputs.add(name="x", datatype=f"FP{8 * x.itemsize}", shape=shape)
    return Known(f"{model} {list(shape)}", request.SerializeToString(), answer(x))
