"""In which state each model version is, and why: what RepositoryIndex lists."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """A version's state, in Triton's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, kw_only=True)
class VersionStatus:
    """One line of the index.

    Attributes:
        name: the model's.
        version: its number; "" for a model as a whole, which has no version that could be served.
        state: now.
        reason: why, where it is not simply ready.
    """

    name: str
    version: str
    state: State
    reason: str = ""


class VersionStates:
    """Remembers what the table of served models cannot tell: what is on its way in or out, and what was refused."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[str, VersionStatus]] = {}

    def of(self, name: str) -> dict[str, VersionStatus]:
        """What is remembered of one model, by version."""
        return self._by_name.get(name, {})

    def names(self) -> set[str]:
        """The models of which something is remembered."""
        return set(self._by_name)

    def set(self, name: str, version: int | str, state: State, reason: str = "") -> None:
        """Remember one version's state."""
        number = str(version)
        status = VersionStatus(name=name, version=number, state=state, reason=reason)
        self._by_name.setdefault(name, {})[number] = status

    def clear(self, name: str, version: int | str, *states: State) -> None:
        """Forget one version, if it is in one of these states."""
        known = self._by_name.get(name, {})
        status = known.get(str(version))
        if status is not None and status.state in states:
            del known[str(version)]
            if not known:
                del self._by_name[name]


def in_order(statuses: list[VersionStatus]) -> list[VersionStatus]:
    """By name and version, versions as numbers."""
    return sorted(statuses, key=lambda s: (s.name, int(s.version) if s.version.isdigit() else 0))
