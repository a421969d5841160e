"""Predict, without a GPU, what ONNX Runtime's CUDA provider makes of a node: compute it, leave it to the CPU, or refuse it.

`cuda_kernels.json` lists the kernels of one release as its registries report them: for each operator the versions, and for each
type variable the letters of its types. It also lists the opsets at which that release defines each of ONNX's operators, as the
installed onnx may be newer. `python -m tests.serve.cuda_emulator.kernel_table` writes the file, without a device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import onnx
import onnx.inliner
from onnx.defs import OpSchema

from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model
from halfserve.export.onnx_files.proto_graphs import typed_graphs

WarningKind: TypeAlias = Literal["on the CPU", "no float16 kernel", "broken up", "refused"]

TABLE = Path(__file__).with_name("cuda_kernels.json")
# Letters of the element types in the table; all others, such as text and complex numbers, are OTHER.
_NAMES = (
    "FLOAT16 FLOAT DOUBLE BFLOAT16 FLOAT8E4M3FN FLOAT8E5M2 FLOAT4E2M1 BOOL "
    "INT4 INT8 INT16 INT32 INT64 UINT4 UINT8 UINT16 UINT32 UINT64"
)
LETTERS = dict(zip(_NAMES.split(), "hfdb854tvcsilVCSIL", strict=True))
OTHER = "n"
_LETTER_OF = {onnx.TensorProto.DataType.Value(name): letter for name, letter in LETTERS.items()}
_FLOATS = frozenset("hfdb")
_HALVES = {"h": "float16 ", "b": "bfloat16 "}
_FOLDED = frozenset({"Constant"})  # becomes an initializer when the session opens
_KERNEL = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)|(?P<open>\+))?(?P<types>(?: \w+=\w+)*)")
# The activations of a recurrent layer in one direction that cuDNN has.
_ACTIVATIONS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_OUTCOMES: dict[WarningKind, str] = {
    "on the CPU": "it runs on the CPU, and its inputs and outputs are copied there and back",
    "no float16 kernel": "it runs on the CPU in float32, between casts and copies",
    "broken up": "its definition by smaller operators takes its place",
    "refused": "it has none for the CPU either, and refuses the model: keep the node in float32",
}


@dataclass(frozen=True, kw_only=True)
class CudaWarning:
    """A node that CUDA does not compute as it is.

    Attributes:
        node: The node's name, or that of its first output.
        op_type: The node's operator.
        kind: "on the CPU": there is no kernel at all, so its inputs and outputs are copied over the bus. "no float16 kernel":
            there are kernels, but not for its float16; it goes to the CPU as well, in float32 between casts. "broken up": there
            is no kernel, but the operator is defined by smaller ones, which take its place. "refused": no provider has a kernel
            for its type, and the runtime adds no casts around bfloat16, so that no session opens.
        text: The warning as a sentence.
    """

    node: str
    op_type: str
    kind: WarningKind
    text: str


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A registered kernel: the operator's versions, and the letters of the types that it takes for each type variable.

    Without a last version, only the first one is known to be supported: ONNX Runtime uses such a kernel for no later version.
    """

    first: int
    last: int | None
    types: tuple[tuple[str, str], ...]

    def matches(self, since: int, bound: Mapping[str, str]) -> bool:
        """Return whether it computes an operator of version `since` with types `bound` to its variables; unbound
        ones are free.
        """
        known = self.first == since or (self.last is not None and self.first <= since <= self.last)
        return known and all(bound.get(variable, letters[0]) in letters for variable, letters in self.types)


Registry: TypeAlias = Mapping[tuple[str, str], tuple[Kernel, ...]]  # kernels by domain and operator


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of one release of ONNX Runtime.

    Attributes:
        release: The release.
        cuda: The CUDA provider's kernels.
        cpu: The CPU provider's kernels.
        versions: The opsets at which the release defines each of ONNX's operators, in ascending order.
    """

    release: str
    cuda: Registry
    cpu: Registry
    versions: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class TypedOperator:
    """An operator at a model's opset, with the element types of its inputs and outputs (0 where one is absent or unknown)."""

    domain: str
    op_type: str
    opset: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def schema(self) -> OpSchema | None:
        return _schema(self.op_type, self.domain, self.opset)

    @property
    def since(self) -> int:
        """The operator's version: the opset at which the runtime defines it as it is."""
        return 1 if self.domain else _since(self.op_type, self.opset)

    @property
    def is_defined_by_others(self) -> bool:
        """Whether ONNX defines it by smaller operators, by which the runtime replaces it where it has no kernel.

        The runtime refuses a definition of an earlier opset in which one of these operators was another.
        """
        schema: Any = self.schema  # onnx's stub does not know these attributes
        if schema is None or schema.context_dependent_function_opset_versions:
            return schema is not None
        written = max((version for version in schema.function_opset_versions if version <= self.opset), default=0)
        if not written:
            return False
        parts = onnx.FunctionProto.FromString(schema.get_function_with_opset_version(written)).node
        return all(_since(part.op_type, written) == _since(part.op_type, self.opset) for part in parts)

    @property
    def floats(self) -> frozenset[str]:
        """The letters of its floating types."""
        return _FLOATS & {_LETTER_OF.get(elem_type, OTHER) for elem_type in (*self.inputs, *self.outputs)}

    def has_kernel(self, registry: Registry) -> bool:
        """Return whether a registry has a kernel for these types.

        The variables of an operator that ONNX does not define are unknown: there each type may belong to any of them.
        """
        found = registry.get((self.domain, self.op_type), ())
        if self.schema is None:
            return any(self.floats <= {letter for _, letters in kernel.types for letter in letters} for kernel in found)
        bound = dict(_bound(self.schema, self.inputs, self.outputs))
        return any(kernel.matches(self.since, bound) for kernel in found)


