"""Exported torch programs: their interface, the buffers that they write to, and their conversion to fp32."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from halfserve.protos.datatypes import BY_WIRE
from halfserve.serve.backends.onnx_runtime.request_errors import IndexRange
from halfserve.serve.engine.backend import TORCH_EXPORT, ModelInterface
from halfserve.serve.engine.errors import InvalidArgumentError, ModelLoadError
from halfserve.serve.engine.tensors import ANY_SIZE, Tensors, TensorSpec

WIRE: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
    **{getattr(torch, f"{sign}int{bits}"): f"{sign}int{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
OpOverload = torch._ops.OpOverload  # noqa: SLF001  (torch has no public name for the class)
HigherOrderOperator = torch._ops.HigherOrderOperator  # noqa: SLF001  (see above)
# Buffers to which normalizations in training mode write without declaring it in their schemas.
STATISTICS, TRAINING = frozenset({"running_mean", "running_var"}), frozenset({"training", "use_input_stats"})
HALF_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
# Asserts a tensor's dtype and device, as they were at export.
ASSERTION = torch.ops.aten._assert_tensor_metadata.default  # noqa: SLF001  (an operator's public name)
# Operators whose results have exactly the elements of their first argument.
SAME_ELEMENTS = frozenset(
    {
        *(torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default, torch.ops.aten.contiguous.default),  # noqa: SLF001  (see above)
        *(torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten.clone.default),
        *(torch.ops.aten.unsqueeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.flatten.using_ints),
    }
)
# Reinterprets bits, which differ in fp32.
REINTERPRETATION = torch.ops.aten.view.dtype


@dataclass(frozen=True)
class SizeRange:
    """The sizes that one dimension of an input was exported for."""

    input: str  # name of the input
    dimension: int  # counted from 0
    symbol: str  # name of a number that related dimensions share
    least: int  # smallest size
    most: int | None  # largest size; None for any
    factor: int = 1  # the size is factor times the symbol's number plus offset
    offset: int = 0  # see factor


def program_interface(program: ExportedProgram, path: Path) -> ModelInterface:
    """Return the interface: inputs have the names of `forward`'s parameters; outputs have the keys of the returned dict, or are
    called `output`, or `output_0`, `output_1`, ...

    Raises:
        ModelLoadError: an input or output is not a tensor, or has no wire type.
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
    """Return the variable dimensions of the inputs, with their exported bounds."""
    return tuple(_size_ranges(program))


def check_sizes(ranges: tuple[SizeRange, ...], inputs: Tensors) -> None:
    """Check sizes against the exported bounds, which the program itself does not check.
    Raises InvalidArgumentError: a size is out of range, or related sizes do not match.
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


def index_ranges(program: ExportedProgram) -> dict[str, IndexRange]:
    """Return the range of each input from which an embedding takes its indices, by the input's name."""
    inputs = frozenset(program.graph_signature.user_inputs)
    found: dict[str, IndexRange] = {}
    for node in program.graph.nodes:
        if node.target is not torch.ops.aten.embedding.default:
            continue
        arguments: tuple[Any, ...] = node.args
        table, index = arguments[:2]
        rows = table.meta["val"].shape[0]
        while index.target in SAME_ELEMENTS:
            index = index.args[0]
        name: str = index.name
        if name not in inputs or not isinstance(rows, int):
            continue
        known = found.get(name)
        if known is None or rows <= known.high:
            found[name] = IndexRange(0, rows - 1)
    return found


def _taken(program: ExportedProgram) -> list[str]:
    """Return the names of the inputs, without arguments that are fixed at export."""
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
            if isinstance(size, int):
                continue
            bounds = program.range_constraints.get(size.node.expr)
            if bounds is not None:
                most = int(bounds.upper) if bounds.upper.is_Integer and bounds.upper.is_finite else None
                symbol, factor, offset = _linear(size.node.expr)
                yield SizeRange(node.name, dimension, symbol, int(bounds.lower), most, factor, offset)


