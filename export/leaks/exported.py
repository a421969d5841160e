"""Whether the captured graph has the dtypes that eager mode has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from export.leaks.log import Log
from export.leaks.operation import HALF, WIDE, short
from export.leaks.places import Place, Whereabouts
from export.leaks.provenance import first_line
from export.to_onnx.silence import silenced

LONGEST = 160  # characters of another program's message
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def compare_with_export(
    half: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    result: object,
    eager: Mapping[Place, set[torch.dtype]],
    whereabouts: Whereabouts,
    log: Log,
) -> None:
    """Capture a float16 model and log where its dtypes differ from those of the eager run.

    Args:
        half: The float16 model.
        given: Its positional and named inputs.
        result: What it returned.
        eager: The dtypes other than float16 that each line made, by itself or in what it called: the graph names lines of
            `forward` alone.
        whereabouts: Finds the user's lines.
        log: Where findings go.
    """
    try:
        with silenced(), torch.no_grad():
            program = torch.export.export(_TensorsAlone(half), *given, strict=False)
    except Exception as error:  # noqa: BLE001  (capturing runs the user's code, which may raise anything)
        text = f"torch.export cannot capture the float16 model: {type(error).__name__}: {first_line(error)[:LONGEST]}"
        log.add("export", "note", None, "", text, "torch.export")
        return
    for node in program.graph.nodes:
        dtype = _dtype(node)
        if node.op == "call_function" and dtype in WIDE and not any(_dtype(source) in WIDE for source in node.all_input_nodes):
            place = _place(node, whereabouts)
            if place is not None and dtype not in eager.get(place, set()):
                _tell_line(node, dtype, place, log)
                break  # what follows from it differs too
    _compare_outputs(program, result, log)


def _dtype(node: torch.fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _tell_line(node: torch.fx.Node, dtype: torch.dtype, place: Place, log: Log) -> None:
    text = f"the exported graph computes {node.name} in {short(dtype)}, which eager mode does not do on this line"
    log.add("export_dtype", "warning", place, _module(node), text, "dtype=x.dtype")


def _compare_outputs(program: torch.export.ExportedProgram, result: object, log: Log) -> None:
    eager = [leaf.dtype for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    node = next(node for node in program.graph.nodes if node.op == "output")
    names = set(program.graph_signature.user_outputs)
    values = [arg.meta.get("val") for arg in node.args[0] if isinstance(arg, torch.fx.Node) and arg.name in names]
    graph = [value.dtype for value in values if isinstance(value, Tensor)]
    if len(eager) != len(graph):
        return
    for index, (ours, theirs) in enumerate(zip(eager, graph, strict=True)):
        if ours != theirs and HALF in (ours, theirs):
            text = f"output {index} is {short(ours)} in eager mode and {short(theirs)} in the exported graph"
            log.add("export_dtype", "error", None, f"output {index}", text, "dtype=x.dtype")


def _place(node: torch.fx.Node, whereabouts: Whereabouts) -> Place | None:
    frames = FRAME.findall(str(node.meta.get("stack_trace", "")))
    return whereabouts.from_texts((path, int(line)) for path, line in frames)


def _module(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return paths[-1].removeprefix("model").removeprefix(".") if paths else ""


class _TensorsAlone(nn.Module):
    """A model without the outputs that torch.export has no name for, such as a cache of keys and values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self.model(*args, **kwargs)) if isinstance(leaf, Tensor)]
