"""A torch model as one graph of operations, by `torch.export`."""

from __future__ import annotations

import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfserve.amp_core.calling import without_fast_path
from halfserve.export.export_errors import ExportError
from halfserve.export.to_onnx.dimensions import BATCH, Dimensions
from halfserve.export.to_onnx.forward_call import ForwardCall, named_tensors
from halfserve.export.to_onnx.layer_translations import WholeRecurrentLayers
from halfserve.export.to_onnx.operator_translations import TranslatableForms

WRAPPED = "halfserve_model"
_AT_ONE_SIZE = (
    "serve it at one size: export_onnx(..., dynamic_shapes={}) with a batch of that size, then halfserve convert --repository "
    "... --max-batch-size 0"
)

_TERMINAL_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
CHATTERING = ("torch", "torch.__trace", "onnxscript", "onnx_ir")


class FlatModel(nn.Module):
    """A model that takes and returns flat tuples of tensors; its parts have the prefix `halfserve_model.`."""

    def __init__(self, model: nn.Module, call: ForwardCall) -> None:
        super().__init__()
        self.halfserve_model = model
        self.call = call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self.call.arguments(tensors)
        return tuple(tensor for _, tensor in named_tensors(self.halfserve_model(*args, **kwargs)))


def run(module: nn.Module, call: ForwardCall, tensors: tuple[Tensor, ...]) -> list[tuple[str, Tensor]]:
    """Call the model, and name the tensors that it returns.

    Raises:
        ExportError: The model fails on the inputs, or returns something else than tensors.
    """
    args, kwargs = call.arguments(tensors)
    try:
        with torch.no_grad(), without_fast_path():
            result = module(*args, **kwargs)
    except Exception as error:
        given = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
        raise ExportError(f"the model fails on inputs {given}: {one_line(error)}{where(error)}") from error
    return named_tensors(result)


def captured(
    module: nn.Module, call: ForwardCall, tensors: tuple[Tensor, ...], dimensions: Dimensions
) -> torch.export.ExportedProgram:
    """Capture a `FlatModel`'s graph; sizes without the caller's limits get the model's own, such as a position table's length.

    Raises:
        ExportError: The model cannot be captured, or fixes or limits a size that should vary.
    """
    assume, refused = False, None
    while True:  # ends: each turn narrows a limit or, once, assumes the rest
        try:
            program = _exported(module, call, tensors, dimensions, assume=assume)
            break
        except Exception as error:
            limited = _with_the_models_limits(str(error), dimensions)
            if (assume and limited is None) or not _is_about_sizes(str(error)):
                raise ExportError(_explained(error, module)) from error
            refused, assume, dimensions = error, limited is None or assume, limited or dimensions
    if assume and refused is not None and not _holds_at_other_sizes(program, tensors, dimensions):
        raise ExportError(_explained(refused, module)) from refused
    return program


def _exported(
    module: nn.Module, call: ForwardCall, tensors: tuple[Tensor, ...], dimensions: Dimensions, *, assume: bool = False
) -> torch.export.ExportedProgram:
    """Capture; `assume` turns conditions on sizes that torch cannot prove into assertions inside the graph."""
    with (
        silenced(),
        torch.no_grad(),
        # torch's decompositions expect the memory layout of this attention kernel.
        sdpa_kernel(SDPBackend.MATH),
        WholeRecurrentLayers(),
        TranslatableForms(),
        # Otherwise torch merges two sizes that are equal in the example.
        _config.patch(use_duck_shape=False),  # type: ignore[attr-defined]  # (torch adds it to the module at run time)
    ):
        return torch.export.export(
            FlatModel(module, call),
            tensors,
            dynamic_shapes=(dimensions.for_torch(),),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=assume,
        )


def _holds_at_other_sizes(program: torch.export.ExportedProgram, tensors: tuple[Tensor, ...], dimensions: Dimensions) -> bool:
    """Return whether the graph's assertions hold when each size in turn is a little larger than in the example.

    One size of three may fail: where two sizes coincide, the memory layout differs, which matters to torch and not to ONNX. A
    condition on the size itself (even, a multiple of 20) fails at more.
    """
    graph = program.module()
    others = {name: [dimensions.enlarged(tensors, name, more) for more in (1, 2, 3)] for name in dimensions.dims}
    return all(sum(_holds(graph, larger) for larger in by_size) >= 2 for by_size in others.values())


def _holds(graph: nn.Module, tensors: tuple[Tensor, ...]) -> bool:
    try:
        with silenced(), torch.no_grad():
            graph(*tensors)
    except Exception:  # noqa: BLE001  (any exception means that the graph does not hold)
        return False
    return True


