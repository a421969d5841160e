"""Which module an operation belongs to, forward and backward.

Forward is a stack that module hooks keep. Backward is looked up: autograd numbers its nodes in the order in which forward made
them, so what is noted here is at which number each module began and ended; a node then belongs to the module in whose span its
number lies. That needs no gradient hooks, and holds for inputs without gradients, modules called several times, in-place
operations, custom functions and graphs that are walked twice.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from amp_core.recorder.entry import Direction

ROOT, OUTSIDE = ".", ""
_NO_TASK = -1
# A gradient is added to its parameter by a node that every graph shares, whose number is this one.
_ACCUMULATION = 2**64 - 1


def _next_number() -> int:
    """The number that the next autograd node of this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())  # noqa: SLF001  (torch has no public way)


def _task() -> int:
    """The number of the backward pass that this thread is in; -1 outside of any."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001  (torch has no public way)


@dataclass
class _Thread:
    """What ran in one thread: the modules that are running now, and from which node on which module was the innermost."""

    running: list[tuple[str, int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    last: str = OUTSIDE

    def mark(self, path: str, number: int) -> None:
        if not self.paths or self.paths[-1] != path:
            self.starts.append(max(number, self.starts[-1] if self.starts else 0))
            self.paths.append(path)

    def path_of(self, number: int) -> str:
        place = bisect_right(self.starts, number) - 1
        return self.paths[place] if place >= 0 else OUTSIDE

    def forget_after(self, length: int) -> None:
        del self.starts[length:], self.paths[length:]


class ModuleSpans:
    """The modules of one recorded step.

    Made in the thread that runs forward. Backward may run in others (an accelerator's gradients are computed in a thread of
    its own), in which activation checkpointing may run parts of forward once more.

    Args:
        model: Whose modules are told apart; made anew for each step, since modules come and go.
    """

    def __init__(self, model: nn.Module) -> None:
        self._path_of_parameter = {
            id(parameter): path_of(name)
            for name, module in model.named_modules()
            for parameter in module.parameters(recurse=False)
        }
        self._first = _Thread()
        self._threads = {threading.get_ident(): self._first}
        self._graphs: dict[int, _Thread] = {}
        self._forgotten_with: set[int] = set()

    def enter(self, path: str) -> None:
        """Note that the module at `path` begins its forward."""
        thread, task = self._thread(), _task()
        thread.running.append((path, task))
        if task != _NO_TASK and thread is not self._first:
            self._forget_with(task, thread)
        thread.mark(path, _next_number())

    def leave(self, path: str) -> None:
        """Note that the module at `path` has ended its forward, and with it whatever it had begun."""
        thread = self._thread()
        while thread.running and thread.running.pop()[0] != path:
            pass
        thread.mark(thread.running[-1][0] if thread.running else OUTSIDE, _next_number())

    def current(self) -> tuple[str, Direction]:
        """Where the operation belongs that autograd hands down in this thread right now."""
        thread, task = self._thread(), _task()
        running, since = thread.running[-1] if thread.running else (OUTSIDE, _NO_TASK)
        is_forward = since == task
        path = running if is_forward else self._backward_path(thread, task)
        if torch.is_grad_enabled() and (is_forward or thread is self._first):
            thread.mark(path, _next_number() - 1)  # the operation's own node, if it has one, was numbered just before
        return path, "forward" if is_forward else "backward"

    def _backward_path(self, thread: _Thread, task: int) -> str:
        graph = self._graph_of(task, thread)
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001  (torch has no public way)
        if node is not None:  # else autograd adds up gradients between two nodes: they are the last one's
            number = node._sequence_nr()  # noqa: SLF001  (torch has no public way)
            is_parameter = number == _ACCUMULATION and hasattr(node, "variable")
            thread.last = self._path_of_parameter.get(id(node.variable), OUTSIDE) if is_parameter else graph.path_of(number)
        return thread.last

    def _graph_of(self, task: int, thread: _Thread) -> _Thread:
        """The thread whose forward a backward pass is of: this one if it has run parts of forward again, else the first."""
        return self._graphs.setdefault(task, thread if thread.paths else self._first)

    def _forget_with(self, task: int, thread: _Thread) -> None:
        """Drop what a thread of autograd's computes again when the backward pass is over that needed it."""
        self._graph_of(task, thread)  # before this thread has anything of its own
        if task not in self._forgotten_with:
            self._forgotten_with.add(task)
            engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001  (torch has no public way)
            engine.queue_callback(partial(thread.forget_after, len(thread.paths)))

    def _thread(self) -> _Thread:
        return self._threads.setdefault(threading.get_ident(), _Thread())


def path_of(name: str) -> str:
    """A module's path in the record, from its name in `named_modules`: without the layer that `torch.compile` puts around."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts) or ROOT