def takes_on_cuda(op_type: str, opset: int, elem_type: int) -> bool:
    """Return whether a CUDA kernel of ONNX's operator at an opset takes an element type at any of its inputs and outputs."""
    letter, since = _LETTER_OF[elem_type], _since(op_type, opset)
    return any(
        kernel.matches(since, {}) and any(letter in letters for _, letters in kernel.types)
        for kernel in cuda_kernels().cuda.get(("", op_type), ())
    )


def lost_on_cuda(op_types: Iterable[str], before: int, after: int) -> list[str]:
    """Return the operators that the CUDA provider computes in float32 at one opset, and not at the other, in alphabetical
    order.
    """
    single = int(onnx.TensorProto.FLOAT)
    return sorted(n for n in op_types if takes_on_cuda(n, before, single) and not takes_on_cuda(n, after, single))


def predict_cuda(model: ModelSource | ModelFile) -> tuple[CudaWarning, ...]:
    """Warn of nodes that ONNX Runtime's CUDA provider has no kernel for, at the model's opsets and in its types.

    Model-local functions are not looked into: the runtime inlines them.

    Raises:
        ExportError: The model cannot be read.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    return tuple(_warnings(opened.outline))


def _warnings(model: onnx.ModelProto) -> Iterator[CudaWarning]:
    opsets = {_domain(entry.domain): entry.version for entry in model.opset_import}
    functions = {(_domain(function.domain), function.name) for function in model.functions}
    for graph, types in typed_graphs(model):
        for node in graph.node:
            if (_domain(node.domain), node.op_type) not in functions and node.op_type not in _FOLDED:
                yield from _warning(node, types, opsets)


def _warning(node: onnx.NodeProto, types: Mapping[str, int], opsets: Mapping[str, int]) -> Iterator[CudaWarning]:
    domain = _domain(node.domain)
    operation = TypedOperator(
        domain=domain,
        op_type=node.op_type,
        opset=opsets.get(domain, 1),
        inputs=tuple(types.get(name, 0) for name in node.input),
        outputs=tuple(types.get(name, 0) for name in node.output),
    )
    kernels = cuda_kernels()
    form = _form_without_kernel(node)
    if operation.has_kernel(kernels.cuda) and form is None:
        return
    kind = _kind(node, operation)
    others = (domain, node.op_type) in kernels.cuda and form is None
    half = next((_HALVES[letter] for letter in "bh" if letter in operation.floats), "") if others else ""
    lacking = f"no {half}CUDA kernel for {node.op_type} of opset {operation.since}{form or ''}"
    yield CudaWarning(
        node=node.name or next(iter(node.output), ""),
        op_type=node.op_type,
        kind=kind,
        text=f"ONNX Runtime {kernels.release} has {lacking}; {_OUTCOMES[kind]}",
    )


def _kind(node: onnx.NodeProto, operation: TypedOperator) -> WarningKind:
    """Return what the runtime does with a node that CUDA does not compute: the first way that it has."""
    kernels = cuda_kernels()
    if operation.has_kernel(kernels.cpu):
        return "on the CPU"
    if operation.is_defined_by_others:
        return "refused" if _is_refused_in_parts(node, operation) else "broken up"
    reads_float16 = any(_LETTER_OF.get(elem_type) == "h" for elem_type in operation.inputs)
    if reads_float16 and operation.op_type != "Cast":  # the runtime adds casts around float16 inputs alone
        return "no float16 kernel" if (operation.domain, operation.op_type) in kernels.cuda else "on the CPU"
    return "refused" if not operation.domain and operation.op_type in kernels.versions else "on the CPU"


def _is_refused_in_parts(node: onnx.NodeProto, operation: TypedOperator) -> bool:
    """Return whether the operators that define this one include one that no provider computes."""
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    while alone.input and not alone.input[-1]:  # the inliner wants absent inputs at the end left out
        del alone.input[-1]
    graph = onnx.GraphProto(name="alone", node=[alone])
    for values, names, types in ((graph.input, node.input, operation.inputs), (graph.output, node.output, operation.outputs)):
        values.extend(
            onnx.helper.make_tensor_value_info(name, elem_type, None)
            for name, elem_type in zip(names, types, strict=True)
            if name
        )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", operation.opset)])
    try:
        parts = onnx.inliner.inline_selected_functions(model, [("", node.op_type)], inline_schema_functions=True)
    except RuntimeError:  # an input in the middle is absent
        return "b" in operation.floats
    return any(warning.kind == "refused" for warning in _warnings(parts))


def _form_without_kernel(node: onnx.NodeProto) -> str | None:
    """Return the form of an operator that the CUDA provider leaves to the CPU despite a kernel; None if it computes it."""
    if node.domain not in ("", "ai.onnx"):
        return None
    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    forms: Mapping[str, bool] = {}
    match node.op_type:
        case "ArgMax" | "ArgMin":
            forms = {" with select_last_index": bool(given.get("select_last_index"))}
        case "ConvTranspose":
            pads = given.get("pads", ())
            forms = {
                " with other padding at the end than at the beginning": pads[: len(pads) // 2] != pads[len(pads) // 2 :],
                " with auto_pad": given.get("auto_pad", b"").startswith(b"SAME"),
            }
        case "GRU" | "LSTM" | "RNN":
            usual = _ACTIVATIONS[node.op_type]
            activations = [name.decode().lower() for name in given.get("activations", ())]
            forms = {
                " with clip": "clip" in given,
                " with parameters of activations": bool({"activation_alpha", "activation_beta"} & {*given}),
                " with other activations": any(name != usual[at % len(usual)] for at, name in enumerate(activations)),
                " with input_forget": bool(given.get("input_forget")),
                " without linear_before_reset": node.op_type == "GRU" and not given.get("linear_before_reset"),
                " with peepholes": node.op_type == "LSTM" and len(node.input) > 7 and bool(node.input[7]),
            }
        case "Cast":
            forms = {" to text": given.get("to") == onnx.TensorProto.STRING}
    return next((form for form, is_so in forms.items() if is_so), None)


def _bound(schema: OpSchema, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Yield the letters of a node's types by type variable, and by the name of each input and output."""
    for formals, elem_types in (
        (schema.outputs, outputs),
        (schema.inputs, inputs),
    ):  # the first input of a type variable counts
        for formal, elem_type in reversed([*zip(formals, elem_types, strict=False)]):
            if elem_type:
                letter = _LETTER_OF.get(elem_type, OTHER)
                yield formal.name, letter
                yield formal.type_str, letter


