"""Requests of one row of any length: cut from a model's samples, or made up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halfserve.serve.engine.model import Model
from halfserve.serve.engine.padding.padding import Padding, PaddingSettings
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors, TensorSpec
from halfserve.serve.trials.recorded_samples import vouched_samples
from halfserve.serve.trials.tried_version import TriedVersion

FEW_TOKENS = 4  # bound of made-up tokens at first, and on a device, which an index out of range could break


class PaddingRows:
    """Makes requests of one row for a model version.

    A row is cut or repeated from a sample: a request of model_warmup whose padded inputs are read from files, or a row that
    `export` has recorded. Places at a sample's ends that hold only the padding's value are cut off, and a sample of nothing
    else is not used, because it cannot be told from padding. Without samples, rows are made up. A model may take one integer
    per row, which may be the row's length or something else for which 1 is a valid value; in made-up rows, both are tried.

    Attributes:
        has_samples: whether rows are cut from samples.
        says_length: the kinds of made-up rows: True for rows in which an integer per row is their length, False for rows in
            which it is 1.
        token_limit: bound of made-up tokens.
    """

    def __init__(self, tried: TriedVersion, settings: PaddingSettings) -> None:
        """Make rows for a version. `settings`: the version's padding; the buckets and the longest length are not used."""
        self._interface = tried.model.interface
        self._rule = settings.rule
        self._padding = Padding(settings, [spec.name for spec in self._interface.inputs])
        self._shapes = {name: array.shape for batch in tried.declared[:1] for name, array in batch.inputs.items()}
        given = [batch.inputs for batch in tried.declared if batch.from_files >= self._padding.inputs.keys()]
        given += self._recorded(tried.model)
        self._samples = [self._without_padding(sample) for sample in given if self._tokens_of(sample).any()]
        counts = [spec.name for spec in self._interface.inputs if self._may_be_length(spec)]
        self._lengths = [name for name in counts if all((one[name] == self._length(one)).all() for one in self._samples)]
        self.says_length: tuple[bool, ...] = (True, False) if counts and not self._samples else (False,)
        self.token_limit = FEW_TOKENS
        self.has_samples = bool(self._samples)

    def of_length(self, length: int, seed: int, *, says_length: bool | None = None) -> InferRequest:
        """Return a request of one row of this length; `says_length`: whether an integer per row is set to its length, or else
        to 1.
        """
        random = np.random.default_rng(seed)
        if self._samples:
            return self._as_request(self._stretched(self._samples[seed % len(self._samples)], length, random))
        says_length = self.says_length[0] if says_length is None else says_length
        specs = self._interface.inputs
        return self._as_request({spec.name: self._made(spec, length, random, says_length=says_length) for spec in specs})

    def samples(self, above: int, most: int) -> Iterator[tuple[int, InferRequest]]:
        """Yield the samples themselves, with their lengths: those above `above` and up to `most`."""
        for sample in self._samples:
            length = self._length(sample)
            if above < length <= most:
                yield length, self._as_request(sample)

    def _as_request(self, inputs: Tensors) -> InferRequest:
        interface = self._interface
        given = {spec.name: spec.to_model(inputs[spec.name]) for spec in interface.inputs}
        shapes = tuple(given[spec.name].shape[1:] for spec in interface.inputs)
        bucket = shapes[0] if len(shapes) == 1 else shapes
        return InferRequest(given, tuple(spec.name for spec in interface.outputs), 1, bucket, None, _drop)

    def _may_be_length(self, spec: TensorSpec) -> bool:
        """Return whether an input has one integer per row."""
        is_one = all(size in {1, ANY_SIZE} for size in spec.shape[1:])
        return is_one and spec.name not in self._padding.inputs and spec.datatype.array_dtype.kind in "iu"

    def _made(self, spec: TensorSpec, length: int, random: np.random.Generator, *, says_length: bool) -> Array:
        padded = self._padding.inputs.get(spec.name)
        sizes = [length if padded is not None and axis in padded.axes else size for axis, size in enumerate(spec.shape)]
        guessed = self._shapes.get(spec.name, (1,) * len(sizes))
        shape = (1, *(guess if size == ANY_SIZE else size for size, guess in zip(sizes[1:], guessed[1:], strict=True)))
        dtype = spec.datatype.array_dtype
        if dtype.hasobject:
            return np.full(shape, b"1", object)
        if dtype.kind not in "iub":
            return np.asarray(random.standard_normal(shape)).astype(dtype)
        if says_length and self._may_be_length(spec):
            return np.full(shape, length).astype(dtype)
        first = self._rule.inputs[0]
        if padded is not first or dtype.kind == "b":
            return np.ones(shape, dtype)  # 1 marks used places in a mask, and is a valid token type
        values = np.array([value for value in range(1, self.token_limit) if value != first.value])
        tokens = random.choice(values, shape)
        if length > 1:
            tokens.flat[0] = values[-1]  # tries the largest token in each row, so that a later refusal is due to the length
        return tokens.astype(dtype)

    def _recorded(self, model: Model) -> Iterator[Tensors]:
        """Yield the rows that `export` has recorded, if they fit the model as clients see it."""
        recorded = vouched_samples(model)
        if recorded is None:
            return
        specs = self._interface.inputs
        counts = {len(array) if array.ndim else 0 for array in recorded.inputs.values()}
        if len(counts) == 1 and all(spec.mismatch(recorded.inputs[spec.name].shape) is None for spec in specs):
            arrays = {spec.name: recorded.inputs[spec.name].astype(spec.datatype.array_dtype) for spec in specs}
            for row in range(*counts):
                yield {name: array[row : row + 1] for name, array in arrays.items()}

    def _tokens_of(self, sample: Tensors) -> Array:
        """Return for each place of a sample whether its first padded input differs from the padding; empty for a sample of no
        length.
        """
        first, length = self._rule.inputs[0], self._length(sample)
        by_place = np.moveaxis(sample[first.name][:1], first.axes[0], 0).reshape(length, -1) if length else np.zeros((0, 1))
        return np.asarray((by_place != first.value).any(axis=1))

    def _without_padding(self, sample: Tensors) -> Tensors:
        """Return one row of a sample, from its first token to its last."""
        tokens = np.flatnonzero(self._tokens_of(sample))
        return self._cut(sample, np.arange(tokens[0], tokens[-1] + 1))

    def _cut(self, sample: Tensors, places: Array) -> dict[str, Array]:
        """Return one row of a sample, with only these places."""
        row = {name: array[:1] for name, array in sample.items()}
        for padded in self._rule.inputs:
            for axis in padded.axes:
                row[padded.name] = np.take(row[padded.name], places, axis)
        return row

    def _length(self, sample: Tensors) -> int:
        """Return the length of a sample; 0 if its inputs disagree about it."""
        found = self._padding.length_of(self._as_request(sample).bucket)
        return 0 if found is None else found.length

    def _stretched(self, sample: Tensors, length: int, random: np.random.Generator) -> dict[str, Array]:
        """Return one row of a sample, cut or repeated to a length; an input that states each sample's length gets this one."""
        own = self._length(sample)
        row = self._cut(sample, (np.arange(length) + random.choice(self._used(sample))) % own)
        return row | {name: np.full_like(row[name], length) for name in self._lengths}

    def _used(self, sample: Tensors) -> Array:
        """Return the places of a sample at which the most inputs, such as a mask, differ from their padding's value."""
        used = np.zeros(self._length(sample), np.int64)
        for padded in self._rule.inputs:
            by_place = np.moveaxis(sample[padded.name][:1], padded.axes[0], 0).reshape(len(used), -1)
            used += (by_place != padded.value).any(axis=1)
        return np.flatnonzero(used == used.max())


def _drop(_: object) -> None:
    """Discard an answer that no client waits for."""