def _is_about_sizes(message: str) -> bool:
    return "Constraints violated" in message and not _fixed_size(message)


def _with_the_models_limits(message: str, dimensions: Dimensions) -> Dimensions | None:
    """Return the dimensions within the limits in torch's message; None if these are not new or the caller gave limits."""
    narrowed = dimensions
    for name, (least, most) in _limits_in(message).items():
        if name in dimensions.free:
            narrowed = narrowed.limited(name, least, most)
    return None if narrowed.dims == dimensions.dims else narrowed


def _limits_in(message: str) -> dict[str, tuple[int, int | None]]:
    guards, _, fixes = message.partition("Suggested fixes:")
    found: dict[str, tuple[int, int | None]] = {}
    for name, guard in re.findall(r"Not all values of (\w+) = .* satisfy the generated guard (.+)", guards):
        if bounds := re.match(r"(\d+) <= L\S* and L\S* <= (\w+)", guard):
            found[name] = (int(bounds[1]), int(bounds[2]) if bounds[2].isdigit() else None)
    for name, fix in re.findall(r"^\s+(\w+) = Dim\((.+)\)$", fixes, re.MULTILINE):
        limits = dict(re.findall(r"(min|max)=(\d+)", fix))
        found[name] = (int(limits.get("min", 1)), int(limits["max"]) if "max" in limits else None)
    return found


def _explained(error: Exception, module: nn.Module) -> str:
    text = str(error)
    if isinstance(error, ExportError):
        return text
    if fixed := _fixed_size(text):
        recurrent = next((name for name, part in module.named_modules() if isinstance(part, nn.RNNBase)), None)
        if recurrent is not None:
            return (
                f"torch.export fixes dimension {fixed[1]!r} at {fixed[2]}: it unrolls recurrent layers "
                f"({recurrent or 'the model'}) over the sequence; leave the length out of dynamic_shapes (--dynamic)"
            )
        return (
            f"the model's code fixes dimension {fixed[1]!r} at {fixed[2]}; make it follow the input's shape, or "
            f"{_AT_ONE_SIZE if fixed[1] == BATCH else 'leave it out of dynamic_shapes (--dynamic)'}"
        )
    suggested = re.findall(r"^\s+(\w+ = .+)$", text.partition("Suggested fixes:")[2], re.MULTILINE)
    if suggested:
        found = f"the model's code does not allow every size; torch suggests for dynamic_shapes: {'; '.join(suggested)}"
        multiples = re.findall(r"^(\w+) = (\d+)\*_\1\b", "\n".join(suggested), re.MULTILINE)
        if re.search(rf"^{BATCH} = \d+$", "\n".join(suggested), re.MULTILINE):
            found += f"; make it follow the input's shape, or {_AT_ONE_SIZE}"
        written = ", ".join(f"{step}*{name}" for name, step in multiples)
        return f"{found}; where only multiples are wanted, name them so ({written})" if written else found
    refused = re.search(r"Not all values of (\w+) = .* satisfy the generated guard (.+)", text)
    if refused:
        return f"the model's code does not allow every size of dimension {refused[1]!r}: {refused[2].rstrip('.')}"
    return f"torch.export cannot capture the model: {one_line(error)}{where(error)}"


def _fixed_size(text: str) -> re.Match[str] | None:
    return re.search(r"You marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)", text)


def limits_of(program: torch.export.ExportedProgram) -> dict[str, tuple[int, int | None]]:
    """Return the smallest and the largest size of each symbol in the captured graph; None where no largest is known."""
    limits: dict[str, tuple[int, int | None]] = {}
    for symbol, values in program.range_constraints.items():
        lower: Any = values.lower
        upper: Any = values.upper
        least = max(int(lower), 1) if lower.is_Integer else 1  # a floating symbol has no integer bound
        limits[str(symbol)] = (least, int(upper) if upper.is_Integer else None)
    return limits


def one_line(error: BaseException) -> str:
    """Return the exception's type and the first line of its text."""
    text = _TERMINAL_COLOURS.sub("", str(error))
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def root(error: BaseException) -> BaseException:
    """Return the first exception of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def where(error: BaseException) -> str:
    """` (at model.py:42)`: the innermost line outside torch in the exception's traceback; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)]
    theirs = [frame for frame in frames if not frame.filename.startswith("<") and "torch" not in Path(frame.filename).parts]
    return f" (at {Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""


@contextmanager
def silenced() -> Iterator[None]:
    """Mute the warnings, log records and prints of torch's exporter and of the libraries it uses, in the block."""
    loggers = [logging.getLogger(name) for name in CHATTERING]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
