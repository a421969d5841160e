from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from halfserve.export.cli.output import SHOWN, ProgressLines, conversion_lines, progress_on
from halfserve.export.half_types import WeightLedger
from halfserve.export.onnx_fp16.conversion_report import ConversionReport, KeptNode, Repair, TensorLedger
from halfserve.export.search.result import Cost, KeptNodeCost, SearchResult
from tests.whole_words import broken_words, printed


def shown(report: ConversionReport, **settings: Any) -> str:
    return printed(conversion_lines(report, **settings), 200)


def test_kept_nodes_repairs_and_weights_are_shown() -> None:
    report = ConversionReport(
        float_nodes=10,
        fp16_nodes=9,
        casts_added=1,
        repairs=(Repair(pass_name="fold", nodes=("a", "b", "c", "d"), text="in float64"),),  # noqa: S106  (a pass, no password)
        kept=(KeptNode(name="exp", op_type="Exp", reason="overflows: 1e6", module="encoder.0", source="net.py:42"),),
        weights=(
            TensorLedger(name="w", elements=4000, ledger=WeightLedger(overflow=1, flushed=2000, subnormal=3)),
            TensorLedger(name="kept", elements=4000, ledger=WeightLedger(overflow=9), action="kept"),
            TensorLedger(name="small", elements=4000, ledger=WeightLedger(subnormal=7)),
        ),
    )
    text = shown(report, source_bytes=2000, size_bytes=1010)
    for part in ("1 node in float32", "exp", "overflows: 1e6", "encoder.0", "net.py:42", "1 repair", "a, b, c and 1 more"):
        assert part in text
    lost = "1 beyond the range of float16, 2,000 became 0"
    assert f"  w: of 4,000 numbers {lost}, 3 so small that digits were lost" in text
    assert "small:" not in text
    assert "kept:" not in text, "a weight that stays float32 loses nothing"
    assert "float16   9 of the 10 nodes that compute on floats; 1 cast added" in text
    assert f"weights   {lost}, 10 so small that digits were lost" in text
    assert "size      1,010 bytes, 50% of the float32 model's 2,000" in text


def test_nodes_that_the_search_found_are_listed_once_with_its_reasons() -> None:
    kept = (KeptNode(name="a", op_type="Exp", reason="it overflows"), KeptNode(name="b", op_type="Exp", reason="asked for"))
    cost = Cost(casts=0, weight_bytes=0)
    found = KeptNodeCost(
        node="b",
        op_type="Exp",
        module=None,
        source=None,
        reason="its output overflows",
        local_error=None,
        propagated_error=None,
        cost=cost,
    )
    search = SearchResult(
        keep_fp32_nodes=("b",),
        kept=(found,),
        runs=2,
        seconds=1.0,
        ending="complete",
        measurements=0,
        outputs=(),
        violations=(),
        passed=True,
        minimal=True,
        candidates=2,
    )
    lines = shown(ConversionReport(float_nodes=3, fp16_nodes=1, casts_added=0, kept=kept), search=search).splitlines()
    assert lines[:3] == ["2 nodes in float32", "  1 node: it overflows", "    a (Exp)"]
    assert lines[3:6] == ["  1 node: found by the search", "    b (Exp)", "      its output overflows"]


def test_a_repair_that_keeps_nodes_is_not_said_twice() -> None:
    kept = KeptNode(name="exp", op_type="Exp", reason="it overflows")
    repair = Repair(pass_name="keep-fragile", nodes=("exp",), text="kept in float32: it overflows")  # noqa: S106  (a pass)
    text = shown(ConversionReport(float_nodes=2, fp16_nodes=1, casts_added=0, kept=(kept,), repairs=(repair,)))
    assert text.count("it overflows") == 1


def test_lists_keep_names_whole_in_eighty_columns() -> None:
    where = {"module": "encoder.layer.11.attention", "source": "modeling_bert.py:242"}
    node, tensor = "/encoder/layer.11/attention/Softmax_1" * 3, "encoder.embeddings.word_embeddings.weight"
    kept = KeptNode(name=node, op_type="Softmax", reason="its input overflows: largest magnitude 1.2e+06", **where)
    repair = Repair(pass_name="fold_batch_normalization", nodes=(node,) * 4, text="folded into the convolution before it")  # noqa: S106  (a pass)
    lost = TensorLedger(
        name=tensor, elements=23_440_896, ledger=WeightLedger(overflow=123_456, flushed=2000, subnormal=345_678)
    )
    for count in (1, SHOWN + 1):
        report = ConversionReport(float_nodes=90, fp16_nodes=9, casts_added=1, repairs=(repair,), kept=(kept,) * count)
        assert broken_words(conversion_lines(replace(report, weights=(lost,)))) == []


