"""Proof that a model may be padded, before it serves: a padded row must get what it gets alone.

A model may ignore its mask, or take a mean over all places; then padding would change answers. So rows of two lengths are
computed alone and together, as requests are, and compared. What batches cost is measured at the same time, so that the first
requests are batched well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from halfserve.serve.engine.backend import CALLING_PROVIDERS
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.config.padding import KEY, padding_settings
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.errors import InstanceLostError, ModelLoadError
from halfserve.serve.engine.execution.assembly import padded_inputs
from halfserve.serve.engine.execution.batch import Answered, run_batch
from halfserve.serve.engine.precision_guard.loading import error_budget
from halfserve.serve.engine.precision_guard.tally import compare
from halfserve.serve.engine.queueing.batch_costs import BatchCosts, Measured
from halfserve.serve.engine.queueing.mixed_lengths import MixedLengths
from halfserve.serve.engine.queueing.padding import Padding
from halfserve.serve.engine.repository.loaded_version import LoadedVersion
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors, TensorSpec
from halfserve.serve.model_control.warm_up import WarmUpRequest, declared_requests

logger = logging.getLogger(__name__)

PAIRS = ((5, 16), (3, 29))  # lengths that are computed alone and together
MEASURED_LENGTHS = (4, 16, 64)
MEASURED_ROWS = (1, 8)
ENOUGH_S = 0.05  # no further batch is measured after one of this length and FEWEST in all
FEWEST = 4
TIMES = 3  # that each is measured; the shortest counts
TOKENS = 1000  # that are tried first on the CPU
FEW_TOKENS = 4  # likewise where the model has fewer


class _NotProvedError(Exception):
    """Why a model is not padded."""


def proved_padding(version: LoadedVersion, budget_s: float) -> MixedLengths | None:
    """What chooses and pads requests of different lengths; None where the configuration does not ask for it.

    Also None, with a warning, where padding changes the model's answers by more than the certificate's budget, or where that
    cannot be found out within `budget_s` seconds. The version has been warmed up.

    Raises:
        ModelLoadError: the configuration's padding does not fit the model, or the device was lost.
    """
    settings = padding_settings(version.config, version.interface)
    if settings is None:
        return None
    padding = Padding(settings, [spec.name for spec in version.interface.inputs])
    try:
        seed = _proved(_Trial(version, padding, time.monotonic() + budget_s))
    except _NotProvedError as error:
        label = f"{version.files.name}/{version.files.version}"
        said = "%s: it is served without padding, so requests of different lengths do not share batches: %s"
        logger.warning(said, label, error, extra={"model": label})
        del version.config.parameters[KEY]  # clients see what is in force
        return None
    return MixedLengths(padding, BatchCosts(seed))


def _proved(trial: _Trial) -> list[Measured]:
    """What some batches cost, once padding has been shown to change no answer."""
    version = trial.version
    if own_parameter(version.config, "halfserve.warm_up") is False:
        raise _NotProvedError("halfserve.warm_up is off, and whether padding changes its answers was not tried")
    if version.invariance is not None and not version.invariance.is_safe:
        raise _NotProvedError("the rows of a batch depend on each other")
    budget = error_budget(version.files.model)
    trial.find_values()
    for seed, (short, long) in enumerate(PAIRS):
        rows = [trial.request(short, 1, seed), trial.request(long, 1, seed + 1)]
        alone = [trial.answer([request])[0] for request in rows]
        for reference, answer in zip(alone, trial.answer(rows), strict=True):
            _require_same(reference, answer, budget)
        trial.require_finite(rows, alone)
    if version.invariance is not None:
        version.invariance.is_doubtful = False  # these rows have shared batches
    return list(_measured(trial))


def _require_same(alone: Tensors, padded: Tensors, budget: float) -> None:
    for name, reference in alone.items():
        if padded[name].shape != reference.shape:
            raise _NotProvedError(
                f"output {name!r} of a padded row has shape {list(padded[name].shape)}, alone {list(reference.shape)}; name "
                f"the axis to cut back after '->' in {KEY}"
            )
        distance = compare(padded[name], reference)
        error = distance.error / distance.scale if distance.scale else distance.error
        if error > budget:
            raise _NotProvedError(
                f"output {name!r} of a padded row differs from what the row gets alone by {error:.2g} of its largest value, "
                f"{budget:g} is allowed; does the model ignore its mask?"
            )
        if reference.dtype.kind in "iub" and distance.agreeing < distance.rows:
            raise _NotProvedError(
                f"output {name!r} of a padded row is not what the row gets alone; does the model ignore its mask?"
            )


def _measured(trial: _Trial) -> Iterator[Measured]:
    """Seconds of batches of rising size, until one takes long or the time is over."""
    settings = trial.padding.settings
    most = trial.version.config.max_batch_size
    sizes = [(rows, length) for length in settings.buckets or MEASURED_LENGTHS for rows in MEASURED_ROWS if rows <= most]
    for number, (rows, length) in enumerate(sorted(sizes, key=lambda size: size[0] * size[1]), 1):
        if settings.max_tokens is not None and rows > 1 and rows * length > settings.max_tokens:
            continue
        try:
            requests = [trial.request(length, 1, seed) for seed in range(rows)]
            seconds = min(trial.seconds(requests) for _ in range(TIMES))
        except _NotProvedError:
            return  # longer than the model takes, or no time left
        yield rows, length, seconds
        if seconds > ENOUGH_S and number >= FEWEST:
            return


@dataclass
class _Trial:
    """Runs made-up requests on a version's first copy.

    Attributes:
        version: to run.
        padding: of its requests.
        until: when to stop, on time.monotonic()'s clock.
        tokens: integers in the first padded input are below this; see `find_values`.
    """

    version: LoadedVersion
    padding: Padding
    until: float
    tokens: int = FEW_TOKENS

    def __post_init__(self) -> None:
        declared = declared_requests(self.version)
        self._like: WarmUpRequest | None = declared[0] if declared else None

    def find_values(self) -> None:
        """Find tokens that the model takes: more of them show more, but its vocabulary is not known.

        Raises:
            _NotProvedError: it takes none of those tried.
        """
        # An index out of range breaks a device for the process.
        takes_any = self.version.backends[0].provider in CALLING_PROVIDERS
        tries = (TOKENS, FEW_TOKENS) if takes_any and self._like is None else (FEW_TOKENS,)
        for tokens in tries:
            self.tokens = tokens
            try:
                self.run([self.request(PAIRS[0][1], 1, 0)])
            except _NotProvedError as error:
                failure = error
            else:
                return
        raise failure

    def request(self, length: int, rows: int, seed: int) -> InferRequest:
        """A request of this length."""
        random = np.random.default_rng(seed)
        specs = self.version.interface.inputs
        inputs = {spec.name: spec.to_model(np.repeat(self._row(spec, length, random), rows, axis=0)) for spec in specs}
        shapes = tuple(inputs[spec.name].shape[1:] for spec in specs)
        bucket = shapes[0] if len(shapes) == 1 else shapes
        outputs = tuple(spec.name for spec in self.version.interface.outputs)
        return InferRequest(inputs, outputs, rows, bucket, None, _drop)

    def _row(self, spec: TensorSpec, length: int, random: np.random.Generator) -> Array:
        padded = self.padding.inputs.get(spec.name)
        if self._like is not None:
            array = self._like.inputs[spec.name][:1]
            for axis in padded.axes if padded is not None else ():
                places = (np.arange(length) + int(random.integers(array.shape[axis]))) % array.shape[axis]
                array = np.take(array, places, axis)
            return array
        sizes = [length if padded is not None and axis in padded.axes else size for axis, size in enumerate(spec.shape)]
        shape = (1, *(1 if size == ANY_SIZE else size for size in sizes[1:]))
        dtype = spec.datatype.array_dtype
        if dtype.hasobject:
            return np.full(shape, b"1", object)
        if dtype.kind not in "iub":
            return np.asarray(random.standard_normal(shape)).astype(dtype)
        first = self.padding.settings.rule.inputs[0]
        if padded is not first or dtype.kind == "b":
            return np.ones(shape, dtype)  # a mask's own places, a valid type
        values = [value for value in range(1, self.tokens) if value != first.value]
        return random.choice(np.array(values), shape).astype(dtype)

    def run(self, requests: Sequence[InferRequest]) -> Answered:
        """Compute them together.

        Raises:
            _NotProvedError: they cannot be computed, or the time is over.
            ModelLoadError: the device was lost.
        """
        if time.monotonic() > self.until:
            raise _NotProvedError("finding out whether padding changes its answers takes too long")
        pause()
        version = self.version
        try:
            result = run_batch(version.backends[0], list(requests), padding=self.padding)[0]
        except InstanceLostError as error:
            raise ModelLoadError(f"{version.files.model}: the device failed while padding was tried out: {error}") from None
        if not isinstance(result, Answered):
            raise _NotProvedError(f"it does not take what can be guessed ({result.error}); describe a request in model_warmup")
        if len(result.requests) < len(requests):
            raise _NotProvedError("requests of different lengths cannot be computed together")
        return result

    def answer(self, requests: Sequence[InferRequest]) -> list[Tensors]:
        """Their answers when they are computed together, as copies: the next batch may reuse the memory."""
        return [{name: array.copy() for name, array in answer.items()} for answer in self.run(requests).answers]

    def require_finite(self, requests: Sequence[InferRequest], answers: Sequence[Tensors]) -> None:
        """Check that places which are cut off are finite where the answers are: the precision guard looks at whole batches.

        Raises:
            _NotProvedError: they are not.
        """
        backend, length = self.version.backends[0], self.padding.common_length(requests)
        outputs = backend.run(padded_inputs(backend, requests, len(requests), length, self.padding))
        for name, array in outputs.items():
            if not _is_finite(array) and all(_is_finite(answer[name]) for answer in answers):
                raise _NotProvedError(f"output {name!r} is NaN or infinite in padded places")

    def seconds(self, requests: Sequence[InferRequest]) -> float:
        """Seconds that a batch takes."""
        times = self.run(requests).times
        return (times.split - times.started) / 1e9


def _is_finite(array: Array) -> bool:
    return array.dtype.kind in "iubO" or bool(np.isfinite(array.astype(np.float32, copy=False)).all())


def _drop(_: object) -> None:
    """Take an answer that no client waits for."""
