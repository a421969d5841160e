"""Keeps torch.compile out of functions that change torch's state, without loading it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch._C._dynamo import eval_frame

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")

_SKIP = eval_frame._FrameAction.SKIP  # noqa: SLF001  (torch.compiler.disable is the public form; it loads the whole compiler)
_SKIP_WITH_CALLEES = eval_frame._FrameExecStrategy(_SKIP, _SKIP)  # noqa: SLF001  (see above)


def untraced(function: Function) -> Function:
    """Mark a function: neither it nor what it calls is compiled where it is called from code that could not be traced."""
    eval_frame.set_code_exec_strategy(cast("Any", function).__code__, _SKIP_WITH_CALLEES)
    return function
