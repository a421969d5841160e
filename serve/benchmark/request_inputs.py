"""Requests of a load: random values in the model's shape, or the rows of given files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from halfserve.protos.datatypes import Datatype
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelMetadataResponse
from halfserve.serve.benchmark import BenchmarkArgumentError
from halfserve.serve.client.array_conversion import Array, converted, datatype_named
from halfserve.serve.client.infer_messages import Parameter, infer_request

SEED = 2024
DISTINCT_RANDOM = 8  # enough that caches cannot answer instead of the model
DISTINCT_GIVEN = 64
MAX_BYTES = 64 * 2**20  # limit for all distinct requests together, as they are copied to every process
RANDOM_STRING_BYTES = 8


def parse_shapes(arguments: Sequence[str]) -> list[dict[str, list[int]]]:
    """Read `--shape NAME:D1,D2,...`: the shapes of the requests in turn, as many as the input given most often has.
    Raises BenchmarkArgumentError: an argument is malformed, or a size is below 1.
    """
    shapes: dict[str, list[list[int]]] = {}
    for argument in arguments:
        name, colon, text = argument.rpartition(":")
        sizes = text.split(",")
        if not colon or not name or not all(re.fullmatch(r"0*[1-9][0-9]{0,17}", size) for size in sizes):
            raise BenchmarkArgumentError(f"--shape {argument}: expected NAME:SIZE,... without the batch size, as x:1,8,8")
        shapes.setdefault(name, []).append([int(size) for size in sizes])
    variants = max((len(given) for given in shapes.values()), default=1)
    return [{name: given[index % len(given)] for name, given in shapes.items()} for index in range(variants)]


def parse_parameters(arguments: Sequence[str]) -> dict[str, Parameter]:
    """Read `--parameter NAME=VALUE`: a value that is a JSON number, true or false has that type, any other is text.
    Raises BenchmarkArgumentError: an argument is malformed.
    """
    parameters: dict[str, Parameter] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or not name:
            raise BenchmarkArgumentError(f"--parameter {argument}: expected NAME=VALUE, such as priority=1")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        parameters[name] = value if isinstance(value, bool | int | float) else text
    return parameters


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    metadata: ModelMetadataResponse  # metadata of the model
    max_batch_size: int  # largest batch size in the model's configuration; 0 for a model without a batch dimension
    batch_size: int  # rows per request
    shapes: Mapping[str, Sequence[int]]  # shapes of inputs with variable sizes, by name, without the batch dimension
    given: Mapping[str, Array]  # arrays that fit the model (see `fitted_inputs`); inputs missing here are random
    version: str = ""  # version of the model; empty for the server's choice
    zeros: bool = False  # whether inputs that are not given are zeros (empty strings) instead of random
    parameters: Mapping[str, Parameter] = field(default_factory=dict)  # parameters of every request

    def requests(self) -> list[ModelInferRequest]:
        """Distinct requests to send in turn; they have the same values at every call, and for models with other datatypes.

        Given rows are taken in order, cyclically, so that a file of a hundred images makes a hundred different requests of one
        row.

        Raises:
            BenchmarkArgumentError: the batch size or a shape does not fit the model, or the size of a variable dimension is
                missing.
        """
        self._check()
        count = self._distinct()
        pools = {tensor.name: self._pool(tensor.name, tensor.datatype, count) for tensor in self.metadata.inputs}
        requests = []
        for index in range(count):
            inputs = {name: self._take(pool, index) for name, pool in pools.items()}
            request = infer_request(self.metadata, inputs, version=self.version, parameters=self.parameters)
            requests.append(request)
        return requests

    def _check(self) -> None:
        model, limit = self.metadata.name, self.max_batch_size
        if limit == 0 and self.batch_size != 1:
            raise BenchmarkArgumentError(
                f"model {model!r} has no batch dimension: leave --batch-size at 1, not {self.batch_size}"
            )
        if limit and self.batch_size > limit:
            raise BenchmarkArgumentError(f"--batch-size {self.batch_size}: model {model!r} takes 1 to {limit} rows a request")
        for name, array in self.given.items():
            if limit and not len(array):
                raise BenchmarkArgumentError(f"--input {name}: the given array has no rows, expected at least one")
        known = {tensor.name for tensor in self.metadata.inputs}
        for wrong in sorted(self.shapes.keys() - known):
            raise BenchmarkArgumentError(f"--shape {wrong}: model {model!r} has the inputs {', '.join(sorted(known))}")

    def _row_shape(self, name: str) -> list[int]:
        """Return the shape of one row of an input; of the whole input for a model without a batch dimension."""
        declared = next(list(tensor.shape) for tensor in self.metadata.inputs if tensor.name == name)
        if self.max_batch_size:
            declared = declared[1:]
        chosen = list(self.shapes.get(name, declared))
        if len(chosen) != len(declared) or any(d not in (-1, c) for c, d in zip(chosen, declared, strict=True)):
            raise BenchmarkArgumentError(f"--shape {name}: {chosen} does not fit the model's {declared} (-1: any size)")
        return chosen

    def _distinct(self) -> int:
        size = sum(self._request_bytes(tensor.name, datatype_named(tensor.datatype)) for tensor in self.metadata.inputs)
        rows = max((len(array) for array in self.given.values()), default=0)
        wanted = min(DISTINCT_GIVEN, math.ceil(rows / self.batch_size)) if self.max_batch_size else 1
        return max(1, min(wanted if self.given else DISTINCT_RANDOM, MAX_BYTES // max(size, 1)))

    def _request_bytes(self, name: str, datatype: Datatype) -> int:
        if name in self.given:
            array = self.given[name]
            return array.nbytes // (math.ceil(len(array) / self.batch_size) if self.max_batch_size else 1)
        return self.batch_size * math.prod(self._row_shape(name)) * (datatype.itemsize or RANDOM_STRING_BYTES)

    def _pool(self, name: str, wire: str, count: int) -> Array:
        """Return the rows from which requests are made: [rows, *row shape]."""
        if name in self.given:
            return self.given[name] if self.max_batch_size else self.given[name][np.newaxis]
        shape = [count * self.batch_size, *self._row_shape(name)]
        if self.zeros:
            return zero_values(datatype_named(wire), shape)
        # One generator per input: with one for all, fewer requests of a wider datatype would shift the values of the next
        # inputs.
        return random_values(datatype_named(wire), shape, np.random.default_rng([SEED, *name.encode()]))

    def _take(self, pool: Array, index: int) -> Array:
        if not self.max_batch_size:
            taken: Array = pool[index % len(pool)]
            return taken
        return pool[(np.arange(self.batch_size) + index * self.batch_size) % len(pool)]


def zero_values(datatype: Datatype, shape: Sequence[int]) -> Array:
    if datatype.wire == "BYTES":
        empty: Array = np.full(shape, b"", object)
        return empty
    return converted(np.zeros(shape), datatype, "an input of zeros")


def random_values(datatype: Datatype, shape: Sequence[int], generator: np.random.Generator) -> Array:
    """Finite values that most models accept: standard normal for floats; 0 and 1 for integers (valid as token,
    class and mask); short strings for BYTES.
    """
    if datatype.wire == "BYTES":
        codes = generator.integers(ord("a"), ord("z") + 1, size=(*shape, RANDOM_STRING_BYTES), dtype=np.uint8)
        return codes.view(f"S{RANDOM_STRING_BYTES}")[..., 0].astype(object)
    if datatype.numpy is None or datatype.numpy.kind == "f":
        return converted(generator.standard_normal(shape), datatype, "a random input")
    return generator.integers(0, 2, size=shape).astype(datatype.numpy)
