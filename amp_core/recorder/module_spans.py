"""Finds the module that an operation belongs to, in forward and in backward.

Forward is a stack that module hooks keep. Backward is looked up: autograd numbers its nodes in the order in which forward made
them, so the numbers at which each module began and ended are noted, and a node belongs to the module whose span contains its
number. That needs no gradient hooks, and works for inputs without gradients, modules called several times, in-place operations,
custom functions and graphs that are walked twice.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from halfserve.amp_core.recorder.record import Direction

ROOT, OUTSIDE = ".", ""  # module paths in a record: the model itself, and outside of any module
_NO_TASK = -1
# The node that accumulates a parameter's gradient is shared by all graphs and has this number.
_ACCUMULATION = 2**64 - 1


def _next_number() -> int:
    """Return the number that the next autograd node of this thread gets."""
    extension: Any = torch._C  # noqa: SLF001  (torch has no public way)
    return int(extension._autograd._get_sequence_nr())  # noqa: SLF001  (see above)


def _task() -> int:
    """Return the number of the backward pass that this thread runs; -1 outside of any."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001  (torch has no public way)


@dataclass
class _Thread:
    """One thread: the stack of running modules, and the node numbers at which the innermost module changed."""

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

    Made in the thread that runs forward. Backward may run in other threads (an accelerator's gradients are computed in a thread
    of their own), where activation checkpointing may run parts of forward again.
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
        """Note that the module at `path`, and all modules that it began, have ended their forward."""
        thread = self._thread()
        while thread.running and thread.running.pop()[0] != path:
            pass
        thread.mark(thread.running[-1][0] if thread.running else OUTSIDE, _next_number())

    def current(self) -> tuple[str, Direction]:
        """Return the module and direction of the operation that autograd dispatches in this thread now."""
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
        """Return the thread whose forward a backward pass belongs to: this one if it ran parts of forward again, else the
        first.
        """
        return self._graphs.setdefault(task, thread if thread.paths else self._first)

    def _forget_with(self, task: int, thread: _Thread) -> None:
        """Drop a thread's recomputed spans when the backward pass that needed them ends."""
        self._graph_of(task, thread)  # before this thread has anything of its own
        if task not in self._forgotten_with:
            self._forgotten_with.add(task)
            engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001  (torch has no public way)
            engine.queue_callback(partial(thread.forget_after, len(thread.paths)))

    def _thread(self) -> _Thread:
        return self._threads.setdefault(threading.get_ident(), _Thread())


def path_of(name: str) -> str:
    """Return a module's path in the record, from its name in `named_modules`: without torch.compile's wrappers."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts) or ROOT


@contextmanager
def hooked(model: nn.Module, spans: ModuleSpans) -> Iterator[None]:
    """Call `spans.enter` and `spans.leave` around each module's forward; remove the hooks afterwards."""
    with ExitStack() as hooks:
        for module, path in _hookable(model):

            def begin(_module: nn.Module, _args: Any, path: str = path) -> None:
                if not torch.compiler.is_compiling():  # captured code is not observed, see `compiled_code`
                    spans.enter(path)

            def end(_module: nn.Module, _args: Any, _output: Any, path: str = path) -> None:
                if not torch.compiler.is_compiling():
                    spans.leave(path)

            hooks.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
            hooks.callback(module.register_forward_hook(end, always_call=True).remove)
        yield


def _hookable(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules to hook, with their paths; the operations of the others count for the module around them.

    The others are scripted modules, which take no hooks, torch.compile's wrappers, and encoder layers in evaluation mode: hooks
    in them would disable torch's fast path for inference, which computes other values.
    """
    on_fast_path: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not module.training:
            on_fast_path.update(module.modules())
        if module not in on_fast_path and not isinstance(module, torch.jit.ScriptModule) and not is_wrapper(module):
            yield module, path_of(name)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is torch.compile's wrapper of another."""
    return hasattr(module, "_orig_mod")
