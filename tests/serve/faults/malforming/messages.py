"""Invalid ModelInferRequests of every kind: bytes changed, cut off, rearranged or random, or one wrong field."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from halfserve.files.varint import encoded_varint
from halfserve.protos.inference_pb2 import ModelInferRequest
from tests.serve.faults.malforming.case import Case, infer_case
from tests.serve.faults.malforming.interfaces import MAX_BATCH, good_request

Random = random.Random
MAX_CHANGES = 8
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


def changed_bytes(chance: Random) -> bytes:
    data = bytearray(good_request(chance).SerializeToString())
    # The first fields determine the message; most bytes after them are tensors.
    reach = len(data) if chance.random() < 0.3 else min(len(data), 48)
    for _ in range(chance.randint(1, MAX_CHANGES)):
        data[chance.randrange(reach)] = chance.randrange(256)
    return bytes(data)


def cut_off(chance: Random) -> bytes:
    data = good_request(chance).SerializeToString()
    return data[: chance.randrange(len(data))]


def spliced(chance: Random) -> bytes:
    first, second = (good_request(chance).SerializeToString() for _ in range(2))
    cut, begin = chance.randrange(len(first)), chance.randrange(len(second))
    return chance.choice([first + second, first[:cut] + second[begin:], first + second[begin:], first[:cut] + first])


def random_bytes(chance: Random) -> bytes:
    return chance.randbytes(chance.choice([1, 2, 7, 50, 400]))


def huge_lengths(chance: Random) -> bytes:
    """A field that claims to be longer than the message, by far or by one byte."""
    tag = chance.choice([1, 2, 3, 4, 5, 6, 7, 15, 16, 2000]) << 3 | 2
    length = chance.choice([2**63, 2**64 - 1, 2**32, 2**31 - 1, 2**35, 1000])
    return (
        good_request(chance).SerializeToString()
        + encoded_varint(tag)
        + encoded_varint(length)
        + chance.randbytes(chance.randrange(20))
    )


def wrong_model(chance: Random) -> bytes:
    request = good_request(chance)
    if chance.random() < 0.5:
        request.model_name = chance.choice(NAMES)
    else:
        request.model_version = chance.choice(VERSIONS)
    return request.SerializeToString()


def wrong_datatype(chance: Random) -> bytes:
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


MAKERS: dict[str, Callable[[Random], bytes]] = {
    make.__name__.replace("_", " "): make
    for make in (
        *(changed_bytes, cut_off, spliced, random_bytes, huge_lengths),
        *(wrong_model, wrong_datatype, wrong_shape, wrong_byte_count, wrong_tensors, wrong_parameters, wrong_contents),
    )
}


def message_case(kind: str, chance: Random) -> Case:
    return infer_case(kind, MAKERS[kind](chance))
