"""Sums that outgrow float16 inside of a node."""

from __future__ import annotations

from dataclasses import dataclass

from export.weight_ledger import FP16_MAX


@dataclass(frozen=True, kw_only=True)
class Risk:
    """A node in which a sum outgrows float16.

    Attributes:
        node: Its name.
        op_type: Its operator.
        what: What is summed, in words.
        reach: The largest value that the sum can reach on the samples.
        module: The torch module it came from, where known.
    """

    node: str
    op_type: str
    what: str
    reach: float
    module: str | None = None

    def __str__(self) -> str:
        place = f" ({self.module})" if self.module else ""
        return (
            f"{self.op_type} {self.node!r}{place}: its {self.what} reaches {self.reach:.3g} inside, over float16's {FP16_MAX:g}"
        )
