"""What the pairs have in common. Every model takes (2, 4) -> any shape; `# here` marks the line that a finding must name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

# Leaking, mended or None, kind, severity, fix, a piece of the symptom.
Case: TypeAlias = tuple[type[nn.Module], type[nn.Module] | None, str, str, str, str]


class Projected(nn.Module):
    """A model with one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def project(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]  # (nn.Module's call is untyped)


def projected(forward: Callable[[Projected, Tensor], Tensor]) -> type[Projected]:
    """A model with one linear layer and this `forward`."""
    return type("Net", (Projected,), {"forward": forward})
