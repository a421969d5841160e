from __future__ import annotations

import json
import re

from halfserve.export.certificate.budget import Budget
from halfserve.export.cli.output import search_lines
from halfserve.export.search.smallest_fp32_set import find_fp32_nodes
from tests.export.search.nets import planted, samples
from tests.whole_words import printed


def shown(width: int = 200, **changed: object) -> tuple[str, dict[str, object]]:
    arguments: dict[str, object] = {
        "budget": Budget(max_scaled_error=0.02, min_agreement=0),
        "adversarial": False,
        "repair": False,
    }
    result = find_fp32_nodes(planted(2, {0: "overflow"}), samples(), **{**arguments, **changed})  # type: ignore[arg-type]  # (the test's own)
    return printed(search_lines(result), width), json.loads(json.dumps(result.to_json(), allow_nan=False))


def test_the_table_names_node_module_reason_and_cost() -> None:
    text, plain = shown()
    assert "2 nodes to keep in float32" in text
    lines = text.splitlines()
    at = lines.index("  overflow_0/far (Mul), overflow_0")
    assert "its output overflows: " in lines[at + 1]
    assert "scaled error NaN or infinity of its own result" in lines[at + 1]
    assert re.search(r"searched  8 nodes in 5 runs, \d+\.\d min: 2 must stay float32", text)
    assert plain["keep_fp32_nodes"] == ["overflow_0/far", "overflow_0/back"]
    kept = plain["kept"]
    assert isinstance(kept, list)
    assert kept[0]["local_error"] == "inf"


def test_costs_are_named_only_where_there_are_any() -> None:
    text, _ = shown(width=80)
    assert "overflow_0/far" in text
    assert "casts" not in text  # keeping these costs none


def test_a_failure_says_what_is_over_budget_and_why() -> None:
    text, plain = shown(budget=Budget(max_abs_error=1e-9, min_agreement=0), keep_io_types=False, width=400)
    assert "none is enough, not even all 8 in float32" in text
    assert "over      output 'y' (rounded): max abs error" in text
    assert "note      no choice of nodes can meet the budget: even with all 8 in float32" in text
    assert plain["passed"] is False
