"""Submodules that go on computing in float32 inside a float16 model: casts at their borders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def make_island(module: nn.Module) -> None:
    """Have `module` compute in float32 inside a float16 model.

    float16 and bfloat16 arguments are raised to float32 on the way in, and float32 results are rounded to float16 on the way
    out. It works on calls of the module: a parent that reads the island's weights by itself (as `nn.MultiheadAttention` reads
    `out_proj.weight`) goes past the border, so the parent must be the island.

    Forward hooks are used, so parameter names, types and attributes stay what they were, and `torch.export` traces the casts.
    """
    module.register_forward_pre_hook(_raise_arguments, with_kwargs=True)
    module.register_forward_hook(_round_results)


def _raise_arguments(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    raised: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, _raised, (args, kwargs))
    return raised


def _round_results(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    return pytree.tree_map_only(Tensor, _halved, output)


def _raised(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.dtype == torch.float32 else tensor
