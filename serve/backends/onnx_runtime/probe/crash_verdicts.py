"""What is known of models that were tried out before, in the user's cache folder: the next start need not try again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from serve.backends.onnx_runtime.optimization_level import OptimizationLevel
from serve.engine.disk_files import open_regular

READ_BYTES = 1 << 20


def default_folder() -> Path | None:
    """Below $XDG_CACHE_HOME, or else ~/.cache; None for a user without a home, as containers have them."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "halfserve" / "crash_verdicts"
    except RuntimeError:
        return None


def verdict_key(path: Path, circumstances: Iterable[str]) -> str:
    """A name for the model file's content under these circumstances (the runtime's version, the provider, its settings)."""
    digest = hashlib.blake2b(digest_size=20)
    for circumstance in circumstances:
        digest.update(circumstance.encode() + b"\0")
    with open_regular(path) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Verdict:
    """How a model fared.

    Attributes:
        level: the first one that did not end the process; None where each did.
        crashes: what ended it, such as "SIGSEGV", by level.
    """

    level: OptimizationLevel | None
    crashes: dict[str, str]


@dataclass(frozen=True)
class CrashVerdicts:
    """A folder of verdicts, one small file each. What cannot be read or written there costs a trial, nothing more.

    Attributes:
        folder: None keeps nothing.
    """

    folder: Path | None

    def find(self, key: str) -> Verdict | None:
        """The verdict under a key; None where there is none, or none that can be read."""
        if self.folder is None:
            return None
        try:
            known = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            level = None if known["level"] is None else OptimizationLevel[known["level"].upper()]
            return Verdict(level, {str(name): str(signal) for name, signal in known["crashes"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def keep(self, key: str, verdict: Verdict) -> None:
        """Write a verdict; a reader sees all of it or nothing."""
        if self.folder is None:
            return
        level = None if verdict.level is None else verdict.level.label
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f"{key}.{os.urandom(4).hex()}.part"
            try:
                part.write_text(json.dumps({"level": level, "crashes": verdict.crashes}), encoding="utf-8")
                part.replace(self.folder / f"{key}.json")
            except OSError:  # the disk is full
                part.unlink(missing_ok=True)
