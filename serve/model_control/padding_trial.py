"""The rows on which padding is tried, and the model's answers to them: alone and unpadded, and padded together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from halfserve.serve.engine.backend import CALLING_PROVIDERS
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.errors import InstanceLostError, ModelLoadError, is_device_lost
from halfserve.serve.engine.execution.assembly import pad_rows, padded_inputs
from halfserve.serve.engine.execution.batch import Answered, Failed, run_batch
from halfserve.serve.engine.padding.padding import Padding
from halfserve.serve.engine.padding.padding_settings import PaddingSettings
from halfserve.serve.engine.queueing.pace import padded_rows
from halfserve.serve.engine.repository.loaded_version import LoadedVersion
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors, TensorSpec
from halfserve.serve.model_control.certificate_check import vouched_samples
from halfserve.serve.model_control.warm_up import declared_requests

SHORTEST = (1, 2, 4, 8)  # the first lengths to try
EACH = 2  # rows of each length, from which together the size of an output's columns is determined
TOKENS = 1000  # made-up tokens are below this if the model takes them all on the CPU
FEW_TOKENS = 4  # the bound if it does not, and on a device, which an index out of range could break


class NotProvedError(Exception):
    """The reason why a model is not padded."""


class OutOfTimeError(Exception):
    """The next run would end after the allowed time."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A request of one row, and the answer that it gets alone and unpadded."""

    length: int
    request: InferRequest
    alone: Tensors


