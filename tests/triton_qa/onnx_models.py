"""ONNX models in place of those that the QA's generators write: sums and differences, identities, reshapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from tests.triton_qa.suite import Builder

Shapes = Sequence[Sequence[int]]
TYPES = {
    "int8": TensorProto.INT8,
    "int16": TensorProto.INT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
    "float16": TensorProto.FLOAT16,
    "float32": TensorProto.FLOAT,
    "bool": TensorProto.BOOL,
    "object": TensorProto.STRING,
}
CONFIG_TYPES = {"object": "TYPE_STRING", "float16": "TYPE_FP16", "float32": "TYPE_FP32"}
CAST_TO_ADD = {"int8", "int16", "object"}
OPSET, IR_VERSION = 13, 8
LABELS = 32  # as many as the largest output of the suites has elements
LABEL_FILE = "output0_labels.txt"
LABELLED = f'label_filename: "{LABEL_FILE}"'


def config_type(name: str) -> str:
    """Return a type's name in a configuration."""
    return CONFIG_TYPES.get(name, f"TYPE_{name.upper()}")


def tensors(kind: str, values: Sequence[tuple[str, str, Sequence[int]]], *, first_extra: str = "") -> str:
    """Return the part "input" or "output" of a configuration, for triples of name, type and dims."""
    entries = [
        f'{{ name: "{name}" data_type: {config_type(dtype)} dims: {list(dims)} {"" if index else first_extra} }}'
        for index, (name, dtype, dims) in enumerate(values)
    ]
    return f"{kind} [ {', '.join(entries)} ]\n"


