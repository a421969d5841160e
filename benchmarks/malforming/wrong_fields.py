"""ModelInferRequests with one wrong field each."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.malforming.good_requests import good_request
from benchmarks.malforming.interfaces import MAX_BATCH
from halfserve.protos.inference_pb2 import ModelInferRequest

Random = random.Random
NAMES = (
    "",
    "nobody",
    "../affine",
    "affine/../flip",
    "affine\0",
    "AFFINE",
    " affine",
    "%2e%2e/flip",
    "affi\u200bne",
    "a" * 5000,
)
VERSIONS = ("2", "0", "-1", "1.0", "latest", " 1", "\u0661", "1" * 30, "9" * 5000, "0x1", "../1", "1\0")
DATATYPES = ("", "FP32", "fp16", "FP8", "BF16", "INT64", "BYTES", "BOOL", "FP16 ", "TYPE_FP16", "x" * 3000)
SIZES = (-(2**63), -1, 0, 1, 7, MAX_BATCH + 1, 2**31, 2**62, 2**63 - 1)


def wrong_model(chance: Random) -> bytes:
    """An unknown model or version."""
    request = good_request(chance)
    if chance.random() < 0.5:
        request.model_name = chance.choice(NAMES)
    else:
        request.model_version = chance.choice(VERSIONS)
    return request.SerializeToString()


def wrong_datatype(chance: Random) -> bytes:
    """An element type that the model does not take."""
    request = good_request(chance)
    chance.choice(request.inputs).datatype = chance.choice(DATATYPES)
    return request.SerializeToString()


def wrong_shape(chance: Random) -> bytes:
    """Sizes that do not fit the model, the bytes, or a machine."""
    request = good_request(chance)
    shape = chance.choice(request.inputs).shape
    act = chance.randrange(4)
    if act == 0:
        shape[chance.randrange(len(shape))] = chance.choice(SIZES)
    elif act == 1:
        shape.append(chance.choice([1, 2**40]))
    elif act == 2:
        shape.pop()
    else:
        del shape[:]
        shape.extend(chance.choice(SIZES) for _ in range(chance.choice([2, 2, 100])))
    return request.SerializeToString()


def wrong_byte_count(chance: Random) -> bytes:
    """Too many or too few bytes, or too many entries."""
    request = good_request(chance)
    raw, place = request.raw_input_contents, chance.randrange(len(request.raw_input_contents))
    act = chance.randrange(4)
    if act == 0:
        raw[place] += chance.randbytes(chance.choice([1, 2, 16]))
    elif act == 1:
        raw[place] = raw[place][: -chance.choice([1, 2, 16])]
    elif act == 2:
        raw.append(raw[place])
    else:
        del raw[place]
    return request.SerializeToString()


def wrong_tensors(chance: Random) -> bytes:
    """Inputs or outputs that are missing, repeated, or of another name."""
    request = good_request(chance)
    act = chance.randrange(4)
    if act == 0:
        request.inputs.add().CopyFrom(request.inputs[0])
        request.raw_input_contents.append(request.raw_input_contents[0])
    elif act == 1:
        del request.inputs[0], request.raw_input_contents[0]
    elif act == 2:
        request.inputs[0].name = chance.choice(["", "X", "x ", "y", "x" * 4000])
    else:
        request.outputs.add(name=chance.choice(["", "z", "x"]))
        request.outputs.add(name="y")
        request.outputs.add(name="y")
    return request.SerializeToString()


def wrong_parameters(chance: Random) -> bytes:
    """Parameters of the wrong type, and locations in shared memory, which is switched off."""
    request = good_request(chance)
    places: list[Any] = [request, chance.choice(request.inputs), request.outputs.add(name=_output(request))]
    parameters = chance.choice(places).parameters
    names = ["priority", "timeout", "classification", "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"]
    for name in chance.sample(names, chance.randint(1, 3)):
        parameter = parameters[name]
        act = chance.randrange(5)
        if act == 0:
            parameter.string_param = chance.choice(["", "a region", "1"])
        elif act == 1:
            parameter.int64_param = chance.choice([-(2**63), -1, 2**40])
        elif act == 2:
            parameter.bool_param = True
        elif act == 3:
            parameter.double_param = float("nan")
    return request.SerializeToString()


def wrong_contents(chance: Random) -> bytes:
    """Single elements where bytes are required, in the wrong field, too many, or in addition to the bytes."""
    request = good_request(chance)
    tensor = chance.choice(request.inputs)
    if chance.random() < 0.7:
        del request.raw_input_contents[:]
    contents = tensor.contents
    for _ in range(chance.randint(1, 2)):
        act = chance.randrange(5)
        if act == 0:
            contents.fp32_contents.extend([1.0] * chance.randrange(4))
        elif act == 1:
            contents.int_contents.extend([chance.randint(-(2**31), 2**31 - 1)] * chance.randrange(9))
        elif act == 2:
            contents.bool_contents.extend([True] * chance.randrange(5))
        elif act == 3:
            contents.bytes_contents.extend([b"\xff\xfe"] * chance.randrange(5))
        else:
            contents.uint64_contents.append(2**64 - 1)
    return request.SerializeToString()


def _output(request: ModelInferRequest) -> str:
    return "same_text" if request.model_name == "mixed" else "y"
