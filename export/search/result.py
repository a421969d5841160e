"""What a search for float32 nodes found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from export.certificate.certificate import OutputVerdict
from export.search.limits import Ending


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What it costs to keep a node in float32, measured by converting with it and without it.

    Attributes:
        casts: Cast nodes that it adds to the model; negative where it saves some, between neighbours that stay float32 too;
            None where the model was not converted without it.
        weight_bytes: How much larger its weights are than in float16.
    """

    casts: int | None
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class KeptNodeCost:
    """A node that has to stay float32, and what that costs.

    Attributes:
        node: Its name in the repaired model.
        op_type: Its operator.
        module: The torch module that it comes from, where the model says so.
        source: "package/file.py:42" of the line that it comes from, where the model says so.
        reason: What float16 would do to it, in words.
        local_error: Largest error of the node alone in units of its largest result, when float16 takes its true inputs and
            rounds its result; infinite where something overflows; None where it was not measured.
        propagated_error: Largest error that the outputs get when every other node of the set stays float32 and this one does
            not, in units of the output's largest magnitude; infinite where something is NaN or infinite; None where it was not
            measured.
        cost: What keeping it costs.
    """

    node: str
    op_type: str
    module: str | None
    source: str | None
    reason: str
    local_error: float | None
    propagated_error: float | None
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The smallest set of float32 nodes that was found.

    Attributes:
        node_block_list: Names of the nodes to keep; for `convert`, to be given with the lists that the search was given. A
            set that was itself converted and found within the budget, simulated and on the real runtime; where `passed` is
            false, all that could be kept.
        kept: The same nodes with reason and cost, in the graph's order.
        runs: How many sets were converted, run and compared.
        seconds: How long the search took.
        ending: What ended it: "complete" where nothing was left to try, or the limit or interrupt that came before.
        measurements: How many instrumented runs there were beside them; each takes about as long as five of the model.
        outputs: Figures and violations of every output with that set, in each way of execution that was tried.
        violations: Everything that is over budget with that set, in words; empty where it passed.
        passed: Whether that set meets the budget.
        minimal: Whether it is proved that no member can be left out: each was left out alone, and the budget broke.
        candidates: How many nodes could have been kept.
        explanation: Why there is no set that is enough, or what the search could not do; empty where there is nothing to say.
    """

    node_block_list: tuple[str, ...]
    kept: tuple[KeptNodeCost, ...]
    runs: int
    seconds: float = field(compare=False)
    ending: Ending
    measurements: int
    outputs: tuple[OutputVerdict, ...]
    violations: tuple[str, ...]
    passed: bool
    minimal: bool
    candidates: int
    explanation: str = ""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON's own types; NaN and infinities are strings."""
        plain: dict[str, Any] = _plain({**asdict(self), "outputs": [_without_plot(output) for output in self.outputs]})
        return plain


def _without_plot(output: OutputVerdict) -> dict[str, Any]:
    return {name: value for name, value in asdict(output).items() if name != "plot"}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