def _since(op_type: str, opset: int) -> int:
    versions = cuda_kernels().versions.get(op_type, ())
    return max((version for version in versions if version <= opset), default=1)


@cache
def _schema(op_type: str, domain: str, opset: int) -> OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


@cache
def cuda_kernels() -> Kernels:
    """Return the kernels that `cuda_kernels.json` lists."""
    content = json.loads(TABLE.read_bytes())
    return Kernels(
        release=content["runtime"],
        cuda=parse_table(content["cuda"]),
        cpu=parse_table(content["cpu"]),
        versions={name: tuple(map(int, text.split())) for name, text in content["versions"].items()},
    )


def parse_table(table: Mapping[str, str]) -> Registry:
    """Read a table such as {"Clip": "12 T=hfd; 13+ T=hfdcC", "com.microsoft:Gelu": "1+ T=hf"}.

    Raises:
        ValueError: An entry has another form.
    """
    registry: dict[tuple[str, str], tuple[Kernel, ...]] = {}
    for name, text in table.items():
        entries = [_KERNEL.fullmatch(entry.strip()) for entry in text.split(";")]
        if not all(entries):
            raise ValueError(f"{name} {text!r} is no entry of a kernel table; expected such as '6-11 T=f; 12+ T=hfd'")
        domain, _, op_type = name.rpartition(":")
        registry[domain, op_type] = tuple(
            Kernel(
                first=int(entry["first"]),
                last=None if entry["open"] else int(entry["last"] or entry["first"]),
                types=tuple((pair.partition("=")[0], pair.partition("=")[2]) for pair in entry["types"].split()),
            )
            for entry in entries
            if entry is not None
        )
    return registry
