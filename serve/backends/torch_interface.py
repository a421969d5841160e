"""What an exported torch program takes and gives, as clients will see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from protos.datatypes import BY_WIRE
from serve.engine.backend import TORCH_EXPORT, ModelInterface
from serve.engine.errors import InvalidArgumentError, ModelLoadError
from serve.engine.tensors import ANY_SIZE, Tensors, TensorSpec

WIRE: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
    **{getattr(torch, f"{sign}int{bits}"): f"{sign}int{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class SizeRange:
    """The sizes that one dimension was exported for.

    Attributes:
        input: its name.
        dimension: counted from 0.
        symbol: of a number, the same for dimensions that go with each other.
        least: smallest size.
        most: largest size; None for any.
        factor: the size is so many times the symbol's number,
        offset: and so much more.
    """

    input: str
    dimension: int
    symbol: str
    least: int
    most: int | None
    factor: int = 1
    offset: int = 0


def program_interface(program: ExportedProgram, path: Path) -> ModelInterface:
    """The program's inputs under the names of `forward`'s parameters; its outputs under the keys of the dict that it returns,
    as `output`, or as `output_0`, `output_1`, ...

    Raises:
        ModelLoadError: it takes or gives what is no tensor, or a tensor of a type that does not travel.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    taken = _taken(program)
    inputs = tuple(_spec(name, values.get(name), f"{path}: input") for name in taken)
    given = program.graph_signature.user_outputs
    names = _output_names(program)
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:  # {"a": {"b": x}, "a.b": y}
        raise ModelLoadError(f"{path}: output {twice!r} is there twice, expected each once; return other keys")
    outputs = tuple(
        _spec(name, values.get(node) if isinstance(node, str) else node, f"{path}: output")
        for name, node in zip(names, given, strict=True)
    )
    firsts = {str(values[name].shape[:1]) for name in (*taken, *map(str, given))}
    batch = next((rule for rule in size_ranges(program) if rule.dimension == 0), None)
    batched = (
        len(firsts) == 1
        and (batch is None or batch.least <= 1)
        and all(spec.shape[:1] == (ANY_SIZE,) for spec in (*inputs, *outputs))
    )
    return ModelInterface(
        inputs=inputs,
        outputs=outputs,
        batched=batched,
        kind=TORCH_EXPORT,
        most_rows=batch.most if batched and batch is not None else None,
    )


def size_ranges(program: ExportedProgram) -> tuple[SizeRange, ...]:
    """Every dimension of an input that may vary, with the bounds that the program was exported with."""
    return tuple(_size_ranges(program))


def check_sizes(ranges: tuple[SizeRange, ...], inputs: Tensors) -> None:
    """Check sizes that the program was not exported for: it does not itself, and would compute something.

    Raises:
        InvalidArgumentError: a size is out of its range, or two do not go with each other.
    """
    known: dict[str, tuple[int, str]] = {}
    for rule in ranges:
        size = inputs[rule.input].shape[rule.dimension]
        where = f"input {rule.input!r} has size {size} in dimension {rule.dimension}"
        if size < rule.least or (rule.most is not None and size > rule.most):
            bounds = f"{rule.least} to {rule.most}" if rule.most is not None else f"{rule.least} or more"
            raise InvalidArgumentError(f"{where}, expected {bounds}; the model was exported for no other")
        number, rest = divmod(size - rule.offset, rule.factor)
        if rest:
            raise InvalidArgumentError(f"{where}, expected {rule.factor} times a whole number, and {rule.offset}")
        first, other = known.setdefault(rule.symbol, (number, rule.input))
        if first != number:
            how = "as in" if (rule.factor, rule.offset) == (1, 0) else "to go with"
            raise InvalidArgumentError(f"{where}, expected {rule.factor * first + rule.offset} {how} input {other!r}")


def _taken(program: ExportedProgram) -> list[str]:
    """Names of the inputs; arguments that were fixed at the export are none."""
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return [spec.arg.name for spec in specs if not isinstance(spec.arg, ConstantArgument)]


def _size_ranges(program: ExportedProgram) -> Iterator[SizeRange]:
    taken = set(_taken(program))
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or node.name not in taken or not isinstance(value, torch.Tensor):
            continue
        sizes: tuple[Any, ...] = tuple(value.shape)  # numbers and symbols
        for dimension, size in enumerate(sizes):
            bounds = None if isinstance(size, int) else program.range_constraints.get(size.node.expr)
            if bounds is not None:
                most = int(bounds.upper) if bounds.upper.is_Integer and bounds.upper.is_finite else None
                symbol, factor, offset = _linear(size.node.expr)
                yield SizeRange(node.name, dimension, symbol, int(bounds.lower), most, factor, offset)


def _linear(expression: Any) -> tuple[str, int, int]:
    """A size such as 2*s+1, as a program's dimensions may be derived from each other: ("s", 2, 1)."""
    if len(expression.free_symbols) == 1:
        (symbol,) = expression.free_symbols
        factor = expression.coeff(symbol)
        offset = expression - factor * symbol
        if factor.is_Integer and offset.is_Integer and factor > 0:
            return str(symbol), int(factor), int(offset)
    return str(expression), 1, 0


def _spec(name: str, value: object, where: str) -> TensorSpec:
    if not isinstance(value, torch.Tensor):
        raise ModelLoadError(f"{where} {name!r} is no tensor ({value!r}); the wire carries tensors only")
    wire = WIRE.get(value.dtype)
    if wire is None:
        raise ModelLoadError(f"{where} {name!r} has the type {value.dtype}, which cannot be served; cast it inside the model")
    shape = tuple(size if isinstance(size, int) else ANY_SIZE for size in value.shape)
    return TensorSpec(name=name, datatype=BY_WIRE[wire], shape=shape)


def _output_names(program: ExportedProgram) -> list[str]:
    count = len(program.graph_signature.user_outputs)
    structure = program.call_spec.out_spec
    if structure is None:
        return [f"output_{place}" for place in range(count)]
    names: dict[int, str] = dict(_named(structure.unflatten(range(count)), ""))
    return [names.get(place, f"output_{place}") for place in range(count)]


def _named(tree: Any, prefix: str) -> Iterator[tuple[int, str]]:
    if isinstance(tree, int):
        yield tree, prefix or "output"
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _named(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from _named(value, f"{prefix}.{place}" if prefix else f"output_{place}")
