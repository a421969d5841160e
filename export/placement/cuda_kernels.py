"""Predict, without a GPU, what ONNX Runtime's CUDA provider does not compute in float16.

`cuda_kernels.json` lists the CUDA kernels of one release, as its own registry reports them: for each operator the ranges of
opsets and the types that the kernels take there (h float16, f float32, d float64, b bfloat16, n any other). An operator that is
not listed has no CUDA kernel and runs on the CPU.
`python -m halfserve.export.placement.cuda_kernels CUDAExecutionProvider` prints the table of the installed ONNX Runtime; the
registry needs every provider's libraries: for CUDA the driver, CUDA and cuDNN.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import onnx

from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model
from halfserve.export.onnx_files.proto_graphs import typed_graphs

WarningKind: TypeAlias = Literal["on the CPU", "no float16 kernel", "broken up"]

FLOATS = {"h": "float16", "f": "float", "d": "double", "b": "bfloat16"}
OTHER = "n"
DOMAINS = ("", "com.microsoft", "ai.onnx.ml")
_LETTERS: dict[int, str] = {
    onnx.TensorProto.FLOAT16: "h",
    onnx.TensorProto.FLOAT: "f",
    onnx.TensorProto.DOUBLE: "d",
    onnx.TensorProto.BFLOAT16: "b",
}
_FOLDED = frozenset({"Constant"})  # becomes an initializer when the session opens
_OPEN_END = 2**31 - 1
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)|(?P<open>\+)) (?P<types>[a-z]*)")


@dataclass(frozen=True, kw_only=True)
class CudaWarning:
    """A node that CUDA does not compute as it is.

    Attributes:
        node: The node's name, or that of its first output.
        op_type: The node's operator.
        kind: "on the CPU": there is no kernel at all, so its inputs and outputs are copied over the bus. "no float16 kernel":
            there are kernels, but not for its float16; it goes to the CPU as well, in float32 between casts. "broken up": there
            is no kernel, but the operator is defined by smaller ones, which take its place.
        text: The warning as a sentence.
    """

    node: str
    op_type: str
    kind: WarningKind
    text: str


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The kernels of one operator from a first to a last opset of its domain, both included.

    Their types are letters of `FLOATS` for the floating types that they take, and `OTHER` for any other.
    """

    first: int
    last: int
    types: str


Registry: TypeAlias = dict[tuple[str, str], tuple[Kernel, ...]]  # kernels by domain and operator


