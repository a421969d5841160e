"""Operations that change no number, such as the addition of 0."""

from __future__ import annotations

from typing import Any

from onnxscript.rewriter import pattern


def without(op_type: str, number: float) -> pattern.RewriteRule:
    """The rule that takes out an operator whose second operand is exactly this number.

    onnxscript's own rules take 1e-8 for 0 and 1.00001 for 1: they would take out the epsilons that guard divisions.
    """

    def idle(op: Any, x: Any) -> Any:
        return getattr(op, op_type)(x, pattern.Constant(number, rel_tol=0, abs_tol=0))

    def unchanged(op: Any, x: Any, **_: Any) -> Any:
        return op.Identity(x)

    return pattern.RewriteRule(idle, unchanged, name=f"{op_type} {number}")
