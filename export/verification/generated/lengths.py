"""Longer samples: what a sum over tokens or pixels does at 2,048 of them is not seen at 16.

The user's first sample is repeated along the dimensions whose size may vary, all by the same factor, up to the longest size
that the model takes: that of its position table, or else `TARGETS`. Which sizes that are is tried with the float32 model in a
child process, within bounds of time and of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile
from halfserve.export.verification.generated.adversarial import AdversarialCase, lengthened
from halfserve.export.verification.samples import Array, Feed, Feeds, inputs_of, is_batched, make_feeds
from halfserve.export.verification.samples import Inputs as GivenInputs
from halfserve.export.verification.sandbox import Sandbox, at_first_level, on_disk

TARGETS = (512, 2048)
LONGEST_TABLE = 1 << 14
MOST_SECONDS = 3.0  # longest time of the float32 model on one sample
MOST_NUMBERS = 1 << 23  # most numbers in its outputs
SILENCE_SECONDS = 60.0
_RUNG = 4  # a size is tried after one that is not more times smaller, whose cost tells that of the next
_TABLES_TRIED = 4
_HALVINGS = 5


@dataclass(frozen=True, kw_only=True)
class LongerSizes:
    """Sizes to verify a model on beside those of its samples.

    Attributes:
        sizes: The sizes of the dimensions that vary, by the keys of `Input.keys`, in rising order.
        note: Why no larger size is among them; empty where the largest one of `TARGETS` or of a table is.
    """

    sizes: tuple[Mapping[str, int], ...] = ()
    note: str = ""


def longer_sizes(model: ModelFile, given: GivenInputs, batch_size: int = 32) -> LongerSizes:
    """Find the sizes, larger than those of the samples, that a float32 model takes within the bounds.

    Raises:
        ExportError: The samples do not fit the model.
    """
    varying = VaryingSizes(model.outline)
    feeds = make_feeds(varying.inputs, given, batch_size)
    if not varying.of(varying.longest(feeds)):
        return LongerSizes()
    with Sandbox(silence_seconds=SILENCE_SECONDS) as sandbox:
        return _Attempts(model, sandbox, varying, feeds).found()


class VaryingSizes:
    """The dimensions of a model's inputs whose size may vary, the batch's left out.

    The first dimension of all inputs counts samples, unless an output has another one: a model that sums over its rows takes
    one sample.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.inputs = inputs_of(model)
        self._rows_are_samples = is_batched(self.inputs) and not any(map(_has_fixed_rows, model.graph.output))
        first = 1 if self._rows_are_samples else 0
        self._places = [(value, axis) for value in self.inputs for axis in range(first, len(value.dims or ()))]
        self._places = [(value, axis) for value, axis in self._places if value.keys(axis)]

    @property
    def most_axes(self) -> int:
        """The largest number of such dimensions in one input: 2 for pictures, whose area grows as the square of their size."""
        names = [value.name for value, _ in self._places]
        return max(map(names.count, names), default=1)

    def of(self, feed: Feed) -> dict[str, int]:
        """Return the sizes in a batch, by the last of `Input.keys`, without sizes of 0."""
        sizes = {value.keys(axis)[-1]: feed[value.name].shape[axis] for value, axis in self._places if value.name in feed}
        return {name: size for name, size in sizes.items() if size}

    def tried(self, feeds: Sequence[Feed]) -> dict[str, tuple[int, ...]]:
        """Return all sizes in these batches, in rising order."""
        found: dict[str, set[int]] = {}
        for feed in feeds:
            for name, size in self.of(feed).items():
                found.setdefault(name, set()).add(size)
        return {name: tuple(sorted(sizes)) for name, sizes in found.items()}

    def longest(self, feeds: Feeds) -> Feed:
        """Return the batch with the largest size, its first sample alone where batches may have any size."""
        feed = max(feeds.batches, key=lambda each: max(self.of(each).values(), default=0), default={})
        cut = self._rows_are_samples and feeds.resizable and all(array.ndim for array in feed.values())
        return {name: array[:1] for name, array in feed.items()} if cut else feed

    def cases(self, feeds: Feeds, sizes: Sequence[Mapping[str, int]]) -> list[AdversarialCase]:
        """Return the longest batch with each of the sizes.

        Raises:
            ExportError: A batch does not fit in memory.
        """
        base = self.longest(feeds)
        longer = [(max(size.values(), default=0), lengthened(self.inputs, base, size)) for size in sizes]
        return [AdversarialCase(name=f"length {size}", feed=feed) for size, feed in longer if feed is not None]


