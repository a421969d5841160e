"""Proof that a model may be padded, before it serves: a padded row must get the answer that it gets alone and unpadded.

A model may ignore its mask, mask weakly, or compute long rows in another way; then padding would change answers. So short rows
are computed alone, and beside long ones, at several lengths up to the longest that the model takes or that the time allows.
Longer requests are not padded. Afterwards the duration of batches is measured, so that the first requests are batched well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.padding.mixed_lengths import BatchCosts, Measured, MixedLengths
from halfserve.serve.engine.padding.padding import Padding, PaddingRule, PaddingSettings
from halfserve.serve.engine.padding.padding_rule import BUCKETS_KEY, KEY, PROVED_KEY, TOKENS_KEY, require_fit
from halfserve.serve.engine.precision_guard.column_errors import OutputErrors
from halfserve.serve.engine.precision_guard.loading import error_budget
from halfserve.serve.engine.precision_guard.tally import is_floating
from halfserve.serve.engine.tensors import Array, Tensors
from halfserve.serve.trials.padding_runs import NotProvedError, OutOfTimeError, PaddingRuns, Row
from halfserve.serve.trials.tried_version import TriedVersion

FIRST_LENGTH = 8
STEP, SHORT_STEP = 4, 2  # factor from one tried length to the next
# The longest length to try without a setting: longer rows gain little from a batch, and may take much memory.
LONGEST = 1024
PROOF_SHARE = 0.75  # part of the time that the proof may take; the rest is for measuring
MEASURED_LENGTHS = (4, 16, 64)
MEASURED_ROWS = (1, 8)
ENOUGH_S = 0.05  # measuring ends after FEWEST batches once a batch takes this long
FEWEST = 4
TIMES = 3  # measurements of each batch; the shortest counts


def proved_padding(tried: TriedVersion) -> MixedLengths | None:
    """Return the component that chooses and pads requests of different lengths; None if the configuration does not ask for it.

    None also, with a warning, if padding changes the model's answers by more than the certificate's budget, or if that cannot
    be determined within the budget. Buckets that are longer than the model takes, or than could be tried in that time,
    are replaced, with a warning. The version must be warmed up.

    Raises:
        ModelLoadError: the configuration's padding does not fit the model, or the device was lost.
    """
    model = tried.model
    settings = _configured(model)
    if settings is None:
        return None
    began, budget_s = tried.clock(), tried.budget_s
    runs = PaddingRuns(tried, settings, began + budget_s * PROOF_SHARE)
    try:
        reached = _proved(tried, runs)
    except NotProvedError as error:
        text = "%s: it is served without padding, so requests of different lengths do not share batches: %s"
        tried.warn(text, error)
        for key in (KEY, BUCKETS_KEY, TOKENS_KEY):
            model.config.parameters.pop(key, None)  # clients see the settings in force
        return None
    settings = _in_force(tried, settings, reached)
    runs.until = began + budget_s
    padding = Padding(settings, [spec.name for spec in model.interface.inputs])
    return MixedLengths(padding, BatchCosts(list(_measured(runs, settings))))


def _configured(model: Model) -> PaddingSettings | None:
    """Read the padding that a configuration asks for; None for none. Raises as `proved_padding`."""
    config, where = model.config, f"model {model.config.name!r}"
    rule: PaddingRule | None = own_parameter(config, KEY, where)
    if rule is None:
        idle = [key for key in (BUCKETS_KEY, TOKENS_KEY) if key in config.parameters]
        if idle:
            raise ModelLoadError(f"{where}: parameter {idle[0]!r} has no effect without {KEY!r}; add that, or remove it")
        return None
    if not config.max_batch_size:
        raise ModelLoadError(f"{where}: {KEY} is set, but the model has no batch dimension; remove it")
    require_fit(rule, model.interface, where)
    buckets: tuple[int, ...] | None = own_parameter(config, BUCKETS_KEY, where)
    return PaddingSettings(rule=rule, buckets=buckets or (), max_tokens=own_parameter(config, TOKENS_KEY, where))


@dataclass(frozen=True)
class _Reached:
    """The longest length for which padding was proved, and whether the proof ended there for want of time."""

    length: int
    is_cut_short: bool = False


def _proved(tried: TriedVersion, runs: PaddingRuns) -> _Reached:
    """Compare rows that are padded to rising lengths with their answers alone; NotProvedError says what is not proved."""
    invariance = tried.model.invariance
    if tried.is_off:
        raise NotProvedError("halfserve.warm_up is off, and whether padding changes its answers was not tried")
    if invariance is not None and not invariance.is_safe:
        raise NotProvedError("the rows of a batch depend on each other")
    proof = _Proof(runs)
    is_cut_short = False
    try:
        proof.rows = runs.short_rows()
        for length in proof.lengths():
            if not proof.reach(length):
                break
    except OutOfTimeError:
        if not proof.length:
            raise NotProvedError("finding out whether padding changes its answers takes too long") from None
        # Nothing is left to prove for a model that takes no longer row.
        is_cut_short = bool(runs.rows(proof.length + 1, 0))
    if not proof.length:
        raise NotProvedError(f"it does not take what can be guessed ({runs.refusal}); describe a request in model_warmup")
    if invariance is not None:
        invariance.is_doubtful = False  # these rows have shared batches
    return _Reached(proof.length, is_cut_short)


class _Proof:
    """Compares the answers to padded rows with the answers that the rows get alone.

    Attributes:
        length: the longest length proved so far.
        rows: rows that share batches with the next, longer rows, in rising length.
    """

    def __init__(self, runs: PaddingRuns) -> None:
        self.length = 0
        self.rows: list[Row] = []
        self._runs = runs
        self._budget = error_budget(runs.model.path or runs.model.declared.source)
        cut = runs.settings.rule.cut
        names = [spec.name for spec in runs.model.interface.outputs]
        self._errors = {name: OutputErrors[tuple[int, int]]([axis for named, axis in cut if named == name]) for name in names}

    def lengths(self) -> Iterator[int]:
        """Yield the lengths to pad rows to, in rising order; with smaller steps if the time is short."""
        settings = self._runs.settings
        if settings.buckets:
            yield from settings.buckets
            return
        # A batch with padding has at least two rows.
        longest = LONGEST if settings.max_tokens is None else max(1, settings.max_tokens // 2)
        length = min(FIRST_LENGTH, longest)
        yield length
        while length < longest:
            step = STEP if self._runs.has_time(self._tokens(STEP * length)) else SHORT_STEP
            length = min(step * length, longest)
            yield length

    def _tokens(self, length: int) -> int:
        """Estimate the tokens that `reach` computes: the rows so far and a longer one in a batch, and the longer one alone."""
        return length * (len(self.rows) + 2)

    def reach(self, asked: int) -> bool:
        """Pad rows to a length, or to the longest below it that the model takes; returns whether a longer length may be
        possible.
        """
        runs = self._runs
        runs.require_time(self._tokens(asked))
        length, long = asked, runs.rows(asked, asked)
        short = [row for row in self.rows if row.length <= asked]
        if not long and not short:
            return True
        if not long:
            length = runs.longest_taken(short[-1].length, asked)
            long = runs.rows(length, length)
        if length > self.length:
            self._add([*short, *runs.sample_rows(self.length, length), *long], length)
            self.length = length
        self.rows = [*runs.rows(min(row.length for row in [*short, *long]), length), *long]
        return length == asked

    def _add(self, rows: Sequence[Row], length: int) -> None:
        settings = self._runs.settings
        most = self._runs.model.config.max_batch_size
        if settings.max_tokens is not None:
            most = max(1, min(most, settings.max_tokens // length))
        for start in range(0, len(rows), most):
            batch = rows[start : start + most]
            outputs, answers = self._runs.padded(batch, length)
            for row, answer in zip(batch, answers, strict=True):
                for name, alone in row.alone.items():
                    self._compare(name, alone, answer[name], (row.length, length))
            _require_finite(outputs, [row.alone for row in batch])
        self._require_within_budget()

    def _compare(self, name: str, alone: Array, padded: Array, lengths: tuple[int, int]) -> None:
        if padded.shape != alone.shape:
            shapes = f"has shape {list(padded.shape)}, alone {list(alone.shape)}"
            raise NotProvedError(
                f"output {name!r} {_of_a_row(lengths)} {shapes}; name the axis to cut back after '->' in {KEY}"
            )
        if is_floating(alone):
            self._errors[name].add(alone, padded, lengths)
        elif not np.array_equal(padded, alone):
            raise NotProvedError(
                f"output {name!r} {_of_a_row(lengths)} is not what the row gets alone; does the model ignore its mask?"
            )

    def _require_within_budget(self) -> None:
        for name, errors in self._errors.items():
            worst = errors.worst()
            if worst is not None and not worst.relative <= self._budget:
                where = f", column {worst.column} of axis {worst.axis}," if worst.axis else ""
                size = f"{worst.scale:.3g}, the largest value of {'columns of its size' if where else 'the output'}"
                raise NotProvedError(
                    f"output {name!r}{where} {_of_a_row(worst.label)} differs from what the row gets alone by "
                    f"{worst.relative:.2g} of {size}; the error budget allows {self._budget:g}; does the model ignore its mask?"
                )


def _of_a_row(lengths: tuple[int, int]) -> str:
    return f"of a row of length {lengths[0]} padded to {lengths[1]}"


def _require_finite(outputs: Tensors, alone: Sequence[Tensors]) -> None:
    """Check that padded places are finite if the answers are, because the precision guard looks at whole batches."""
    for name, array in outputs.items():
        if not _is_finite(array) and all(_is_finite(answer[name]) for answer in alone):
            raise NotProvedError(f"output {name!r} is NaN or infinite in padded places")


def _is_finite(array: Array) -> bool:
    return not is_floating(array) or bool(np.isfinite(array.astype(np.float32, copy=False)).all())


def _in_force(tried: TriedVersion, settings: PaddingSettings, reached: _Reached) -> PaddingSettings:
    """Return the settings with the proved lengths, and write them into the configuration, where clients see them."""
    parameters, budget_s = tried.model.config.parameters, tried.budget_s
    longest = reached.length
    buckets = tuple(bucket for bucket in settings.buckets if bucket <= longest)
    if settings.buckets and longest not in buckets:
        buckets += (longest,)
    parameters[PROVED_KEY].string_value = str(longest)
    beyond = "longer requests are answered, and share batches only with requests of their own length"
    if buckets != settings.buckets:
        given, kept = (",".join(map(str, lengths)) for lengths in (settings.buckets, buckets))
        parameters[BUCKETS_KEY].string_value = kept
        reason = (
            f"were not all tried in {budget_s:g} s (--warm-up-seconds)"
            if reached.is_cut_short
            else f"exceed the model, which takes {longest}"
        )
        tried.warn("%s: the padding buckets %s %s; %s are in force, and %s", given, reason, kept, beyond)
    elif reached.is_cut_short:
        text = "%s: in %g s, padding was proved up to length %d; %s; raise --warm-up-seconds to prove more"
        tried.warn(text, budget_s, longest, beyond)
    return replace(settings, buckets=buckets, longest=longest)


def _measured(runs: PaddingRuns, settings: PaddingSettings) -> Iterator[Measured]:
    """Yield rows, length and seconds of batches of rising size, until one takes long or the time is over."""
    most = runs.model.config.max_batch_size
    sizes = [(rows, length) for length in settings.buckets or MEASURED_LENGTHS for rows in MEASURED_ROWS if rows <= most]
    for number, (rows, length) in enumerate(sorted(sizes, key=lambda size: size[0] * size[1]), 1):
        if settings.max_tokens is not None and rows > 1 and rows * length > settings.max_tokens:
            continue
        try:
            requests = [runs.requests.of_length(length, seed) for seed in range(rows)]
            seconds = min(runs.seconds(requests, length) for _ in range(TIMES))
        except (NotProvedError, OutOfTimeError):
            return  # the length is over the model's limit, or no time is left
        yield rows, length, seconds
        if seconds > ENOUGH_S and number >= FEWEST:
            return
