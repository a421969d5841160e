"""The result of a search for float32 nodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from halfserve.export.certificate.certificate import json_values
from halfserve.export.certificate.verdicts import OutputVerdict
from halfserve.export.search.narrowing import Ending


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of keeping a node in float32, measured by converting the model with and without it.

    Attributes:
        casts: Cast nodes that it adds; negative where it saves some between float32 neighbours; None where the model was not
            converted without it.
        weight_bytes: Additional size of its weights.
    """

    casts: int | None
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class KeptNodeCost:
    """A node that must stay float32, with reason and cost.

    Attributes:
        node: Name in the repaired model.
        op_type: Operator.
        module: The torch module that it comes from, where the model's metadata says so.
        source: Source line that it comes from, such as "package/file.py:42", where the model's metadata says so.
        reason: The damage that float16 does, in words.
        local_error: Largest error of the node on rounded true inputs, divided by its largest result; infinite on overflow,
            None where it was not measured.
        propagated_error: Largest error of the outputs when this node alone of the set becomes float16, divided by the output's
            unit; infinite where a value is NaN or infinite, None where it was not measured.
        cost: Cost of keeping it in float32.
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
        keep_fp32_nodes: Names of the nodes to keep, to be passed to `convert` in addition to the search's own lists. The set
            was itself converted and met the budget, simulated and on the real runtime; where `passed` is false, it is the
            set of all candidates.
        kept: These nodes with reason and cost, in the graph's order.
        runs: Count of sets that were converted, run and compared.
        seconds: Duration of the search.
        ending: "complete" where nothing was left to try, otherwise the limit or the interrupt that ended the search.
        measurements: Count of additional instrumented runs, each about as long as five runs of the model.
        outputs: Verdicts on every output with that set, in each execution that was tried.
        violations: Everything that is over budget with that set; empty where it passed.
        passed: Whether the set meets the budget.
        minimal: Whether every member was left out alone and the budget broke each time.
        candidates: Count of nodes that could have been kept.
        explanation: Why no set meets the budget, or what limited the search; often empty.
    """

    keep_fp32_nodes: tuple[str, ...]
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
        """Return the result as JSON types, without plots; NaN and infinities become strings."""
        plain: dict[str, Any] = json_values(asdict(self))
        for output in plain["outputs"]:
            del output["plot"]
        return plain
