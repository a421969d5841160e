"""The user's own line behind a torch operation: the innermost frame that is neither torch's nor ours."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal

import torch
from torch import nn

Owner = Literal["machinery", "user", "library"]

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parents[1]) + "/"
_INSTALLED = tuple({f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib")})
_STANDARD = f"{sysconfig.get_path('stdlib')}/"


@dataclass(frozen=True)
class Place:
    """A line of code.

    Attributes:
        path: The file as Python names it.
        line: From 1.
    """

    path: str
    line: int

    @cached_property
    def file(self) -> str:
        """The path relative to the working directory or to where packages are installed; else as it is."""
        for root in (f"{Path.cwd()}/", *_INSTALLED):
            if self.path.startswith(root):
                return self.path.removeprefix(root)
        return self.path

    @property
    def source(self) -> str:
        """The line's text without its indentation; empty where the file cannot be read."""
        return linecache.getline(self.path, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Whereabouts:
    """Finds places for one model.

    A frame is the user's when its file is not installed, or belongs to a package that a module of the model comes from: in a
    library's model, the library's lines are the ones to know.

    Attributes:
        packages: Names of those packages.
        seen: Code that ran, where it is the user's.
    """

    packages: frozenset[str]
    seen: set[CodeType] = field(default_factory=set)
    _lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    _owners: dict[str, Owner] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> Whereabouts:
        """For a model and the classes it is made of."""
        return cls(frozenset(type(part).__module__.partition(".")[0] for part in module.modules()) - {"torch"})

    def here(self) -> Place | None:
        """The user's line that is running now; None where torch runs by itself."""
        nearest: Place | None = None
        for frame in _frames():
            owner = self.owner(frame.f_code.co_filename)
            if owner == "user":
                self._remember(frame)
                return Place(frame.f_code.co_filename, frame.f_lineno)
            if owner == "library" and nearest is None:
                nearest = Place(frame.f_code.co_filename, frame.f_lineno)
        return nearest

    def callers(self) -> Iterator[Place]:
        """All of the user's lines that are running now, the innermost first."""
        for frame in _frames():
            if self.owner(frame.f_code.co_filename) == "user":
                yield Place(frame.f_code.co_filename, frame.f_lineno)

    def from_texts(self, places: Iterator[tuple[str, int]]) -> Place | None:
        """The innermost of the user's lines among (file, line) pairs that go from the outermost to the innermost."""
        users = [Place(path, line) for path, line in places if self.owner(path) == "user"]
        return users[-1] if users else None

    def is_own(self, path: str) -> bool:
        """Whether a file is the user's to change: not an installed one."""
        return self.owner(path) == "user" and not path.startswith(_INSTALLED)

    def lines_of(self, path: str) -> set[int]:
        """The lines of a file that were running when a place was asked for, callers included."""
        return self._lines[path]

    def owner(self, path: str) -> Owner:
        """Whose code a file holds."""
        if path not in self._owners:
            self._owners[path] = self._judged(path)
        return self._owners[path]

    def _judged(self, path: str) -> Owner:
        if path.startswith(("<", _TORCH, _OURS)):
            return "machinery"
        root = next((root for root in _INSTALLED if path.startswith(root)), None)
        if root is not None:
            package = path.removeprefix(root).partition("/")[0].removesuffix(".py")
            return "user" if package in self.packages else "library"
        return "machinery" if path.startswith(_STANDARD) else "user"

    def _remember(self, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not run_watched.__code__:
            if self.owner(frame.f_code.co_filename) == "user":
                self.seen.add(frame.f_code)
                self._lines[frame.f_code.co_filename].add(frame.f_lineno)
            frame = frame.f_back


def run_watched(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Call a module; frames outside this call are nobody's fault."""
    return module(*args, **kwargs)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (inspect.stack reads every file, and takes milliseconds)
    while frame is not None and frame.f_code is not run_watched.__code__:
        yield frame
        frame = frame.f_back