def test_long_lists_are_cut_and_counted() -> None:
    repairs = tuple(Repair(pass_name="fold", nodes=(f"node{i}",), text="in float64") for i in range(SHOWN + 5))  # noqa: S106  (a pass)
    text = shown(ConversionReport(float_nodes=30, fp16_nodes=30, casts_added=0, repairs=repairs))
    assert f"node{SHOWN - 1}\n" in text
    assert f"node{SHOWN}\n" not in text
    assert "and 5 more; --json lists all" in text


def test_many_kept_nodes_are_counted_by_reason_the_most_frequent_first() -> None:
    kept = [KeptNode(name=f"node{i}", op_type="Exp", reason="[rare]" if i == 1 else "frequent") for i in range(SHOWN + 1)]
    lines = shown(ConversionReport(float_nodes=30, fp16_nodes=9, casts_added=0, kept=tuple(kept))).splitlines()
    assert lines[0].strip() == f"{SHOWN + 1} nodes in float32"
    assert [line.strip() for line in lines[1:-2]] == [
        *(f"{SHOWN} nodes: frequent", "node0 (Exp)", "node2 (Exp)", "node3 (Exp)", "and 17 more; --json lists all"),
        *("1 node: [rare]", "node1 (Exp)"),
    ]


def test_where_nothing_is_remarkable_there_are_only_totals() -> None:
    assert shown(ConversionReport(float_nodes=1, fp16_nodes=1, casts_added=2)).splitlines() == [
        "float16   1 of the 1 node that compute on floats; 2 casts added",
        "weights   every number is within the range of float16",
    ]


def test_names_from_a_model_are_no_markup() -> None:
    kept = (KeptNode(name="[red]n[/red]", op_type="Exp", reason="[b]"),)
    assert "[red]n[/red]" in shown(ConversionReport(float_nodes=1, fp16_nodes=0, casts_added=0, kept=kept))


def test_what_has_no_float16_and_what_was_converted_before_is_said() -> None:
    report = ConversionReport(float_nodes=4, fp16_nodes=4, unsupported_nodes=2, casts_added=-3, converted_before=True)
    first, second, _ = shown(report).splitlines()
    assert first == "the model had been converted with these settings before, and is unchanged"
    assert second == "float16   4 of the 4 nodes that compute on floats, 2 more have no float16; 3 casts fewer"


def test_what_draws_random_numbers_is_told() -> None:
    report = ConversionReport(float_nodes=4, fp16_nodes=4, random_nodes=tuple(f"Bernoulli 'n{i}'" for i in range(5)))
    line = shown(report, certified=True).splitlines()[1]
    assert line.startswith("random    Bernoulli 'n0', Bernoulli 'n1', Bernoulli 'n2' and 2 more: their outputs differ")


def test_what_a_certificate_says_is_not_said_twice() -> None:
    report = ConversionReport(float_nodes=1, fp16_nodes=1, casts_added=2)
    assert len(shown(report, source_bytes=2, size_bytes=1, certified=True).splitlines()) == 2


def test_elsewhere_than_on_a_terminal_steps_are_lines_at_least_ten_seconds_apart() -> None:
    file, now = io.StringIO(), [0.0]
    lines = ProgressLines(Console(file=file, width=40), clock=lambda: now[0])
    steps = {
        0: "verifying",
        9: "a",
        10: "b",
        19: "c",
        21: "searching [what]",
        22: "searching: 1",
        31: "searching: 2 " + "x" * 60,
    }
    for seconds, step in steps.items():
        now[0] = float(seconds)
        lines(step)
    assert file.getvalue().splitlines() == ["b", "searching [what]", "searching: 2 " + "x" * 60]


def test_a_terminal_shows_the_step_that_is_being_done() -> None:
    file = io.StringIO()
    with progress_on(Console(file=file, force_terminal=True, width=80)) as progress:
        progress("searching [what]")
    assert "searching [what]" in file.getvalue()
