"""Which module is running, by its dotted name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn


@dataclass
class ModulePaths:
    """The modules that are running, the innermost last.

    Attributes:
        running: Their dotted names; the outermost is "".
        failed: The innermost module that an exception went through.
        torchs: Names of those that are torch's own.
    """

    running: list[str] = field(default_factory=list)
    failed: str = ""
    torchs: set[str] = field(default_factory=set)

    @property
    def current(self) -> str:
        """The innermost one's name."""
        return self.running[-1] if self.running else ""

    @property
    def writer(self) -> str:
        """The name of the innermost one that torch did not write: the one whose forward holds the user's line."""
        return next((name for name in reversed(self.running) if name not in self.torchs), "")

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Follow the calls of a module's parts."""
        handles = []
        for name, part in module.named_modules():
            if type(part).__module__.partition(".")[0] == "torch":
                self.torchs.add(name)
            handles.append(part.register_forward_pre_hook(partial(self._enter, name), prepend=True))
            handles.append(part.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, _module: nn.Module, _args: Any) -> None:
        self.running.append(name)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.running:
            left = self.running.pop()
            if sys.exc_info()[0] is not None:
                self.failed = self.failed or left
