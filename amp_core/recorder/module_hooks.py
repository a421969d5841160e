"""Tells which modules begin and end, for as long as a step is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from amp_core.recorder.module_spans import ModuleSpans, path_of


@contextmanager
def hooked(model: nn.Module, spans: ModuleSpans) -> Iterator[None]:
    """Call `spans.enter` and `spans.leave` around each module's forward; take the hooks away afterwards."""
    with ExitStack() as hooks:
        for module, path in _hookable(model):

            def begin(_module: nn.Module, _args: Any, path: str = path) -> None:
                if not torch.compiler.is_compiling():  # what is captured is not observed, see `compiled_code`
                    spans.enter(path)

            def end(_module: nn.Module, _args: Any, _output: Any, path: str = path) -> None:
                if not torch.compiler.is_compiling():
                    spans.leave(path)

            hooks.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
            hooks.callback(module.register_forward_hook(end, always_call=True).remove)
        yield


def _hookable(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules to hook, with their paths; what runs in the others counts as run in the module around them.

    The others are scripted modules, which take no hooks, what `torch.compile` puts around a module, and encoder layers that may
    take torch's fast path for inference, which they do not take with a hook anywhere in them: other numbers would come out.
    """
    on_fast_path: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not module.training:
            on_fast_path.update(module.modules())
        if module not in on_fast_path and not isinstance(module, torch.jit.ScriptModule) and not is_wrapper(module):
            yield module, path_of(name)


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile` puts around another."""
    return hasattr(module, "_orig_mod")
