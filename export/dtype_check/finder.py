"""The dtype check: finds the lines at which a model leaves float16 or bfloat16."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils import _pytree as pytree

from halfserve.amp_core.calling import without_fast_path
from halfserve.export.dtype_check.constants import check_unexecuted
from halfserve.export.dtype_check.findings import FindingLog, LeakReport
from halfserve.export.dtype_check.source_lines import SourceLine, SourceLocator, assigned_at, run_watched
from halfserve.export.dtype_check.watched_run import (
    WatchedRun,
    own_compilations,
    results_of,
    short,
    wide_beside,
    without_autocast,
)
from halfserve.export.dtype_check.watchers import HalfWatcher, ReferenceWatcher
from halfserve.export.dtype_check.wide_tensors import WideTensorTracker, described, first_line
from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.half_report import TensorDecision
from halfserve.export.half_module.module_tensors import HeldTensor, detached_copy, held_tensors, torch_dtype
from halfserve.export.half_module.to_half import to_half
from halfserve.export.half_types import FP16, HalfName, HalfType, half_named
from halfserve.export.to_onnx.capture import silenced
from halfserve.export.to_onnx.forward_call import as_tensors, require_python

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

LONGEST = 160  # characters of another program's message
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def find_dtype_leaks(module: nn.Module, *inputs: Any, dtype: HalfName = "float16", **kwargs: Any) -> LeakReport:
    """Find where a float32 model would leave half precision, get numbers that the half type cannot hold, or crash.

    Copies of the model run in float32 and as `to_half` converts it, and the half copy is captured with `torch.export`; every
    operation of the half-precision run is checked. An operation that fails on mixed dtypes is logged and repeated in the form
    that its fix would give, so one call finds everything on the path that these inputs take. Lines that they do not reach are
    read, and give notes.

    Args:
        module: A module whose floating tensors are float32; it is not changed.
        *inputs: Example inputs, tensors or numpy arrays, as `module(*inputs)` takes them; their values matter for overflow.
        dtype: The type to check, "float16" or "bfloat16".
        **kwargs: Named inputs.

    Returns:
        The findings, by line.

    Raises:
        ExportError: The model fails in float32 on these inputs, cannot be copied, or holds NaN.
        UsageError: `dtype` is another type.
    """
    half = half_named(dtype)
    inputs, kwargs = as_tensors((inputs, kwargs))
    module = _unwrapped(module)
    locator = SourceLocator.of(module)
    log = FindingLog()
    with warnings.catch_warnings(), without_autocast(), without_fast_path(), own_compilations():
        warnings.simplefilter("ignore")  # the findings replace them
        reference = ReferenceWatcher()
        expected = _run_reference(module, WatchedRun(reference, locator, half), (inputs, kwargs))
        copied = half_copy(module, log, half)
        watcher = HalfWatcher(log, reference.overflow.expected, locator)
        run = WatchedRun(watcher, locator, half)
        given = cast("Inputs", cast_inputs((inputs, kwargs), torch_dtype(half)))
        declare_wide_tensors(copied, watcher.wide_tensors, half)
        try:
            with run.watching(copied):
                result = run_watched(copied, *given)
        except Exception as error:  # noqa: BLE001  (the user's model may raise anything)
            _log_crash(log, run, error)
        else:
            _record_outputs(watcher, expected, result, half)
            if not watcher.recovered:  # the graph of a model that fails shows nothing more
                _compare_with_export(copied, given, result, watcher, log, half)
    for origin in watcher.wide_tensors.origins.values():
        origin.report(log, half)
    check_unexecuted(locator, log, half)
    return LeakReport(model=type(module).__name__, dtype=half.name, findings=log.sorted())


def _unwrapped(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ExportError(f"expected a torch.nn.Module to check, got a {type(module).__name__}")
    require_python(module)
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        raise ExportError("the model's weights are on the meta device, which holds no numbers; load the model with its weights")
    return module._orig_mod if isinstance(module, OptimizedModule) else module  # noqa: SLF001  (what torch.compile wraps; torch has no public way)


def _run_reference(module: nn.Module, run: WatchedRun, inputs: Inputs) -> object:
    given = cast("Inputs", cast_inputs(inputs, torch.float32))
    try:
        twin = detached_copy(module).eval().float()
    except Exception as error:  # the user's __deepcopy__ may raise anything
        raise ExportError(f"the model cannot be copied: {_one_line(error)}") from error
    try:
        with run.watching(twin):
            return run_watched(twin, *given)
    except Exception as error:
        shown = ", ".join(described(leaf) for leaf in results_of(given))
        raise ExportError(f"the model fails in float32 on inputs {shown or 'none'}: {_one_line(error)}") from error


def _log_crash(log: FindingLog, run: WatchedRun, error: Exception) -> None:
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    text = f"the {run.half.name} model fails where the float32 one does not: {_one_line(error)}"
    log.add("crash", "error", run.locator.from_texts(iter(frames)), run.modules.failed, text, "dtype=x.dtype")


def _record_outputs(watcher: HalfWatcher, expected: object, result: object, half: HalfType) -> None:
    references = _labelled(expected)
    for label, output in _labelled(result).items():
        expected_dtype = references[label].dtype if label in references else torch.float32
        if output.dtype in wide_beside(half) and expected_dtype in (torch.float32, torch.float64, torch_dtype(half)):
            is_float64 = expected_dtype == torch.float64
            watcher.wide_tensors.returned(output, label, is_float64_in_float32_model=is_float64)


def _labelled(outputs: object) -> dict[str, Tensor]:
    leaves: list[tuple[Any, object]]
    try:
        leaves = pytree.tree_flatten_with_path(outputs)[0]
    except ValueError:  # a container that its library registered without names for its members, as diffusers does
        leaves = [((pytree.SequenceKey(index),), leaf) for index, leaf in enumerate(pytree.tree_leaves(outputs))]
    tensors = [(pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    return {f"output {path}" if path else "the output": leaf for path, leaf in tensors}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _compare_with_export(
    copied: nn.Module, given: Inputs, result: object, watcher: HalfWatcher, log: FindingLog, half: HalfType
) -> None:
    """Capture a half-precision model, and log where its dtypes differ from those of the eager run."""
    try:
        with silenced(), torch.no_grad():
            program = torch.export.export(_TensorOutputs(copied), *given, strict=False)
    except Exception as error:  # noqa: BLE001  (capturing runs the user's code, which may raise anything)
        text = f"torch.export cannot capture the {half.name} model: {type(error).__name__}: {first_line(error)[:LONGEST]}"
        log.add("export", "note", None, "", text, "torch.export")
        return
    for node in program.graph.nodes:
        dtype, wide = _dtype(node), wide_beside(half)
        if node.op == "call_function" and dtype in wide and not any(_dtype(source) in wide for source in node.all_input_nodes):
            frames = FRAME.findall(str(node.meta.get("stack_trace", "")))
            place: SourceLine | None = watcher.locator.from_texts((path, int(line)) for path, line in frames)
            # The graph names lines of `forward` alone; `dtypes` holds what each made in the functions it called, too.
            if place is not None and dtype not in watcher.dtypes.get(place, set()):
                text = f"the exported graph computes {node.name} in {short(dtype)}, which eager mode does not do on this line"
                log.add("export_dtype", "warning", place, _module(node), text, "dtype=x.dtype")
                break  # later differences follow from this one
    _compare_outputs(program, result, log, half)


def _compare_outputs(program: torch.export.ExportedProgram, result: object, log: FindingLog, half: HalfType) -> None:
    eager = [leaf.dtype for leaf in results_of(result)]
    node = next(node for node in program.graph.nodes if node.op == "output")
    names = set(program.graph_signature.user_outputs)
    values = [arg.meta.get("val") for arg in node.args[0] if isinstance(arg, torch.fx.Node) and arg.name in names]
    graph = [value.dtype for value in values if isinstance(value, Tensor)]
    if len(eager) != len(graph):
        return
    for index, (ours, theirs) in enumerate(zip(eager, graph, strict=True)):
        if ours != theirs and torch_dtype(half) in (ours, theirs):
            text = f"output {index} is {short(ours)} in eager mode and {short(theirs)} in the exported graph"
            log.add("export_dtype", "error", None, f"output {index}", text, "dtype=x.dtype")


def _dtype(node: torch.fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _module(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return paths[-1].removeprefix("model").removeprefix(".") if paths else ""


class _TensorOutputs(nn.Module):
    """A model without the outputs that torch.export cannot name, such as a key-value cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return results_of(self.model(*args, **kwargs))


