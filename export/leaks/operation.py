"""One torch operation as the watchers see it: after torch has taken composite functions apart, before a kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from export.leaks.places import Place

HALF = torch.float16

# float16 is lost in these: whatever is computed from them and a float16 tensor is of their kind.
WIDE = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128})


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """The call that the user's line made, of which an operation is a part."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The function's name: "zeros", "float", "linear"."""
        return str(getattr(self.function, "__name__", self.function)).strip("_")


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One call of an aten operator.

    Attributes:
        func: The operator's overload.
        args: Positional arguments.
        kwargs: Named arguments.
        module: Dotted name of the module that is running.
        writer: The same, for the innermost module that is not torch's own.
        call: The user's call that it belongs to; None where torch's functions were passed by (`torch.from_numpy`).
        locate: Finds the user's line, while it runs.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str
    writer: str
    call: FunctionCall | None
    locate: Callable[[], Place | None]

    @cached_property
    def name(self) -> str:
        """The operator's name without overload: "add", "masked_fill_"."""
        return str(self.func._schema.name.rpartition("::")[2])  # noqa: SLF001  (torch has no public way to an operator's schema)

    @cached_property
    def place(self) -> Place | None:
        """The user's line."""
        return self.locate()

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def halves(self) -> list[Tensor]:
        """The float16 tensors among the arguments that have a dimension: those that decide a result's dtype."""
        return [tensor for tensor in self.tensors if tensor.dtype == HALF and tensor.dim()]

    @property
    def wides(self) -> list[Tensor]:
        """The float32, float64, bfloat16 and complex tensors among the arguments."""
        return [tensor for tensor in self.tensors if tensor.dtype in WIDE]

    @property
    def in_place(self) -> bool:
        """Whether it writes into an argument."""
        return bool(self.func._schema.is_mutable)  # noqa: SLF001  (as above)

    def __str__(self) -> str:
        name = self.call.name if self.call else self.name
        return f"{name} at {self.place}" if self.place else name


def results_of(result: Any) -> list[Tensor]:
    """The tensors in what an operator returned."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def short(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
