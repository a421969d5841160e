"""Finds the lines at which a model falls out of float16."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils import _pytree as pytree

from amp_core.calling import without_fast_path
from export.errors import ExportError
from export.leaks.attributes import detached_copy
from export.leaks.exported import compare_with_export
from export.leaks.finding import LeakReport
from export.leaks.half_copy import declare_what_stays, half_copy, halved, widened
from export.leaks.log import Log
from export.leaks.operation import WIDE
from export.leaks.places import Place, Whereabouts, run_watched
from export.leaks.provenance import described, first_line
from export.leaks.unexecuted import tell_unexecuted
from export.leaks.watch import Run, own_compilations, without_autocast
from export.leaks.watchers import HalfWatcher, ReferenceWatcher
from export.scripted import require_python


def find_dtype_leaks(module: nn.Module, *inputs: Any, **kwargs: Any) -> LeakReport:
    """Find where a float32 model would leave float16, get numbers that float16 cannot hold, or crash.

    The model is run twice on copies, in float32 and as `to_half` converts it, and captured with `torch.export`; every
    operation of the float16 run is watched. An operation that fails on mixed dtypes is logged and repeated as its mended form
    would run, so one call finds everything on the path that these inputs take. Lines that they do not reach are read, and give
    notes.

    Args:
        module: A module whose floating tensors are float32; it is not changed.
        *inputs: Example inputs, as `module(*inputs)` takes them; their values matter for overflow.
        **kwargs: Named inputs.

    Returns:
        What was found, by line.

    Raises:
        ExportError: The model fails in float32 on these inputs, cannot be copied, or holds NaN.
    """
    module = _unwrapped(module)
    whereabouts = Whereabouts.of(module)
    log = Log()
    with warnings.catch_warnings(), without_autocast(), without_fast_path(), own_compilations():
        warnings.simplefilter("ignore")  # ours are the findings
        reference = ReferenceWatcher()
        expected = _run_reference(module, Run(reference, whereabouts), inputs, kwargs)
        half = half_copy(module, log)
        watcher = HalfWatcher(log, reference.overflow.expected, whereabouts)
        run = Run(watcher, whereabouts)
        given = cast("tuple[tuple[Any, ...], dict[str, Any]]", halved((inputs, kwargs)))
        declare_what_stays(half, watcher.provenance)
        try:
            with run.watching(half):
                result = run_watched(half, *given)
        except Exception as error:  # noqa: BLE001  (the user's model may raise anything)
            _tell_crash(log, run, error)
        else:
            _tell_outputs(watcher, expected, result)
            if not watcher.recovered:  # a graph of a model that fails says nothing more
                compare_with_export(half, given, result, watcher.dtypes, whereabouts, log)
    for birth in watcher.provenance.births.values():
        birth.tell(log)
    tell_unexecuted(whereabouts, log)
    return LeakReport(model=type(module).__name__, findings=log.sorted())


def _unwrapped(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ExportError(f"expected a torch.nn.Module to check, got a {type(module).__name__}")
    require_python(module)
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        raise ExportError("the model's weights are on the meta device, which holds no numbers; load the model with its weights")
    return module._orig_mod if isinstance(module, OptimizedModule) else module  # noqa: SLF001  (what torch.compile wraps; torch has no public way)


def _run_reference(module: nn.Module, run: Run, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    args, named = cast("tuple[tuple[Any, ...], dict[str, Any]]", widened((inputs, kwargs)))
    try:
        twin = detached_copy(module).eval().float()
    except Exception as error:  # the user's __deepcopy__ may raise anything
        raise ExportError(f"the model cannot be copied: {_one_line(error)}") from error
    try:
        with run.watching(twin):
            return run_watched(twin, args, named)
    except Exception as error:
        given = ", ".join(described(leaf) for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, Tensor))
        raise ExportError(f"the model fails in float32 on inputs {given or 'none'}: {_one_line(error)}") from error


def _tell_crash(log: Log, run: Run, error: Exception) -> None:
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    place: Place | None = run.whereabouts.from_texts(iter(frames))
    text = f"the float16 model fails where the float32 one does not: {_one_line(error)}"
    log.add("crash", "error", place, run.paths.failed or "", text, "dtype=x.dtype")


def _tell_outputs(watcher: HalfWatcher, expected: object, result: object) -> None:
    references = _labelled(expected)
    for label, output in _labelled(result).items():
        reference = references.get(label)
        if output.dtype in WIDE and (reference is None or reference.dtype in (torch.float32, torch.float16)):
            watcher.provenance.returned(output, label)


def _labelled(outputs: object) -> dict[str, Tensor]:
    try:
        leaves = pytree.tree_flatten_with_path(outputs)[0]
    except ValueError:  # a container that its library registered without names for its members, as diffusers does
        leaves = [((pytree.SequenceKey(index),), leaf) for index, leaf in enumerate(pytree.tree_leaves(outputs))]
    tensors = [(pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    return {f"output {path}" if path else "the output": leaf for path, leaf in tensors}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