OUTERMOST = re.compile(r"'(?P<name>\w+)' must stay float32 \((?P<reason>.*)\) and belongs to the outermost module")
PULLED_ALONG = ("part of ", "tied to ")


@dataclass(frozen=True, kw_only=True)
class TensorAttribute:
    """A wide tensor that is an attribute, in a list, tuple or dict that is one, or an attribute of the class.

    It is held by `module`, a dotted name, as `name` ("scale", "tables.0"), and assigned at `place`.
    """

    module: str
    name: str
    tensor: Tensor
    place: SourceLine | None


def half_copy(module: nn.Module, log: FindingLog, half: HalfType) -> nn.Module:
    """Return a half-precision copy of a model in evaluation mode; tensors that have to stay float32 are logged.

    Raises:
        ExportError: A parameter is not finite, or has no size yet.
    """
    try:
        copied = to_half(module, dtype=half.name)
    except ExportError as error:
        found = OUTERMOST.match(str(error))
        if found is None:
            raise
        text = (
            f"the outermost module holds {found['name']!r}, which must stay float32 ({found['reason']}), and its code with it"
        )
        log.add("outermost_table", "warning", assigned_at(type(module), found["name"]), "", text, "submodule")
        plain = detached_copy(module).eval()
        return plain.half() if half is FP16 else plain.bfloat16()
    # Undo what to_half does for attributes: .half() and .to() do not do it.
    originals = {held.name: held.tensor for held in _unregistered_wide(module, half)}
    for held in held_tensors(copied.module):
        if held.kind == "attribute" and held.name in originals:
            held.tensor.data = originals[held.name].detach().clone()
    for decision in copied.report.tensors:
        if decision.action == "kept" and decision.kind != "attribute" and not decision.reason.startswith(PULLED_ALONG):
            _log_kept(module, decision, log)
    return copied.module


