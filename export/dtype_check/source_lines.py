"""The user's source line behind a torch operation, and what the text of its file shows."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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
class SourceLine:
    """A line of code, counted from 1, in a file as Python names it."""

    path: str
    line: int

    @cached_property
    def file(self) -> str:
        """The path relative to the working directory or to the installed packages; absolute elsewhere."""
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
class SourceLocator:
    """Finds the user's lines in a run of one model.

    A frame is the user's when its file is not installed, or belongs to a package that a module of the model comes from: for a
    library's model, the findings lie in the library's lines.

    Attributes:
        packages: Names of those packages.
        seen: The user's code that ran.
    """

    packages: frozenset[str]
    seen: set[CodeType] = field(default_factory=set)
    _lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    _owners: dict[str, Owner] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> SourceLocator:
        """For a model and the classes it is made of."""
        return cls(frozenset(type(part).__module__.partition(".")[0] for part in module.modules()) - {"torch"})

    def here(self) -> SourceLine | None:
        """Return the user's line that is running now, else the innermost library's; None where torch runs by itself."""
        nearest: SourceLine | None = None
        for frame in _frames():
            owner = self.owner(frame.f_code.co_filename)
            if owner == "user":
                self._remember(frame)
                return SourceLine(frame.f_code.co_filename, frame.f_lineno)
            if owner == "library" and nearest is None:
                nearest = SourceLine(frame.f_code.co_filename, frame.f_lineno)
        return nearest

    def callers(self) -> Iterator[SourceLine]:
        """Yield all of the user's lines that are running now, the innermost first."""
        for frame in _frames():
            if self.owner(frame.f_code.co_filename) == "user":
                yield SourceLine(frame.f_code.co_filename, frame.f_lineno)

    def from_texts(self, places: Iterator[tuple[str, int]]) -> SourceLine | None:
        """Return the innermost of the user's lines among (file, line) pairs, which go from the outermost to the innermost."""
        users = [SourceLine(path, line) for path, line in places if self.owner(path) == "user"]
        return users[-1] if users else None

    def is_own(self, path: str) -> bool:
        """Return whether a file is the user's to change: not an installed one."""
        return self.owner(path) == "user" and not path.startswith(_INSTALLED)

    def lines_of(self, path: str) -> set[int]:
        """Return the lines of a file that were running at a call of `here`, callers included."""
        return self._lines[path]

    def owner(self, path: str) -> Owner:
        if path not in self._owners:
            self._owners[path] = self._owner(path)
        return self._owners[path]

    def _owner(self, path: str) -> Owner:
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
    """Call a module; `SourceLocator` ignores the frames outside of this call."""
    return module(*args, **kwargs)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (inspect.stack reads every file, and takes milliseconds)
    while frame is not None and frame.f_code is not run_watched.__code__:
        yield frame
        frame = frame.f_back


def autocast_region(inside: SourceLine) -> SourceLine | None:
    """Return the `with torch.autocast(...)` around a line; None where the function has none."""
    regions = [
        node.lineno
        for node in ast.walk(parsed(inside.path))
        if isinstance(node, ast.With)
        and node.lineno <= inside.line <= (node.end_lineno or node.lineno)
        and any("autocast" in ast.unparse(item.context_expr) for item in node.items)
    ]
    return SourceLine(inside.path, max(regions)) if regions else None


def assigned_at(owner: type, name: str) -> SourceLine | None:
    """Return where a class assigns `self.NAME`, or registers the buffer or parameter NAME; None where its text does not show
    it.
    """
    for cls in owner.__mro__:
        if cls.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        try:
            path, (_, start) = inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)
        except (OSError, TypeError):
            continue  # made at run time, or in a console
        classes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
        body = next((node for node in classes if start in (node.lineno, *(d.lineno for d in node.decorator_list))), None)
        nodes = ast.walk(body) if body is not None else ()
        lines = [node.lineno for node in nodes if isinstance(node, ast.stmt | ast.expr) and _assigns(node, name)]
        if lines:
            return SourceLine(path, min(lines))
    return None


@lru_cache(maxsize=64)
def parsed(path: str) -> ast.Module:
    """Return a file's syntax tree; empty where it cannot be read."""
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _assigns(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return False  # a declaration assigns nothing
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [leaf for target in targets for leaf in ast.walk(target)]
        return any(isinstance(leaf, ast.Attribute) and leaf.attr == name for leaf in names) or any(
            isinstance(leaf, ast.Name) and leaf.id == name for leaf in targets
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        registers = node.func.attr in ("register_buffer", "register_parameter")
        return registers and bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == name
    return False