def heading(name: str, platform: str, batch: int, policy: str = "") -> str:
    """Return the first lines of a configuration."""
    text = f'name: "{name}"\nplatform: "{platform}"\nmax_batch_size: {batch}\n'
    return text + (f"version_policy: {{ {policy} }}\n" if policy else "")


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    """Return a step of an ensemble; the pairs are the model's tensors and the ensemble's."""
    maps = [f'input_map {{ key: "{key}" value: "{tensor}" }}' for key, tensor in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{tensor}" }}' for key, tensor in outputs.items()]
    return f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def save(graph: onnx.GraphProto, folder: Path) -> None:
    """Write a graph as a version's model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.save(model, folder / "model.onnx")


def value(name: str, dtype: str, dims: Sequence[int], *, batch: int) -> onnx.ValueInfoProto:
    """Return a graph's input or output; each variable dimension has a name of its own."""
    shape = [f"{name}_{index}" if dim < 0 else dim for index, dim in enumerate(dims)]
    return helper.make_tensor_value_info(name, TYPES[dtype], ["batch", *shape] if batch else shape)


def model_name(types: Sequence[str], *, batch: int, prefix: str = "onnx") -> str:
    """Return the name that the QA gives a model of its families."""
    return "_".join([prefix if batch else f"{prefix}_nobatch", *types])


def add_sub(
    *types: str,
    name: str = "",
    prefix: str = "onnx",
    batch: int = 8,
    dims: Sequence[int] = (16,),
    versions: Sequence[int] = (1,),
    policy: str = "",
    extra: str = "",
    output: str = "OUTPUT",
    swaps: bool = True,
) -> Builder:
    """Builder of a model whose OUTPUT0 is INPUT0 + INPUT1 and whose OUTPUT1 is INPUT0 - INPUT1.

    Args:
        types: data types of the inputs, of OUTPUT0 and of OUTPUT1.
        name: the model's name; the QA's own without one.
        prefix: the start of that name.
        batch: the largest batch; 0 without batches.
        dims: shape of each tensor, without the batch.
        versions: versions to write.
        policy: text of the version policy.
        extra: text of the configuration besides.
        output: the start of the outputs' names.
        swaps: whether versions above 1 have both outputs swapped.
    """
    took, *gave = types

    def build(_qa: Path, repository: Path) -> None:
        folder = repository / (name or model_name(types, batch=batch, prefix=prefix))
        for version in versions:
            _save_add_sub(folder / str(version), took, gave, batch, dims, output=output, is_swapped=swaps and version > 1)
        outputs = [(f"{output}{index}", dtype, dims) for index, dtype in enumerate(gave)]
        config = heading(folder.name, "onnxruntime_onnx", batch, policy)
        config += tensors("input", [("INPUT0", took, dims), ("INPUT1", took, dims)])
        config += tensors("output", outputs, first_extra=LABELLED)
        config += "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
        (folder / "config.pbtxt").write_text(config + extra)
        (folder / LABEL_FILE).write_text("".join(f"label{index}\n" for index in range(LABELS)))

    return build


def _save_add_sub(
    folder: Path, took: str, gave: Sequence[str], batch: int, dims: Sequence[int], *, output: str, is_swapped: bool
) -> None:
    works_in = "int32" if took in CAST_TO_ADD else took
    nodes = [helper.make_node("Cast", [f"INPUT{index}"], [f"cast{index}"], to=TYPES[works_in]) for index in (0, 1)]
    for index, dtype in enumerate(gave):
        operator = "Add" if (index == 0) != is_swapped else "Sub"
        nodes.append(helper.make_node(operator, ["cast0", "cast1"], [f"result{index}"]))
        nodes.append(helper.make_node("Cast", [f"result{index}"], [f"{output}{index}"], to=TYPES[dtype]))
    inputs = [value(f"INPUT{index}", took, dims, batch=batch) for index in (0, 1)]
    outputs = [value(f"{output}{index}", dtype, dims, batch=batch) for index, dtype in enumerate(gave)]
    save(helper.make_graph(nodes, "add_sub", inputs, outputs), folder)


def identity(
    count: int, dtype: str, *, name: str = "", batch: int = 8, dims: Sequence[int] = (-1,), extra: str = ""
) -> Builder:
    """Builder of a model with `count` inputs whose outputs are its inputs."""

    def build(_qa: Path, repository: Path) -> None:
        folder = repository / (name or model_name(("zero", str(count), dtype), batch=batch))
        nodes = [helper.make_node("Identity", [f"INPUT{index}"], [f"OUTPUT{index}"]) for index in range(count)]
        inputs = [value(f"INPUT{index}", dtype, dims, batch=batch) for index in range(count)]
        outputs = [value(f"OUTPUT{index}", dtype, dims, batch=batch) for index in range(count)]
        save(helper.make_graph(nodes, "identity", inputs, outputs), folder / "1")
        config = heading(folder.name, "onnxruntime_onnx", batch)
        config += tensors("input", [(f"INPUT{index}", dtype, dims) for index in range(count)])
        config += tensors("output", [(f"OUTPUT{index}", dtype, dims) for index in range(count)])
        (folder / "config.pbtxt").write_text(config + extra)

    return build


def nop(dtype: str, *, batch: int, dims: Sequence[int]) -> Builder:
    """Builder of the model that passes a pair of tensors on, as a step of ensembles."""
    return identity(2, dtype, name=_nop_name(dtype, batch, dims), batch=batch, dims=dims)


def _nop_name(dtype: str, batch: int, dims: Sequence[int]) -> str:
    return f"nop_{dtype}_{batch}_{'_'.join(map(str, dims)).replace('-', 'm')}"


def add_sub_ensembles(
    *types: str,
    batch: int = 8,
    dims: Sequence[int] = (16,),
    versions: Sequence[int] = (1,),
    policy: str = "",
    prefix: str = "onnx",
    kinds: Sequence[str] = ("simple", "sequence", "fan"),
) -> Builder:
    """Builder of the QA's ensembles around a model of `add_sub`.

    "simple" has the model as its one step; "sequence" passes the inputs on first; "fan" passes inputs and outputs on. The last
    two take no text.
    """
    took, *gave = types

    def build(_qa: Path, repository: Path) -> None:
        for kind in kinds:
            if "object" in ((took,) if kind == "sequence" else types if kind == "fan" else ()):
                continue
            folder = repository / f"{kind}_{model_name(types, batch=batch, prefix=prefix)}"
            for version in versions:
                (folder / str(version)).mkdir(parents=True)
            own_inputs = ("INPUT0", "INPUT1") if kind == "simple" else ("in0", "in1")
            own_outputs = ("out0", "out1") if kind == "fan" else ("OUTPUT0", "OUTPUT1")
            steps = []
            if kind != "simple":
                steps.append(_step(_nop_name(took, batch, dims), ("INPUT0", "INPUT1"), own_inputs))
            steps.append(_step(model_name(types, batch=batch, prefix=prefix), own_inputs, own_outputs))
            if kind == "fan":
                for index, dtype in enumerate(gave):
                    steps.append(_step(_nop_name(dtype, batch, dims), (own_outputs[index],) * 2, (f"OUTPUT{index}",)))
            config = heading(folder.name, "ensemble", batch, policy)
            config += tensors("input", [("INPUT0", took, dims), ("INPUT1", took, dims)])
            outputs = [(f"OUTPUT{index}", dtype, dims) for index, dtype in enumerate(gave)]
            config += tensors("output", outputs, first_extra=LABELLED if kind == "fan" else "")  # the others have their model's
            (folder / "config.pbtxt").write_text(f"{config}ensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n")
            (folder / LABEL_FILE).write_text("".join(f"label{index}\n" for index in range(LABELS)))

    return build


def _step(model: str, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    taken = {f"INPUT{index}": name for index, name in enumerate(inputs)}
    return step(model, taken, {f"OUTPUT{index}": name for index, name in enumerate(outputs)})


def scalar(dims: Sequence[int]) -> Builder:
    """Builder of an identity whose file leaves the rank open, with a configuration that has only dims."""

    def build(_qa: Path, repository: Path) -> None:
        folder = repository / f"onnx_scalar_{len(dims)}dim"
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("INPUT", "OUTPUT")]
        save(
            helper.make_graph([helper.make_node("Identity", ["INPUT"], ["OUTPUT"])], "scalar", ends[:1], ends[1:]), folder / "1"
        )
        text = tensors("input", [("INPUT", "float32", dims)]) + tensors("output", [("OUTPUT", "float32", dims)])
        (folder / "config.pbtxt").write_text(text)

    return build


def reshaping(
    dtype: str,
    given: Shapes,
    inner: Shapes,
    *,
    outputs: Shapes | None = None,
    prefix: str = "onnx",
    batch: int = 8,
    name: str = "",
) -> Builder:
    """Builder of an identity whose inputs are reshaped on their way to it.

    Args:
        dtype: data type of all tensors.
        given: shapes of the inputs as clients send them, without the batch.
        inner: shapes of the file's inputs and outputs.
        outputs: shapes of the outputs as clients get them; those of the inputs without them.
        prefix: the start of the name that the QA gives the model.
        batch: the largest batch; 0 without batches.
        name: the model's name; the QA's own without one.
    """

    def build(_qa: Path, repository: Path) -> None:
        folder = repository / (name or model_name(("zero", str(len(given)), dtype), batch=batch, prefix=prefix))
        nodes = [helper.make_node("Identity", [f"INPUT{index}"], [f"OUTPUT{index}"]) for index in range(len(inner))]
        inputs, results = (
            [value(f"{kind}{index}", dtype, shape, batch=batch) for index, shape in enumerate(inner)]
            for kind in ("INPUT", "OUTPUT")
        )
        save(helper.make_graph(nodes, "reshape", inputs, results), folder / "1")
        _write_config(folder, "onnxruntime_onnx", batch, dtype, given, outputs or given, inner)

    return build


def reshape_ensembles(given: Shapes, inner: Shapes, *, outputs: Shapes | None = None, batch: int = 8) -> Builder:
    """Builder of the QA's ensembles of float32 that reshape, with their steps.

    "simple" has a step of the inner shape; "sequence" flattens the tensor in one step and restores it in the next; "fan" has a
    step of any size in between.
    """
    dtype = "float32"

    def build(qa: Path, repository: Path) -> None:
        for kind in ("simple", "sequence", "fan"):
            folder = repository / model_name(("zero", str(len(given)), dtype), batch=batch, prefix=f"{kind}_reshape")
            (folder / "1").mkdir(parents=True)
            steps = []
            for index, shape in enumerate(inner):
                chain = _steps(kind, shape, batch)
                names = [f"INPUT{index}", *(f"between{index}_{number}" for number in range(1, len(chain))), f"OUTPUT{index}"]
                for (name, *shapes), source, target in zip(chain, names, names[1:], strict=False):
                    if not (repository / name).exists():
                        taken, held, left = shapes
                        reshaping(dtype, [taken], [held], outputs=[left], batch=batch, name=name)(qa, repository)
                    steps.append(_step(name, (source,), (target,)))
            _write_config(folder, "ensemble", batch, dtype, given, outputs or given, inner)
            with (folder / "config.pbtxt").open("a") as config:
                config.write(f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n")

    return build


def _steps(kind: str, shape: Sequence[int], batch: int) -> list[tuple[str, Sequence[int], Sequence[int], Sequence[int]]]:
    """Return the steps of one tensor: name, shape that is taken, shape within, and shape that is given on."""
    end = f"{batch}_{'_'.join(map(str, shape))}"
    if kind == "simple":
        return [(f"nop_{end}", shape, shape, shape)]
    flat = [math.prod(shape)]
    between = [(f"nop_{batch}_any", [-1], [-1], [-1])] if kind == "fan" else []
    return [(f"nop_tunnel_in_{end}", shape, flat, flat), *between, (f"nop_tunnel_out_{end}", flat, shape, shape)]


def _write_config(folder: Path, platform: str, batch: int, dtype: str, inputs: Shapes, outputs: Shapes, inner: Shapes) -> None:
    text = heading(folder.name, platform, batch)
    for kind, shapes in (("input", inputs), ("output", outputs)):
        entries = [
            f'{{ name: "{kind.upper()}{index}" data_type: {config_type(dtype)} dims: {list(shape)} '
            + (f"reshape {{ shape: {list(held)} }} }}" if list(held) != list(shape) else "}")
            for index, (shape, held) in enumerate(zip(shapes, inner, strict=True))
        ]
        text += f"{kind} [ {', '.join(entries)} ]\n"
    (folder / "config.pbtxt").write_text(text)