def predict_cuda(model: ModelSource | ModelFile) -> tuple[CudaWarning, ...]:
    """Warn of nodes that ONNX Runtime's CUDA provider has no kernel for, at the model's opsets and in its types.

    Model-local functions are not looked into: the runtime inlines them.

    Raises:
        ExportError: The model cannot be read.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    opsets = {_domain(entry.domain): entry.version for entry in opened.outline.opset_import}
    functions = {(_domain(function.domain), function.name) for function in opened.outline.functions}
    return tuple(
        warning
        for graph, types in typed_graphs(opened.outline)
        for node in graph.node
        if (_domain(node.domain), node.op_type) not in functions
        and node.op_type not in _FOLDED
        and (warning := _warning(node, types, opsets)) is not None
    )


def _warning(node: onnx.NodeProto, types: Mapping[str, int], opsets: Mapping[str, int]) -> CudaWarning | None:
    domain = _domain(node.domain)
    schema = _schema(node.op_type, domain, opsets.get(domain, 1))
    since = schema.since_version if schema is not None else 1
    release, registry = cuda_kernels()
    kernels = registry.get((domain, node.op_type), ())
    kernel = next((kernel for kernel in kernels if kernel.first <= since <= kernel.last), None)
    floats = {_LETTERS[types[name]] for name in (*node.input, *node.output) if types.get(name) in _LETTERS}
    if kernel is not None and ("h" not in floats or "h" in kernel.types or not set(kernel.types) & set("hfd")):
        return None
    where = f"ONNX Runtime {release} has no {'float16 ' if kernel else ''}CUDA kernel for {node.op_type} of opset {since}"
    if schema is not None and "h" in floats and _is_defined_by_others(schema):
        kind: WarningKind = "broken up"
        text = f"{where}; its definition by smaller operators takes its place"
    elif kernel is None:
        kind = "on the CPU"
        text = f"{where}; it runs on the CPU, and its inputs and outputs are copied there and back"
    else:
        kind = "no float16 kernel"
        text = f"{where}; it runs on the CPU in float32, between casts and copies"
    return CudaWarning(node=node.name or next(iter(node.output), ""), op_type=node.op_type, kind=kind, text=text)


def _is_defined_by_others(schema: Any) -> bool:
    # Any: onnx's stub does not know these attributes.
    return bool(schema.function_opset_versions or schema.context_dependent_function_opset_versions)


def _schema(op_type: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


@cache
def cuda_kernels() -> tuple[str, Registry]:
    """The release of ONNX Runtime that `cuda_kernels.json` describes, and its CUDA kernels."""
    content = json.loads(Path(__file__).with_name("cuda_kernels.json").read_bytes())
    return content["runtime"], parse_table(content["kernels"])


def parse_table(table: Mapping[str, str]) -> Registry:
    """Read a table such as {"Clip": "6-11 f; 12+ hfdn", "com.microsoft:Gelu": "1+ hf"}.

    Raises:
        ValueError: An entry has another form.
    """
    registry: Registry = {}
    for name, text in table.items():
        ranges = [_RANGE.fullmatch(entry.strip()) for entry in text.split(";")]
        if not all(ranges):
            raise ValueError(f"{name} {text!r} is no entry of a kernel table; expected such as '6-11 f; 12+ hfdn'")
        domain, _, op_type = name.rpartition(":")
        registry[domain, op_type] = tuple(
            Kernel(first=int(r["first"]), last=_OPEN_END if r["open"] else int(r["last"]), types=r["types"])
            for r in ranges
            if r is not None
        )
    return registry


def format_table(registry: Registry) -> dict[str, str]:
    """The table that `parse_table` reads, sorted."""
    return {
        f"{domain}{':' if domain else ''}{op_type}": "; ".join(
            f"{k.first}{'+' if k.last == _OPEN_END else f'-{k.last}'} {k.types}" for k in kernels
        )
        for (domain, op_type), kernels in sorted(registry.items())
    }


def registry_of(definitions: list[Any], provider: str) -> Registry:
    """Reduce one provider's kernel definitions, as the runtime lists them, to what a placement depends on.

    A definition has `provider`, `domain`, `op_name`, `version_range` (first and last opset) and `type_constraints` (type names
    by parameter).
    """
    found: dict[tuple[str, str], dict[tuple[int, int], set[str]]] = defaultdict(lambda: defaultdict(set))
    for kernel in definitions:
        if kernel.provider == provider and kernel.domain in DOMAINS:
            letters = _letters([name for names in kernel.type_constraints.values() for name in names])
            found[kernel.domain, kernel.op_name][tuple(kernel.version_range)] |= letters
    return {key: _merged(ranges) for key, ranges in found.items()}


def _letters(names: list[str]) -> set[str]:
    letters = {letter for letter, float_name in FLOATS.items() if any(f"({float_name})" in name for name in names)}
    others = [name for name in names if not any(f"({float_name})" in name for float_name in FLOATS.values())]
    return letters | ({OTHER} if others or not names else set())


def _merged(ranges: dict[tuple[int, int], set[str]]) -> tuple[Kernel, ...]:
    kernels: list[Kernel] = []
    for (first, last), letters in sorted(ranges.items()):
        types = "".join(letter for letter in (*FLOATS, OTHER) if letter in letters)
        if kernels and kernels[-1].types == types and kernels[-1].last + 1 >= first:
            kernels[-1] = Kernel(first=kernels[-1].first, last=max(last, kernels[-1].last), types=types)
        else:
            kernels.append(Kernel(first=first, last=last, types=types))
    return tuple(kernels)


def main(provider: str) -> None:
    """Print the table of the installed runtime."""
    import onnxruntime.capi.onnxruntime_pybind11_state as runtime  # noqa: PLC0415  (only this function needs the runtime)

    kernels = format_table(registry_of(runtime.get_all_opkernel_def(), provider))
    sys.stdout.write(json.dumps({"runtime": version("onnxruntime-gpu"), "kernels": kernels}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