def _has_fixed_rows(output: onnx.ValueInfoProto) -> bool:
    tensor = output.type.tensor_type
    return tensor.HasField("shape") and (not tensor.shape.dim or tensor.shape.dim[0].dim_value > 0)


class _Attempts:
    """Runs of a float32 model on one sample of rising sizes."""

    def __init__(self, model: ModelFile, sandbox: Sandbox, varying: VaryingSizes, feeds: Feeds) -> None:
        self._path, self._sandbox = on_disk(model, sandbox), sandbox
        self._varying, self._feeds = varying, feeds
        self._tables = set(_table_sizes(model))
        self._own = varying.of(varying.longest(feeds))
        self._shortest = self._ran = max(self._own.values())
        self._cost = (0.0, 0)  # of the largest size that ran: seconds, and numbers in the outputs

    def found(self) -> LongerSizes:
        if not self._runs(self._shortest):
            return LongerSizes()  # the comparison reports it
        kept: list[int] = []
        note = ""
        for target in [*TARGETS, *self._longer_tables()]:
            if target <= self._ran:
                continue
            note = self._climb_to(target)
            if note:
                break
            kept.append(target)
        if self._ran > max(kept, default=self._shortest):
            kept.append(self._ran)
        return LongerSizes(sizes=tuple(self._scaled(size) for size in kept), note=note)

    def _climb_to(self, target: int) -> str:
        """Try sizes up to the target; returns why it was not reached, else an empty text."""
        while self._ran < target:
            size = min(target, self._ran * _RUNG)
            if self._costs_too_much(size):
                return f"samples of up to {self._ran} were tried: on longer ones float32 takes too long or answers too much"
            if not self._runs(size):
                self._narrow(size)
                return f"samples of up to {self._ran} were tried: float32 itself fails on longer ones, such as {size}"
        return ""

    def _narrow(self, failing: int) -> None:
        """Find the largest size below one that fails: that of a table, or else about the middle again and again."""
        if self._ran in self._tables:
            return
        sizes = {size - less for size in self._tables for less in (0, 2)}  # some tables begin with two rows for padding
        for size in sorted((size for size in sizes if self._ran < size < failing), reverse=True)[:_TABLES_TRIED]:
            if self._runs(size):
                return
        for _ in range(_HALVINGS):
            middle = (self._ran + failing) // 2
            if middle > self._ran and not self._runs(middle):
                failing = middle

    def _runs(self, size: int) -> bool:
        """Return whether the model answers a sample of this size; then its cost is noted."""
        try:
            cases = self._varying.cases(self._feeds, [self._scaled(size)])
            feed = cases[0].feed if cases else self._varying.longest(self._feeds)
            with self._sandbox.discarding():
                done = at_first_level(self._path, self._sandbox, self._sandbox.stage([feed]), what="the float32 model")
        except ExportError:  # it does not fit in memory, or the model does not open
            return False
        if done.trouble is not None or not done.batches or isinstance(done.batches[0], str):
            return False
        arrays = [array for value in done.batches[0] for array in (value if isinstance(value, list) else [value])]
        self._cost, self._ran = (done.seconds, sum(_count(array) for array in arrays)), size
        return True

    def _costs_too_much(self, size: int) -> bool:
        """Return whether a size is over the bounds if the time grows as the square of the samples' own growth."""
        seconds, numbers = self._cost
        growth = (size / self._ran) ** self._varying.most_axes
        return seconds * growth**2 > MOST_SECONDS or numbers * growth > MOST_NUMBERS

    def _scaled(self, size: int) -> dict[str, int]:
        return {name: max(1, round(own * size / self._shortest)) for name, own in self._own.items()}

    def _longer_tables(self) -> list[int]:
        return sorted(size for size in self._tables if TARGETS[-1] < size <= LONGEST_TABLE)[:1]


def _count(array: Array | None) -> int:
    return 0 if array is None else array.size


def _table_sizes(model: ModelFile) -> Iterator[int]:
    """Sizes of the weights that a model takes rows of, such as position tables."""
    weights = {tensor.name: list(tensor.dims) for tensor in model.outline.graph.initializer}
    for node in model.outline.graph.node:
        if node.op_type in ("Gather", "Slice") and not node.domain:
            yield from weights.get(node.input[0], ())
