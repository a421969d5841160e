"""The model's answers to the rows on which padding is tried: alone and unpadded, and padded together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from halfserve.serve.engine.backend import CALLING_PROVIDERS
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.errors import InstanceLostError, ModelLoadError, is_device_lost
from halfserve.serve.engine.execution.assembly import pad_rows, padded_inputs
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.padding.padding import Padding, PaddingSettings
from halfserve.serve.engine.queueing.pace import padded_rows
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.trials.padding_rows import FEW_TOKENS, PaddingRows
from halfserve.serve.trials.tried_version import TriedVersion

SHORTEST = (1, 2, 4, 8)  # the first lengths to try
EACH = 2  # rows of each length, from which together the size of an output's columns is determined
TOKENS = 1000  # made-up tokens are below this if the model takes them all on the CPU


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


class PaddingRuns:
    """Runs rows on a version's first copy.

    Methods that run the model raise OutOfTimeError if not enough time is left, and ModelLoadError if the device is lost.

    Attributes:
        model: the loaded version.
        settings: its padding; the buckets and the longest length are not used.
        until: end of the allowed time, in seconds of the clock.
        refusal: the model's latest error for a single row.
        requests: makes the rows' requests.
    """

    def __init__(self, tried: TriedVersion, settings: PaddingSettings, until: float) -> None:
        self.model = tried.model
        self.settings = settings
        self.until = until
        self.refusal = ""
        self.requests = PaddingRows(tried, settings)
        self._clock = tried.clock
        self._largest, self._token_s = 0, 0.0  # tokens of the largest run, and seconds per token in it

    def short_rows(self) -> list[Row]:
        """Return EACH rows of every length in SHORTEST that the model takes, in rising length."""
        if self.model.backends[0].provider in CALLING_PROVIDERS and not self.requests.has_samples:
            self.requests.token_limit = TOKENS
            if not self.rows(SHORTEST[-1], 0):
                self.requests.token_limit = FEW_TOKENS
        rows: list[Row] = []
        for length in SHORTEST:
            for seed in range(EACH):
                self.require_time(length)
                rows += self.rows(length, seed)
        return rows

    def rows(self, length: int, seed: int) -> list[Row]:
        """Return rows of a length with their answers alone: one row for each value that an integer of the row may have.

        There are none if the model does not take the length. A value that it refuses while it takes another is not tried again.
        """
        taken = {}
        for says_length in self.requests.says_length:
            row = self._answered(length, self.requests.of_length(length, seed, says_length=says_length))
            if row is not None:
                taken[says_length] = row
        if taken:
            self.requests.says_length = tuple(taken)
        return list(taken.values())

    def sample_rows(self, above: int, most: int) -> Iterator[Row]:
        """Yield the samples themselves, of lengths above `above` and up to `most`."""
        for length, request in self.requests.samples(above, most):
            self.require_time(length)
            row = self._answered(length, request)
            if row is not None:
                yield row

    def longest_taken(self, taken: int, refused: int) -> int:
        """Return the longest length that the model takes: at least `taken`, and below `refused`, which it does not take."""
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
        """
        sizes = self.model.limits.padded_rows
        count = padded_rows(len(rows), sizes) if sizes else len(rows)
        self.require_time(count * length)
        backend, requests = self.model.backends[0], [row.request for row in rows]
        padding = Padding(replace(self.settings, buckets=(length,)), [spec.name for spec in self.model.interface.inputs])
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
            return run_batch(self.model.backends[0], list(requests))[0]
        except InstanceLostError as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> ModelLoadError:
        return ModelLoadError(f"{self.model.path}: the device failed while padding was tried out: {error}")
