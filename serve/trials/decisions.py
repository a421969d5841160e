"""Trials of model files, whose decisions are remembered on this machine, so that the next load does not try again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from halfserve.files.atomic_files import atomic_file
from halfserve.serve.engine.disk_files import open_regular

READ_BYTES = 1 << 20
OWN_VERSION = version("halfserve")  # reading it takes a millisecond, and each load asks for keys


class Decision(ABC):
    """The result of a trial.

    Attributes:
        FOLDER: name of the folder that keeps decisions of this class.
    """

    FOLDER: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_json(cls, known: Any) -> Self:
        """Return the decision that `to_json` wrote; damaged ones raise ValueError, KeyError, TypeError or AttributeError."""

    @abstractmethod
    def to_json(self) -> Any: ...


D = TypeVar("D", bound=Decision)


class Trial(ABC, Generic[D]):
    """A question about a model file, which running the model decides.

    Attributes:
        kind: class of the decision.
    """

    kind: type[D]

    @property
    @abstractmethod
    def key(self) -> str:
        """Key that is equal for trials with equal decisions; see `decision_key`."""

    @abstractmethod
    def decide(self) -> D | None:
        """Run the model; None if that decides nothing, so that the next load tries again."""


class Decisions:
    """Remembers decisions in one small JSON file each. Unreadable or unwritable files only cost another trial."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` has a folder for each class of decisions; None remembers nothing."""
        self._folder = folder

    def of(self, trial: Trial[D]) -> D | None:
        """Return what is remembered of a trial, or what it decides now; None if that is nothing."""
        key = trial.key
        decision = self.find(trial.kind, key)
        if decision is None and (decision := trial.decide()) is not None:
            self.keep(key, decision)
        return decision

    def find(self, kind: type[D], key: str) -> D | None:
        """Return what is remembered under a key; None if that is nothing."""
        if self._folder is None:
            return None
        try:
            return kind.from_json(json.loads((self._folder / kind.FOLDER / f"{key}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def keep(self, key: str, decision: Decision) -> None:
        """Remember a decision under a key."""
        if self._folder is None:
            return
        folder = self._folder / decision.FOLDER
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(folder / f"{key}.json") as file:
                file.write(json.dumps(decision.to_json()).encode())


def users_folder() -> Path | None:
    """Return the folder of decisions below $XDG_CACHE_HOME or ~/.cache; None for a user without a home, as in containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "halfserve"
    except RuntimeError:
        return None


def decision_key(path: Path, circumstances: Iterable[str]) -> str:
    """Return a digest of the model file and the conditions of the trial (runtime version, provider, settings).

    This package's version is one of them.
    """
    digest = hashlib.blake2b(digest_size=20)
    for circumstance in (OWN_VERSION, *circumstances):
        digest.update(circumstance.encode() + b"\0")
    with open_regular(path) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