class PaddingTrial:
    """Runs rows on a version's first copy.

    A row is cut or repeated from a sample: a request of model_warmup whose padded inputs are read from files, or a row that
    `export` has recorded. Places at a sample's ends that hold only the padding's value are cut off, and a sample of nothing
    else is not used, because it cannot be told from padding. Without samples, rows are made up. A model may take one integer
    per row, which may be the row's length or something else for which 1 is a valid value; in made-up rows, both are tried.

    Attributes:
        version: the loaded model version.
        settings: its padding; the buckets and the longest length are not used.
        until: end of the allowed time, in seconds of the clock.
        refusal: the model's latest error for a single row.
    """

    def __init__(
        self, version: LoadedVersion, settings: PaddingSettings, until: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.version = version
        self.settings = settings
        self.until = until
        self.refusal = ""
        self._clock = clock
        self._padding = Padding(settings, [spec.name for spec in version.interface.inputs])
        declared = declared_requests(version)
        self._shapes = {name: array.shape for request in declared[:1] for name, array in request.inputs.items()}
        given = [request.inputs for request in declared if request.from_files >= self._padding.inputs.keys()]
        given += self._recorded()
        self._samples = [self._without_padding(sample) for sample in given if self._tokens_of(sample).any()]
        counts = [spec.name for spec in version.interface.inputs if self._may_be_length(spec)]
        self._lengths = [name for name in counts if all((one[name] == self._length(one)).all() for one in self._samples)]
        self._says_length: tuple[bool, ...] = (True, False) if counts and not self._samples else (False,)
        self._tokens = FEW_TOKENS
        self._largest, self._token_s = 0, 0.0  # tokens of the largest run, and seconds per token in it

    def short_rows(self) -> list[Row]:
        """Return EACH rows of every length in SHORTEST that the model takes, in rising length.

        Raises:
            OutOfTimeError: not enough time is left.
            ModelLoadError: the device was lost.
        """
        if self.version.backends[0].provider in CALLING_PROVIDERS and not self._samples:
            self._tokens = TOKENS
            if not self.rows(SHORTEST[-1], 0):
                self._tokens = FEW_TOKENS
        rows: list[Row] = []
        for length in SHORTEST:
            for seed in range(EACH):
                self.require_time(length)
                rows += self.rows(length, seed)
        return rows

    def rows(self, length: int, seed: int) -> list[Row]:
        """Return rows of a length with their answers alone: one row for each value that an integer of the row may have.

        There are none if the model does not take the length. A value that it refuses while it takes another is not tried again.

        Raises:
            ModelLoadError: the device was lost.
        """
        taken = {}
        for says_length in self._says_length:
            row = self._answered(length, self.request(length, seed, says_length=says_length))
            if row is not None:
                taken[says_length] = row
        if taken:
            self._says_length = tuple(taken)
        return list(taken.values())

    def sample_rows(self, above: int, most: int) -> Iterator[Row]:
        """Yield the samples themselves, of lengths above `above` and up to `most`."""
        for sample in self._samples:
            length = self._length(sample)
            if above < length <= most:
                self.require_time(length)
                row = self._answered(length, self._as_request(sample))
                if row is not None:
                    yield row

    def longest_taken(self, taken: int, refused: int) -> int:
        """Return the longest length that the model takes: at least `taken`, and below `refused`, which it does not take.

        Raises:
            OutOfTimeError: not enough time is left.
            ModelLoadError: the device was lost.
        """
        # The longest length is most often a power of two: it and the length after it are tried before the middle of the
        # interval.
        guess, after = 2 * taken, 1
        while refused - taken > 1:
            if not taken < guess < refused:
                guess = (taken + refused) // 2
            self.require_time(guess)
            if self.rows(guess, 0):
                taken, guess = guess, 2 * guess
            else:
                refused, guess, after = guess, taken + after, 0
        return taken

    def padded(self, rows: Sequence[Row], length: int) -> tuple[Tensors, list[Tensors]]:
        """Compute rows together as in serving, each padded to a length.

        Returns:
            The whole batch's outputs, and each row's answer, as views: the next run may reuse the memory.

        Raises:
            NotProvedError: the rows cannot be computed together.
            OutOfTimeError: not enough time is left.
            ModelLoadError: the device was lost.
        """
        sizes = self.version.limits.padded_rows
        count = padded_rows(len(rows), sizes) if sizes else len(rows)
        self.require_time(count * length)
        backend, requests = self.version.backends[0], [row.request for row in rows]
        padding = Padding(replace(self.settings, buckets=(length,)), [spec.name for spec in self.version.interface.inputs])
        pause()
        started = self._clock()
        try:
            inputs = padded_inputs(backend, requests, len(rows), length, padding)
            outputs = backend.run({name: pad_rows(array, count) for name, array in inputs.items()})
            answers = padding.answers(outputs, requests, count, length)
        except Exception as error:  # noqa: BLE001  (a runtime may raise anything)
            if is_device_lost(error):
                raise self._lost(error) from None
            raise NotProvedError(f"requests of different lengths cannot be computed together ({error})") from None
        self._learn(count * length, started)
        return outputs, answers

    def seconds(self, requests: Sequence[InferRequest], length: int) -> float:
        """Return the seconds that a batch of requests of one length takes.

        Raises:
            NotProvedError: the model refuses the batch.
            OutOfTimeError: not enough time is left.
            ModelLoadError: the device was lost.
        """
        self.require_time(len(requests) * length)
        result = self._run(requests)
        if isinstance(result, Failed):
            raise NotProvedError(str(result.error))
        return (result.times.split - result.times.started) / 1e9

    def require_time(self, tokens: int) -> None:
        """Check, by the time per token of the largest run, that a run of `tokens` (rows times length) can end in time.

        Raises:
            OutOfTimeError: it cannot end in time.
        """
        if not self.has_time(tokens):
            raise OutOfTimeError

    def has_time(self, tokens: int) -> bool:
        return self._clock() + tokens * self._token_s <= self.until

    def request(self, length: int, seed: int, *, says_length: bool | None = None) -> InferRequest:
        """Return a request of one row of this length; `says_length`: whether an integer per row is set to its length, or else
        to 1.
        """
        random = np.random.default_rng(seed)
        if self._samples:
            return self._as_request(self._stretched(self._samples[seed % len(self._samples)], length, random))
        says_length = self._says_length[0] if says_length is None else says_length
        specs = self.version.interface.inputs
        return self._as_request({spec.name: self._made(spec, length, random, says_length=says_length) for spec in specs})

    def _answered(self, length: int, request: InferRequest) -> Row | None:
        started = self._clock()
        result = self._run([request])
        if isinstance(result, Failed):
            self.refusal = str(result.error)
            return None
        self._learn(length, started)
        # The arrays are copied because the next run may reuse their memory.
        (answer,) = result.answers
        return Row(length=length, request=request, alone={name: array.copy() for name, array in answer.items()})

    def _learn(self, tokens: int, started: float) -> None:
        if tokens >= self._largest:  # in small runs, the fixed cost of a run is most of the time
            self._largest, self._token_s = tokens, (self._clock() - started) / tokens

    def _run(self, requests: Sequence[InferRequest]) -> Answered | Failed:
        pause()
        try:
            return run_batch(self.version.backends[0], list(requests))[0]
        except InstanceLostError as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> ModelLoadError:
        return ModelLoadError(f"{self.version.files.model}: the device failed while padding was tried out: {error}")

    def _as_request(self, inputs: Tensors) -> InferRequest:
        interface = self.version.interface
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
        first = self.settings.rule.inputs[0]
        if padded is not first or dtype.kind == "b":
            return np.ones(shape, dtype)  # 1 marks used places in a mask, and is a valid token type
        values = np.array([value for value in range(1, self._tokens) if value != first.value])
        tokens = random.choice(values, shape)
        if length > 1:
            tokens.flat[0] = values[-1]  # tries the largest token in each row, so that a later refusal is due to the length
        return tokens.astype(dtype)

    def _recorded(self) -> Iterator[Tensors]:
        """Yield the rows that `export` has recorded, if they fit the model as clients see it."""
        recorded = vouched_samples(self.version)
        if recorded is None:
            return
        specs = self.version.interface.inputs
        counts = {len(array) if array.ndim else 0 for array in recorded.inputs.values()}
        if len(counts) == 1 and all(spec.mismatch(recorded.inputs[spec.name].shape) is None for spec in specs):
            arrays = {spec.name: recorded.inputs[spec.name].astype(spec.datatype.array_dtype) for spec in specs}
            for row in range(*counts):
                yield {name: array[row : row + 1] for name, array in arrays.items()}

    def _tokens_of(self, sample: Tensors) -> Array:
        """Return for each place of a sample whether its first padded input differs from the padding; empty for a sample of no
        length.
        """
        first, length = self.settings.rule.inputs[0], self._length(sample)
        by_place = np.moveaxis(sample[first.name][:1], first.axes[0], 0).reshape(length, -1) if length else np.zeros((0, 1))
        return np.asarray((by_place != first.value).any(axis=1))

    def _without_padding(self, sample: Tensors) -> Tensors:
        """Return one row of a sample, from its first token to its last."""
        tokens = np.flatnonzero(self._tokens_of(sample))
        return self._cut(sample, np.arange(tokens[0], tokens[-1] + 1))

    def _cut(self, sample: Tensors, places: Array) -> dict[str, Array]:
        """Return one row of a sample, with only these places."""
        row = {name: array[:1] for name, array in sample.items()}
        for padded in self.settings.rule.inputs:
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
        for padded in self.settings.rule.inputs:
            by_place = np.moveaxis(sample[padded.name][:1], padded.axes[0], 0).reshape(len(used), -1)
            used += (by_place != padded.value).any(axis=1)
        return np.flatnonzero(used == used.max())


def _drop(_: object) -> None:
    """Discard an answer that no client waits for."""
