"""Pads requests of different lengths to one length, and cuts their answers back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from halfserve.serve.engine.errors import BackendError
from halfserve.serve.engine.requests import Answer, BatchOutputs, InferRequest
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors

MAX_BUCKETS: Final = 4096  # limits the memory that clients with varying shapes can take


@dataclass(frozen=True, kw_only=True)
class PaddedInput:
    """An input that may be padded.

    Attributes:
        name: name of the input.
        axes: axes that are as long as the request; 0 is the batch dimension.
        value: value of the padding.
    """

    name: str
    axes: tuple[int, ...]
    value: float


@dataclass(frozen=True, kw_only=True)
class PaddingRule:
    """The rule that `halfserve.padding` contains. All axes in it have the same size in one request, which is its length.

    Attributes:
        inputs: padded inputs, in the order of the text.
        cut: (output, axis) pairs whose axes are as long as the request, where answers are cut.
    """

    inputs: tuple[PaddedInput, ...]
    cut: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PaddingSettings:
    """The padding of a model's requests.

    Attributes:
        rule: names the axes and values.
        buckets: lengths that requests are padded to, in rising order; if empty, they are padded to the longest of their batch.
        max_tokens: most rows times padded length in a batch; None for any.
        longest: greatest length that requests are padded to; longer requests keep theirs. None for any.
    """

    rule: PaddingRule
    buckets: tuple[int, ...] = ()
    max_tokens: int | None = None
    longest: int | None = None


class RequestLength:
    """The length and family of requests of one shape.

    Attributes:
        family: equal for shapes that are equal once padded to one length.
        length: length of the requests.
        padded: least length to which they are padded.
    """

    __slots__ = ("family", "length", "padded")

    def __init__(self, family: Hashable, length: int, padded: int) -> None:
        self.family = family
        self.length = length
        self.padded = padded


class Padding:
    """Pads the requests of one model. Used on the event loop and on worker threads.

    Attributes:
        settings: the configured padding.
        inputs: the padded inputs by name.
    """

    __slots__ = ("_axes", "_is_single", "_lengths", "inputs", "settings")

    def __init__(self, settings: PaddingSettings, input_names: Sequence[str]) -> None:
        """`input_names`: the model's inputs, in the order in which a request's `bucket` has their shapes."""
        self.settings = settings
        self.inputs: Mapping[str, PaddedInput] = {padded.name: padded for padded in settings.rule.inputs}
        self._is_single = len(input_names) == 1
        # Pairs of an input's index and an axis without the batch dimension.
        self._axes = [
            (index, axis - 1)
            for index, name in enumerate(input_names)
            if name in self.inputs
            for axis in self.inputs[name].axes
        ]
        self._lengths: dict[Hashable, RequestLength | None] = {}

    def length_of(self, bucket: Hashable) -> RequestLength | None:
        """Return the length and family of requests of a bucket; None for one that cannot be padded."""
        found = self._lengths.get(bucket)
        if found is None and bucket not in self._lengths:
            if len(self._lengths) >= MAX_BUCKETS:
                self._lengths.clear()
            found = self._lengths[bucket] = self._found(bucket)
        return found

    def common_length(self, requests: Sequence[InferRequest]) -> int:
        """Return the length to which a batch is padded; 0 if nothing needs padding."""
        longest, differs = 0, False
        for request in requests:
            found = self.length_of(request.bucket)
            if found is None:
                return 0
            differs = differs or found.padded != found.length or (longest > 0 and found.padded != longest)
            longest = max(longest, found.padded)
        return longest if differs else 0

    def shape(self, name: str, request_shape: Sequence[int], rows: int, length: int) -> list[int]:
        """Return the shape of a padded input of a batch, from that of one of its requests."""
        shape = [rows, *request_shape[1:]]
        for axis in self.inputs[name].axes:
            shape[axis] = length
        return shape

    def fill(self, batch: Array, name: str, arrays: Sequence[Array]) -> None:
        """Write a padded input of a batch.

        Args:
            batch: array of the input's `shape`, to overwrite; rows beyond the requests' repeat the last one.
            name: name of the input.
            arrays: the input of each request, in order, of shape [rows, ...].
        """
        padded = self.inputs[name]
        length = batch.shape[padded.axes[0]]
        start = 0
        for array in arrays:
            end = start + array.shape[0]
            place = [slice(start, end)] + [slice(None)] * (array.ndim - 1)
            if array.shape[padded.axes[0]] != length:
                batch[start:end] = padded.value
                for axis in padded.axes:
                    place[axis] = slice(array.shape[axis])
            batch[tuple(place)] = array
            start = end
        if start < len(batch):
            batch[start:] = batch[start - 1]

    def answers(self, outputs: Tensors, requests: Sequence[InferRequest], rows: int, length: int) -> list[Tensors]:
        """Return each request's rows of a batch's outputs, as views, cut to its length.

        Args:
            outputs: outputs of the batch.
            requests: requests in the batch, in order.
            rows: rows of the batch, including padded ones.
            length: length to which the batch was padded.

        Raises:
            BackendError: an output does not have these rows, or not this length.
        """
        for name, array in outputs.items():
            if array.ndim == 0 or array.shape[0] != rows:
                raise BackendError(
                    f"output {name!r} has shape {list(array.shape)}, expected {rows} rows first, as in the batch"
                )
        cut = self.settings.rule.cut
        for name, axis in cut:
            if name in outputs and outputs[name].shape[axis : axis + 1] != (length,):
                shape = list(outputs[name].shape)
                raise BackendError(f"output {name!r} has shape {shape}, expected {length} in axis {axis}, as the padded inputs")
        whole = None if cut else BatchOutputs(outputs)
        answers: list[Tensors] = []
        start = 0
        for request in requests:
            end = start + request.rows
            if whole is not None:
                answers.append(Answer(whole, request.outputs, start, end))
            else:
                found = self.length_of(request.bucket)
                own = self._cut(outputs, start, end, length if found is None else found.length)
                answers.append(Answer(BatchOutputs(own), request.outputs, 0, request.rows))
            start = end
        return answers

    def _cut(self, outputs: Tensors, start: int, end: int, length: int) -> Tensors:
        own = {name: array[start:end] for name, array in outputs.items()}
        for name, axis in self.settings.rule.cut:
            if name in own:
                own[name] = own[name][(slice(None),) * axis + (slice(length),)]
        return own

    def _found(self, bucket: Hashable) -> RequestLength | None:
        if not isinstance(bucket, tuple):
            return None
        shapes = [list(shape) for shape in ((bucket,) if self._is_single else bucket)]
        sizes = {shapes[index][axis] for index, axis in self._axes}
        if len(sizes) != 1:
            return None
        (length,) = sizes
        for index, axis in self._axes:
            shapes[index][axis] = ANY_SIZE
        family = tuple(map(tuple, shapes))
        longest = self.settings.longest
        if longest is not None and length > longest:
            return RequestLength((family, length), length, length)
        padded = next((size for size in self.settings.buckets if size >= length), length)
        return RequestLength(family, length, padded)
