"""Valid requests: the basis of malformed ones, also sent beside them."""

from __future__ import annotations

import random

from halfserve.protos.inference_pb2 import ModelInferRequest
from tests.serve.faults.malforming.interfaces import INTERFACES, MAX_BATCH


def seeded(seed: int) -> random.Random:
    """A generator that makes the same choices for the same seed."""
    return random.Random(seed)  # noqa: S311  (what is tested with need not be hard to guess)


def good_request(chance: random.Random) -> ModelInferRequest:
    """A valid request for any of the models."""
    name = chance.choice(list(INTERFACES))
    rows = chance.randint(1, MAX_BATCH)
    request = ModelInferRequest(model_name=name, id=chance.choice(["", "17", "request-\u00e9"]))
    if chance.random() < 0.3:
        request.model_version = "1"
    if name == "mixed":
        columns = chance.randint(0, 4)
        request.inputs.add(name="flag", datatype="BOOL", shape=[rows, 2])
        request.inputs.add(name="number", datatype="INT32", shape=[rows, columns])
        request.inputs.add(name="text", datatype="BYTES", shape=[rows, 1])
        texts = [b"x" * chance.randint(0, 5) for _ in range(rows)]
        packed = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        request.raw_input_contents.extend([chance.randbytes(2 * rows), chance.randbytes(4 * rows * columns), packed])
        return request
    columns = 8 if name == "affine" else chance.choice([1, 3, 64])
    request.inputs.add(name="x", datatype="FP16", shape=[rows, columns])
    request.raw_input_contents.append(chance.randbytes(2 * rows * columns))
    if chance.random() < 0.2:
        request.outputs.add(name="y")
    return request
