"""A torch model as one graph of operations, by `torch.export`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from torch.nn.attention import SDPBackend, sdpa_kernel

from amp_core.calling import without_fast_path
from export.errors import ExportError
from export.to_onnx.angles import AnglesByParts
from export.to_onnx.call import Call
from export.to_onnx.dimensions import BATCH, Dimensions
from export.to_onnx.messages import one_line, where
from export.to_onnx.recurrent import WholeRecurrentLayers
from export.to_onnx.results import named_tensors
from export.to_onnx.silence import silenced

WRAPPED = "halfserve_model"
_AT_ONE_SIZE = (
    "serve it at one size: export_onnx(..., dynamic_shapes={}) with a batch of that size, then halfserve convert --repository "
    "... --max-batch-size 0"
)


class FlatModel(nn.Module):
    """A model whose inputs and outputs are rows of tensors, whatever nests them in the model itself.

    Parameters and modules of the model are found under the prefix `halfserve_model.`.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.halfserve_model = model
        self.call = call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the model with the tensors in their places."""
        args, kwargs = self.call.arguments(tensors)
        return tuple(tensor for _, tensor in named_tensors(self.halfserve_model(*args, **kwargs)))


def run(module: nn.Module, call: Call, tensors: tuple[Tensor, ...]) -> list[tuple[str, Tensor]]:
    """What the model returns, by name.

    Raises:
        ExportError: It fails on the inputs, or returns something else than tensors.
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
    module: nn.Module, call: Call, tensors: tuple[Tensor, ...], dimensions: Dimensions
) -> torch.export.ExportedProgram:
    """The model's graph, of a `FlatModel`.

    Sizes whose limits the caller left open get the model's own (a position table's length, a filter's width).

    Raises:
        ExportError: The model cannot be captured, or fixes or limits a size that should vary.
    """
    assume, refused = False, None
    while True:  # each turn narrows a limit or, once, assumes the rest: it ends
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
    module: nn.Module, call: Call, tensors: tuple[Tensor, ...], dimensions: Dimensions, *, assume: bool = False
) -> torch.export.ExportedProgram:
    """Capture; `assume` turns conditions on sizes that torch cannot prove into assertions inside the graph."""
    with (
        silenced(),
        torch.no_grad(),
        # Other kernels of attention lay their results out in memory in an order that torch's decompositions do not expect.
        sdpa_kernel(SDPBackend.MATH),
        WholeRecurrentLayers(),
        AnglesByParts(),
        # Otherwise two sizes that happen to be equal in the example are taken for one.
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
    """Whether the graph's assertions hold when each size in turn is a little larger than in the example.

    One size of three may fail: tensors that happen to be as large as another lie in memory in another way, which matters to
    torch and not to ONNX. A condition on the size itself (even, a multiple of 20) rules out more.
    """
    graph = program.module()
    others = {name: [dimensions.enlarged(tensors, name, more) for more in (1, 2, 3)] for name in dimensions.dims}
    return all(sum(_holds(graph, larger) for larger in by_size) >= 2 for by_size in others.values())


def _holds(graph: nn.Module, tensors: tuple[Tensor, ...]) -> bool:
    try:
        with silenced(), torch.no_grad():
            graph(*tensors)
    except Exception:  # noqa: BLE001  (whatever it is, the graph does not hold there)
        return False
    return True


def _is_about_sizes(message: str) -> bool:
    return "Constraints violated" in message and not _fixed_size(message)


def _with_the_models_limits(message: str, dimensions: Dimensions) -> Dimensions | None:
    """The dimensions within the limits that torch's message names, if that is something new and the caller gave no limits."""
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
    """The limits of each symbol in the captured graph: the smallest and the largest size, None where there is no largest.

    Symbols of floating numbers, such as a stride that the model reads from a tensor, have no smallest either.
    """
    limits: dict[str, tuple[int, int | None]] = {}
    for symbol, values in program.range_constraints.items():
        lower: Any = values.lower
        upper: Any = values.upper
        least = max(int(lower), 1) if lower.is_Integer else 1
        limits[str(symbol)] = (least, int(upper) if upper.is_Integer else None)
    return limits
