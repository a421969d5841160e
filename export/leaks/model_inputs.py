"""What to run a model on: from a data set, or made from a description such as `float32[2,3,32,32]`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.calling import arguments_of
from amp_core.checkpoint import build_data, load_checkpoint
from amp_core.checkpoint import call_factory as _call_factory  # type: ignore[attr-defined]  # (a checkpoint names factories)
from export.errors import ExportError, UsageError
from export.samples import take_samples

EXAMPLES = 2
DESCRIPTION = re.compile(r"(?:(?P<name>\w+)=)?(?P<dtype>\w+)\[(?P<shape>[\d\s,]*)\](?:<(?P<limit>\d+))?")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Arguments for a model.

    Attributes:
        args: Positional.
        kwargs: By the name of `forward`'s parameter.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def model_of(factory: str) -> nn.Module:
    """The model that a `MODULE:FACTORY` makes, in evaluation mode.

    Raises:
        ExportError: It cannot be imported or called, or makes no module.
    """
    try:
        model = _call_factory(factory)
    except ValueError as error:
        raise ExportError(str(error)) from error
    if not isinstance(model, nn.Module):
        raise ExportError(f"{factory!r} returned a {type(model).__name__}; expected a torch.nn.Module")
    return model.eval()


def inputs_from_data(factory: str, model: nn.Module) -> ModelInputs:
    """The first held-out samples of a data factory, stacked, as training would give them to the model.

    Raises:
        ExportError: It cannot be imported or called, or its samples cannot be stacked.
    """
    try:
        held_out = build_data(factory)[1]
    except ValueError as error:
        raise ExportError(str(error)) from error
    args, kwargs = arguments_of(model, take_samples(held_out, EXAMPLES).inputs)
    return ModelInputs(args=args, kwargs=kwargs)


def from_checkpoint(path: str) -> tuple[nn.Module, ModelInputs]:
    """A checkpoint's trained model, and samples of the data it was trained on.

    Raises:
        ExportError: The checkpoint cannot be read, or its factories are gone.
    """
    try:
        checkpoint = load_checkpoint(path)
        model = checkpoint.build_model()
        return model, inputs_from_data(checkpoint.data, model)
    except ValueError as error:
        raise ExportError(str(error)) from error


def inputs_from_descriptions(descriptions: list[str]) -> ModelInputs:
    """Random inputs: `float32[2,8]`, `int64[2,12]<1000` (numbers under 1000), `mask=bool[2,12]` (by name).

    Floating numbers are drawn from the standard normal distribution, whole ones from 0 up to the limit (2 by default), from a
    fixed seed.

    Raises:
        UsageError: A description is none.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = ModelInputs()
    args: list[Tensor] = []
    for description in descriptions:
        found = DESCRIPTION.fullmatch(description.strip())
        if found is None or found["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            raise UsageError(f"input {description!r}: expected DTYPE[SIZES], such as float32[2,3,32,32]; dtypes are {known}")
        made = _random(DTYPES[found["dtype"]], _sizes(found["shape"], description), int(found["limit"] or 2), generator)
        if found["name"]:
            inputs.kwargs[found["name"]] = made
        else:
            args.append(made)
    return ModelInputs(args=tuple(args), kwargs=inputs.kwargs)


def _sizes(text: str, description: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"input {description!r}: expected sizes between commas, such as float32[2,3,32,32]")
    return [int(part) for part in parts]


def _random(dtype: torch.dtype, sizes: list[int], limit: int, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(sizes, generator=generator).to(dtype)
    return torch.randint(0, max(limit, 1), sizes, generator=generator).to(dtype)