def _linear(expression: Any) -> tuple[str, int, int]:
    """Return a derived size such as 2*s+1 as (symbol, factor, offset): ("s", 2, 1)."""
    if len(expression.free_symbols) == 1:
        (symbol,) = expression.free_symbols
        factor = expression.coeff(symbol)
        offset = expression - factor * symbol
        if factor.is_Integer and offset.is_Integer and factor > 0:
            return str(symbol), int(factor), int(offset)
    return str(expression), 1, 0


def _spec(name: str, value: object, where: str) -> TensorSpec:
    if not isinstance(value, torch.Tensor):
        raise ModelLoadError(f"{where} {name!r} is not a tensor ({value!r}); the wire carries tensors only")
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


def written(module: GraphModule) -> frozenset[str]:
    """Return the names of placeholders to whose tensors a graph may write, directly, through views, or in a subgraph.

    torch.export keeps `self.last.copy_(x)` unless the program is made functional (`run_decompositions`): such a buffer would
    pass state from one request to the next.
    """
    targets = (target for node in module.graph.nodes for target in _targets(module, node))
    return frozenset(root for target in targets for root in _roots(target))


def _targets(module: GraphModule, node: Node) -> Iterator[Node]:
    """Yield the nodes to which one node writes."""
    if isinstance(node.target, OpOverload):
        arguments = node.target._schema.arguments  # noqa: SLF001  (the only place where it says what it writes)
        given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | node.kwargs
        trains = any(given.get(name) is True for name in TRAINING)
        for argument in arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or (trains and argument.name in STATISTICS):
                yield from _node_arguments(given.get(argument.name))
    elif isinstance(node.target, HigherOrderOperator):
        taken = node.all_input_nodes
        inner = dict(module.named_modules())
        graphs = (inner.get(str(one.target)) for one in taken if one.op == "get_attr")
        if any(isinstance(graph, GraphModule) and written(graph) for graph in graphs):
            yield from taken  # the operators do not declare uniformly which of them


def _node_arguments(given: Any) -> list[Node]:
    if isinstance(given, Node):
        return [given]
    return [one for one in given if isinstance(one, Node)] if isinstance(given, list | tuple) else []


def _roots(node: Node) -> Iterator[str]:
    """Yield the placeholders of which a node's tensor may be a view."""
    pending, seen = [node], set[Node]()
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.op == "placeholder":
            yield one.name
        elif _may_be_view(one.target):
            pending += one.all_input_nodes


def _may_be_view(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return any(result.alias_info is not None for result in target._schema.returns)  # noqa: SLF001  (see above)
    return target is operator.getitem or isinstance(target, HigherOrderOperator)


def half_dtypes(program: ExportedProgram) -> str:
    """Return the half-precision types of the computation, in words: "fp16", "fp16 and bf16", or "" for none."""
    tensors = [*program.state_dict.values(), *program.constants.values()]
    tensors += [node.meta.get("val") for node in _nodes(program.graph_module)]
    found = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return " and ".join(name for dtype, name in HALF_DTYPES.items() if dtype in found)


def can_upcast(program: ExportedProgram) -> bool:
    """Return whether the program keeps its meaning in fp32: not if it reinterprets bits or calls custom operators."""
    calls = [node.target for node in _nodes(program.graph_module) if node.op == "call_function"]
    return not any(target is REINTERPRETATION or _is_foreign(target) for target in calls)


def upcast_graph(graph_module: GraphModule) -> None:
    """Replace half-precision dtype arguments by fp32, in place, subgraphs included."""
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.target is ASSERTION:
                module.graph.erase_node(node)
                continue
            node.args = map_aggregate(node.args, _upcast_dtype)
            node.kwargs = map_aggregate(node.kwargs, _upcast_dtype)
        module.recompile()


def upcast_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Convert fp16 and bf16 to fp32; other tensors are unchanged."""
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def _nodes(graph_module: GraphModule) -> Iterator[Node]:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def _is_foreign(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace not in {"aten", "prims", "prim"}
    # Arithmetic on sizes is Python's. Higher-order operators keep given dtypes, except autocast.
    return isinstance(target, HigherOrderOperator) and "autocast" in str(target)


def _upcast_dtype(argument: Any) -> Any:
    return torch.float32 if argument in HALF_DTYPES and isinstance(argument, torch.dtype) else argument
