"""The record of a training run: which operation ran in which dtype and range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from amp_core.recorder.entry import Direction, Entry, EntryKey
from amp_core.recorder.magnitudes import Magnitudes

FORMAT = "halfserve.record"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was seen in the recorded steps of a run.

    Attributes:
        entries: In the order in which they were first seen.
        steps: How many steps were recorded.
    """

    entries: tuple[Entry, ...] = ()
    steps: int = 0

    def risky(self) -> tuple[Entry, ...]:
        """The entries with numbers that float16 turns into infinity or zero, worst first.

        What overflows (or is infinite or NaN already) comes before what only underflows, each by the share of the elements.
        """
        found = [entry for entry in self.entries if entry.magnitudes.lost_above or entry.magnitudes.lost_below]
        return tuple(sorted(found, key=lambda entry: (entry.magnitudes.lost_above, entry.magnitudes.lost_below), reverse=True))

    def modules(self) -> tuple[str, ...]:
        """The paths of all modules in which something was seen, in the order in which they first ran.

        Where only gradients were seen (a parameter that another module computes with), a module follows the one around it.
        """
        ran = list(dict.fromkeys(entry.module for entry in self.entries if entry.direction == "forward"))
        for module in dict.fromkeys(entry.module for entry in self.entries if entry.module not in ran):
            around = max((path for path in ran if module.startswith(f"{path}.")), key=len, default=None)
            ran.insert(len(ran) if around is None else ran.index(around) + 1, module)
        return tuple(ran)

    def ranges(self, direction: Direction) -> dict[str, Magnitudes]:
        """The magnitudes of everything that the operations of each module gave out, by the module's path.

        A module's range holds what ran in the module itself; what ran in its children is theirs.
        """
        parts: dict[str, list[Magnitudes]] = {}
        for entry in self.entries:
            if entry.direction == direction:
                parts.setdefault(entry.module, []).append(entry.magnitudes)
        return {module: Magnitudes.of_all(of_module) for module, of_module in parts.items()}

    def unscaled_gradients(self) -> dict[str, tuple[float, float]]:
        """The smallest and the largest magnitude of each module's backward with the loss scale taken out, by its path."""
        found: dict[str, list[float]] = {}
        for entry in self.entries:
            extremes = (entry.unscaled_smallest, entry.unscaled_largest)
            if entry.direction == "backward":
                found.setdefault(entry.module, []).extend(extreme for extreme in extremes if extreme)
        return {module: (min(extremes), max(extremes)) for module, extremes in found.items() if extremes}

    def merged(self, other: Record) -> Record:
        """The record of both records' steps."""
        return Record(entries=merge((*self.entries, *other.entries)), steps=self.steps + other.steps)

    def to_dict(self) -> dict[str, Any]:
        """The record in plain values, for JSON and for a checkpoint that `torch.load(weights_only=True)` reads."""
        entries = [entry.to_dict() for entry in self.entries]
        return {"format": FORMAT, "version": FORMAT_VERSION, "steps": self.steps, "entries": entries}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        """Read what `to_dict` returned.

        Raises:
            ValueError: If it is no record, a newer one, or a broken one.
        """
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"not a record: expected a dict whose 'format' is {FORMAT!r}, as Recorder.to_dict() returns it")
        if values.get("version") != FORMAT_VERSION:
            raise ValueError(f"the record has version {values.get('version')!r}; this halfserve reads {FORMAT_VERSION}")
        steps, entries = values.get("steps"), values.get("entries")
        if type(steps) is not int or steps < 0 or not isinstance(entries, list | tuple):
            raise ValueError("the record is broken: expected a whole number of 'steps' and a list of 'entries'")
        try:
            return cls(entries=merge(map(Entry.from_dict, entries)), steps=steps)
        except ValueError as error:
            raise ValueError(f"the record is broken: {error}") from error


def merge(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Entries of which each key comes once, at the place where it came first."""
    found: dict[EntryKey, Entry] = {}
    for entry in entries:
        before = found.get(entry.key)
        found[entry.key] = entry if before is None else before.merged(entry)
    return tuple(found.values())