def declare_wide_tensors(model: nn.Module, tracker: WideTensorTracker, half: HalfType) -> None:
    """Declare the tensors of a half-precision model that are wider to the tracker."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype in wide_beside(half):
            owner = name.rpartition(".")[0]
            what = (
                f"{name!r} stays {described(tensor)} because {half.name} cannot hold it, and is read past its module's forward"
            )
            tracker.declare(tensor, "kept", what, None, owner)
    for held in tensor_attributes(model, half):
        what = f"the attribute {held.name!r} is {described(held.tensor)}: .half() and .to() skip what is not registered"
        tracker.declare(held.tensor, "attribute", what, held.place, held.module)


def tensor_attributes(model: nn.Module, half: HalfType) -> Iterator[TensorAttribute]:
    """Yield the wide tensors that the modules of a model hold unregistered, except for torch's own modules."""
    for held in _unregistered_wide(model, half):
        name = held.name.removeprefix(f"{held.owner}.")
        yield _attribute(held.owner, type(model.get_submodule(held.owner)), name, held.tensor)
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            if not _is_torchs(cls):
                for name, value in vars(cls).items():
                    if isinstance(value, Tensor) and value.dtype in wide_beside(half):
                        yield _attribute(path, cls, name, value)


def cast_inputs(value: object, dtype: torch.dtype) -> object:
    """Return a copy of nested inputs with every floating tensor in another dtype."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()

    return pytree.tree_map_only(Tensor, cast, value)


def _unregistered_wide(model: nn.Module, half: HalfType) -> list[HeldTensor]:
    return [
        held
        for held in held_tensors(model)
        if held.kind == "attribute"
        and held.tensor.dtype in wide_beside(half)
        and not _is_torchs(type(model.get_submodule(held.owner)))
    ]


def _attribute(path: str, cls: type, name: str, tensor: Tensor) -> TensorAttribute:
    return TensorAttribute(module=path, name=name, tensor=tensor, place=assigned_at(cls, name.partition(".")[0]))


def _is_torchs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "builtins")


def _log_kept(module: nn.Module, decision: TensorDecision, log: FindingLog) -> None:
    owner, name = decision.owner, decision.name.removeprefix(f"{decision.owner}.")
    place = assigned_at(type(module.get_submodule(owner)), name)
    if "complex" in decision.reason:
        text = f"{name!r} is complex: .half() leaves it complex64, its module computes in float32, and ONNX has no such numbers"
        log.add("complex", "warning", place, owner, text, "view_as_real")
    else:
        text = f"{name!r} stays float32 with its module under to_half ({decision.reason}); .half() would round it"
        log.add("kept_float32", "note", place, owner, text, "to_half")
