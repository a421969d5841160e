"""ONNX models with sequence batching in place of those that the QA's generators write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx import NodeProto, TensorProto, helper

from tests.triton_qa.onnx_models import TYPES, config_type, heading, identity, save, step, tensors, value
from tests.triton_qa.suite import Builder

CONTROLS = ("START", "READY")
IDLE = "max_sequence_idle_microseconds: 5000000"


def plain_sequence(
    dtype: str,
    *,
    batch: int = 8,
    dims: Sequence[int] = (1,),
    scheduling: str = "",
    count: int = 1,
    suffix: str = "",
    name: str = "",
) -> Builder:
    """Builder of a model without state: OUTPUT is READY * (INPUT + START), as the QA's tests expect it.

    Args:
        dtype: data type of INPUT and OUTPUT; "bool" makes the controls bool, and the tensors int32.
        batch: the largest batch; 0 without batches.
        dims: the shape of INPUT.
        scheduling: text of the sequence batching besides, such as "direct {}".
        count: instances.
        suffix: the end of the model's name.
        name: the model's name; the QA's own without one.
    """
    return _sequence(dtype, batch, dims, scheduling, count, suffix, has_state=False, initial="", name=name)


def summing_sequence(
    dtype: str,
    *,
    batch: int = 8,
    dims: Sequence[int] = (1,),
    scheduling: str = "",
    count: int = 1,
    suffix: str = "",
    initial: str = "",
) -> Builder:
    """Builder of a model with implicit state: OUTPUT is the sum of the sequence's INPUTs; `initial` is a setting of it."""
    return _sequence(dtype, batch, dims, scheduling, count, suffix, has_state=True, initial=initial)


def _sequence(
    dtype: str,
    batch: int,
    dims: Sequence[int],
    scheduling: str,
    count: int,
    suffix: str,
    *,
    has_state: bool,
    initial: str,
    name: str = "",
) -> Builder:
    tensor = "int32" if dtype == "bool" else dtype
    control = {"bool": "bool", "float32": "float32"}.get(dtype, "int32")
    state = _state(tensor, dims, initial) if has_state else ""

    def build(_qa: Path, repository: Path) -> None:
        folder = repository / (name or f"{'onnx' if batch else 'onnx_nobatch'}_sequence_{dtype}{suffix}")
        names = ("INPUT", "INPUT_STATE") if has_state else ("INPUT",)
        inputs = [value(name, tensor, dims, batch=batch) for name in names]
        inputs += [value(name, control, (1,), batch=batch) for name in CONTROLS]
        outputs = [value(name.replace("INPUT", "OUTPUT"), tensor, dims, batch=batch) for name in names]
        if tensor == "object":  # its answer is INPUT, as the QA's tests expect it
            nodes = [helper.make_node("Identity", [name], [name.replace("INPUT", "OUTPUT")]) for name in names]
        else:
            nodes = _nodes(TYPES[tensor], has_state=has_state)
        save(helper.make_graph(nodes, "sequence", inputs, outputs), folder / "1")
        (folder / "config.pbtxt").write_text(
            heading(folder.name, "onnxruntime_onnx", batch)
            + tensors("input", [("INPUT", tensor, dims)])
            + tensors("output", [("OUTPUT", tensor, dims)])
            + f"instance_group [ {{ kind: KIND_CPU count: {count} }} ]\n"
            + f"sequence_batching {{ {IDLE} {scheduling} {_controls(control)} {state} }}\n"
        )

    return build


def _nodes(dtype: int, *, has_state: bool) -> list[NodeProto]:
    """Nodes that compute OUTPUT, and OUTPUT_STATE, in int32."""

    def node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
        return helper.make_node(operator, inputs, [output], **attributes)

    nodes = [node("Cast", [name], f"{name}_int", to=TensorProto.INT32) for name in ("INPUT", *CONTROLS)]
    if has_state:
        nodes += [
            node("Cast", ["INPUT_STATE"], "state", to=TensorProto.INT32),
            node("Constant", [], "one", value=helper.make_tensor("one", TensorProto.INT32, [1], [1])),
            node("Sub", ["one", "START_int"], "goes_on"),
            node("Mul", ["goes_on", "READY_int"], "uses_state"),
            node("Mul", ["uses_state", "state"], "before"),
            node("Add", ["before", "INPUT_int"], "result"),
            node("Cast", ["result"], "OUTPUT_STATE", to=dtype),
        ]
    else:
        nodes += [node("Add", ["INPUT_int", "START_int"], "sum"), node("Mul", ["READY_int", "sum"], "result")]
    return [*nodes, node("Cast", ["result"], "OUTPUT", to=dtype)]


def _controls(dtype: str) -> str:
    word = {"bool": "bool", "float32": "fp32"}.get(dtype, "int32")
    entries = (
        f'{{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{name} {word}_false_true: [ 0, 1 ] }} ] }}' for name in CONTROLS
    )
    return f"control_input [ {', '.join(entries)} ]"


def _state(dtype: str, dims: Sequence[int], initial: str) -> str:
    names = 'input_name: "INPUT_STATE" output_name: "OUTPUT_STATE"'
    return f"state [ {{ {names} data_type: {config_type(dtype)} dims: {list(dims)} {initial} }} ]"


def sequence_ensembles(dtype: str, *, batch: int, dims: Sequence[int] = (1,)) -> Builder:
    """Builder of the QA's ensembles around a model of `plain_sequence`, with the step that passes INPUT on."""
    prefix = "onnx" if batch else "onnx_nobatch"
    inner, passing = f"{prefix}_sequence_{dtype}", f"nop_{prefix}_sequence_{dtype}"

    def build(qa: Path, repository: Path) -> None:
        identity(1, dtype, name=passing, batch=batch, dims=dims)(qa, repository)
        for kind in ("simple", "sequence", "fan"):
            folder = repository / f"{kind}_{inner}"
            (folder / "1").mkdir(parents=True)
            first, last = ("INPUT" if kind == "simple" else "passed"), ("before_end" if kind == "fan" else "OUTPUT")
            steps = [step(inner, {"INPUT": first}, {"OUTPUT": last})]
            if kind != "simple":
                steps.insert(0, step(passing, {"INPUT0": "INPUT"}, {"OUTPUT0": first}))
            if kind == "fan":
                steps.append(step(passing, {"INPUT0": last}, {"OUTPUT0": "OUTPUT"}))
            (folder / "config.pbtxt").write_text(
                heading(folder.name, "ensemble", batch)
                + tensors("input", [("INPUT", dtype, dims)])
                + tensors("output", [("OUTPUT", dtype, dims)])
                + f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n"
            )

    return build
