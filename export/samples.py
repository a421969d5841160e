"""Models and the inputs they run on: held-out samples of a data set, or random inputs by description."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from halfserve.amp_core.calling import arguments_of
from halfserve.amp_core.checkpoint import build_data, load_checkpoint
from halfserve.amp_core.checkpoint import call_factory as _call_factory  # type: ignore[attr-defined]  # (a checkpoint names factories)
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.protos.captured_requests import SampledTraffic

EXAMPLES = 2
DESCRIPTION = re.compile(r"(?:(?P<name>\w+)=)?(?P<dtype>\w+)\[(?P<shape>[\d\s,]*)\](?:<(?P<limit>\d+))?")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Stacked samples.

    Attributes:
        inputs: A tensor, or tensors in tuples, lists and dicts, as the items have them; the first dimension counts the samples.
        labels: int64, shape (samples,), where the targets are single whole numbers; else None.
        note: A remark for the certificate.
        traffic: The captured requests that they are; None for others.
    """

    inputs: Any
    labels: Tensor | None
    note: str = ""
    traffic: SampledTraffic | None = None

    def noting(self, remark: str) -> Samples:
        """Return these samples with one more remark in the note; "" adds none."""
        return replace(self, note="; ".join(filter(None, (self.note, remark))))

    def fitting(self, module: nn.Module) -> Samples:
        """Return the samples with float64, numpy's own type, rounded to the float32 of a module that has no float64 itself."""
        tensors = [*module.parameters(), *module.buffers()]
        given = [leaf for leaf in pytree.tree_leaves(self.inputs) if isinstance(leaf, Tensor)]
        if torch.float64 in {tensor.dtype for tensor in tensors} or torch.float64 not in {tensor.dtype for tensor in given}:
            return self
        rounded = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.float() if tensor.dtype == torch.float64 else tensor, self.inputs
        )
        return replace(self, inputs=rounded).noting("the samples are float64, and were rounded to the model's float32")


def take_samples(data: Dataset[Any], count: int) -> Samples:
    """Stack the first `count` items (input, target) of a data set with a length, by its own `collate_fn` where it has one.

    Raises:
        UsageError: `count` is below 1.
        ExportError: The items are no pairs, or their inputs differ in shape and cannot be stacked.
    """
    if count < 1:
        raise UsageError(f"samples is {count}; expected at least 1")
    items = [data[index] for index in range(min(count, len(data)))]  # type: ignore[arg-type]  # (checked when it was built)
    collate = getattr(data, "collate_fn", None)
    if collate is not None:
        return _collated(collate, items)
    if not all(_is_pair(item) for item in items):
        raise ExportError("the held-out set must hold pairs (input, target)")
    return Samples(inputs=_stacked([item[0] for item in items]), labels=_labels([item[1] for item in items]))


def _collated(collate: Callable[[list[Any]], Any], items: list[Any]) -> Samples:
    try:
        batch = collate(items)
    except Exception as error:
        raise ExportError(f"the held-out set's collate_fn raised {type(error).__name__}: {_first_line(error)}") from error
    if not _is_pair(batch):
        raise ExportError("the held-out set's collate_fn must return a pair (inputs, targets)")
    inputs, targets = batch
    if not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(inputs)):
        raise ExportError(
            "the held-out set's collate_fn must return inputs that are tensors, or tuples, lists and dicts of them"
        )
    return Samples(inputs=inputs, labels=_labels(list(targets)) if isinstance(targets, Tensor) and targets.dim() else None)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _stacked(inputs: list[Any]) -> Any:
    flat = [pytree.tree_flatten(entry) for entry in inputs]
    _, spec = flat[0]
    for index, (_, other) in enumerate(flat):
        if other != spec:
            raise ExportError(f"the held-out inputs cannot be stacked: item {index} is nested differently from item 0")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    try:
        stacked = [torch.stack([torch.as_tensor(value) for value in column]) for column in columns]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ExportError(f"the held-out inputs cannot be stacked: {_first_line(error)}") from error
    return pytree.tree_unflatten(stacked, spec)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0]


def _labels(targets: list[Any]) -> Tensor | None:
    tensors = [torch.as_tensor(target) for target in targets if isinstance(target, int | Tensor)]
    whole = all(tensor.dim() == 0 and not tensor.is_floating_point() and not tensor.is_complex() for tensor in tensors)
    return torch.stack(tensors).long() if whole and len(tensors) == len(targets) else None


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Arguments for a model: positional ones, and others by the name of `forward`'s parameter."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def model_of(factory: str) -> nn.Module:
    """Return the model that a `MODULE:FACTORY` makes, in evaluation mode.

    Raises:
        ExportError: The factory cannot be imported or called, or returns no module.
    """
    try:
        model = _call_factory(factory)
    except ValueError as error:
        raise ExportError(str(error)) from error
    if not isinstance(model, nn.Module):
        raise ExportError(f"{factory!r} returned a {type(model).__name__}; expected a torch.nn.Module")
    return model.eval()


def inputs_from_data(factory: str, model: nn.Module) -> ModelInputs:
    """Return the first held-out samples of a data factory, stacked, as training would give them to the model.

    Raises:
        ExportError: The factory cannot be imported or called, or its samples cannot be stacked.
    """
    try:
        held_out = build_data(factory)[1]
    except ValueError as error:
        raise ExportError(str(error)) from error
    args, kwargs = arguments_of(model, take_samples(held_out, EXAMPLES).inputs)
    return ModelInputs(args=args, kwargs=kwargs)


def from_checkpoint(path: str) -> tuple[nn.Module, ModelInputs]:
    """Return a checkpoint's trained model, and samples of the data it was trained on.

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
        UsageError: A description has another form.
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
