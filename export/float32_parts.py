"""What is to stay float32 in an exported graph because the user says so, or because training showed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import onnx_ir
from torch import nn

from amp_core.policy import Policy
from amp_core.recorder import Record
from export.errors import ExportError
from export.halving.pinned import pinned_modules
from export.halving.recorded import overflowing_modules

MODULE, KEEP = "halfserve.module", "halfserve.keep"


def float32_parts(
    module: nn.Module, *, keep_fp32: Sequence[str] = (), policy: Policy | None = None, record: Record | None = None
) -> dict[str, str]:
    """The submodules and tensors that stay float32.

    Args:
        module: The torch module.
        keep_fp32: Names of tensors or submodules, as shell patterns: `"encoder.norm*"`, `"head.bias"`.
        policy: The autocast policy of the training run: what it added to float32 stays so.
        record: The record of the training run: what gave out more than float16 holds stays float32.

    Returns:
        Dotted name -> the reason, in a few words. What is inside of a submodule belongs to it.

    Raises:
        ExportError: A pattern matches nothing, or the record is of another model.
    """
    parts = pinned_modules(module, policy) | overflowing_modules(module, record)[0]
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers(), *module.named_modules()) if name]
    for pattern in keep_fp32:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ExportError(f"keep_fp32 {pattern!r} matches no parameter, buffer or submodule; names look like {names[:3]}")
        parts |= dict.fromkeys(matching, f"keep_fp32 {pattern!r}")
    return parts


def mark_float32(model: onnx_ir.Model, parts: Mapping[str, str]) -> None:
    """Mark the nodes that these submodules became, and those that read these tensors, for the converter.

    Raises:
        ExportError: Nothing in the graph comes from a part: it was folded into its neighbours, or does not run.
    """
    found: set[str] = set()
    for node in model.graph.all_nodes():
        for name in _names(node):
            part = next((part for part in _itself_and_parents(name) if part in parts), None)
            if part is not None:
                found.add(part)
                node.metadata_props[KEEP] = parts[part]
    lost = next((part for part in parts if part not in found and parts[part].startswith("keep_fp32")), None)
    if lost is not None:
        raise ExportError(f"{lost!r} is to stay float32, and nothing in the graph comes from it; name the module around it")


def _names(node: onnx_ir.Node) -> Iterator[str]:
    module = node.metadata_props.get(MODULE)
    if module is not None:
        yield module
    for value in node.inputs:
        if value is not None and value.is_initializer() and value.name is not None:
            yield value.name


def _itself_and_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
