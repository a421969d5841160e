"""What a training run's record says about float16: the modules in which numbers went over its range."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from amp_core.recorder import Entry, Record
from export.errors import ExportError
from export.weight_ledger import FP16_MAX

ROOT, OUTSIDE = ".", ""

# Infinities in the results of other operations are masks more often than overflow.
_COMPUTES = ("mm", "conv", "linear", "norm", "sum", "mean", "pow", "square", "exp", "matmul", "einsum")


def overflowing_modules(module: nn.Module, record: Record | None) -> tuple[dict[str, str], list[str]]:
    """The submodules that the record shows over float16's range in forward.

    A module without submodules (a Linear) hands its large numbers on, so the module around it must hold them too.

    Returns:
        Dotted module name -> the reason with the number; and warnings about what concerns the outermost module itself.

    Raises:
        ExportError: The record is of another model: none of its modules is here.
    """
    if record is None:
        return {}, []
    names = {name for name, _ in module.named_modules(remove_duplicate=False)}
    paths = {entry.module for entry in record.entries} - {ROOT, OUTSIDE}
    if paths and not paths & names:
        raise ExportError(f"the record is of another model: it names {min(paths)!r}, which this model does not have")
    found: dict[str, str] = {}
    warnings: list[str] = []
    for entry in _overflowing(record.entries):
        path = "" if entry.module == ROOT else entry.module
        around = path.rpartition(".")[0]
        if path and path in names:
            leaf = next(module.get_submodule(path).children(), None) is None
            found.setdefault(around if leaf and around else path, _reason(entry))
        if path in names and not around and (not path or next(module.get_submodule(path).children(), None) is None):
            warnings.append(f"{_reason(entry)} in {path or 'the outermost module itself'}: float16 follows it; rescale there")
    return found, list(dict.fromkeys(warnings))


def _overflowing(entries: Iterable[Entry]) -> Iterable[Entry]:
    for entry in entries:
        lost = entry.magnitudes.overflow or (entry.magnitudes.largest or 0) > FP16_MAX
        infinite = entry.magnitudes.non_finite and any(part in entry.op for part in _COMPUTES)
        if entry.direction == "forward" and entry.module != OUTSIDE and (lost or infinite):
            yield entry


def _reason(entry: Entry) -> str:
    op = entry.op.removeprefix("aten.").removesuffix(".default")
    largest = entry.magnitudes.largest
    reached = f"{largest:.3g}" if largest is not None and largest > FP16_MAX else "infinity"
    return f"{op} reached {reached} in training (largest float16 is 65504)"
