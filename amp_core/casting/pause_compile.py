"""Compiled functions run eagerly while a policy is in force, because compiled code does not know the policy.

Dynamo's guards do not cover a policy, and the compiled graphs cached on disk do not either: a function compiled without the
policy would answer in the wrong dtype inside it, silently. Eager code is always right.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def pause_compile() -> Any:
    """Make every compiled function of the process run eagerly.

    Returns:
        What `resume_compile` takes; None if nothing can have been compiled yet.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else None


def is_compiling_here() -> bool:
    """Whether this code is being traced by torch.compile, or runs as an untraced part of a compiled function."""
    if torch.compiler.is_dynamo_compiling():
        return True
    dynamo = sys.modules.get("torch._C._dynamo.eval_frame")
    return dynamo is not None and dynamo.get_eval_frame_callback() not in {None, False}


def resume_compile(stance: Any) -> None:
    """Put back what `pause_compile` changed."""
    if stance is not None:
        stance.__exit__(None, None, None)


REFUSAL = (
    "torch.compile and torch.export cannot trace an autocast policy that differs from torch's own; enter the region outside "
    "of the compiled function (it then runs eagerly in there), or leave out policy="
)
