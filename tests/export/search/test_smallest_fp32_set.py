from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from halfserve.export.certificate.budget import Budget
from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.onnx_fp16.convert import convert
from halfserve.export.search.result import SearchResult
from halfserve.export.search.smallest_fp32_set import find_fp32_nodes
from halfserve.export.verification.metrics import compare
from halfserve.export.verification.simulation import round_every_node
from halfserve.export.verification.verify import verify
from tests.export.search.nets import Net, planted, samples
from tests.export.stored_models import answers, parse

BUDGET = Budget(max_scaled_error=0.02, min_agreement=0)
NEEDED = {
    "overflow": {"far", "back"},
    "cancel": {"add", "sub"},
    "variance": {"square", "mean_square", "mean", "square_mean", "variance"},
    "epsilon": {"square", "mean"},
    "exponential": {"exp", "log"},
    "sum": {"sum"},
}


def search(model: onnx.ModelProto | onnx_ir.Model, **changed: Any) -> SearchResult:
    given_: dict[str, Any] = {"budget": BUDGET, "adversarial": False, "repair": False, **changed}
    return find_fp32_nodes(model, given_.pop("inputs", samples()), **given_)


def within_budget(model: onnx.ModelProto, keep_fp32_nodes: set[str]) -> bool:
    """The same question, asked without the search's own machinery."""

    def run(proto: onnx.ModelProto) -> Any:
        return answers(proto, {"x": samples()[0]})["y"]

    converted = convert(onnx_ir.from_proto(model), ConversionSettings(keep_fp32_nodes=keep_fp32_nodes, repair=False))
    figures = compare(run(model), run(round_every_node(onnx_ir.to_proto(converted.model))))
    return figures.non_finite == 0 and figures.max_scaled_error <= BUDGET.max_scaled_error


def test_a_model_that_tolerates_float16_keeps_nothing() -> None:
    found = search(planted(4, {}))
    assert (found.keep_fp32_nodes, found.passed, found.minimal, found.runs, found.kept) == ((), True, True, 1, ())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("overflow", "cancel", "epsilon") else pytest.mark.long) for kind in NEEDED]
)
def test_a_plant_is_found_and_nothing_else(kind: str) -> None:
    found = search(planted(4, {1: kind}))
    assert (found.passed, found.minimal) == (True, True)
    plants, nodes = (set(part) for part in zip(*(name.split("/") for name in found.keep_fp32_nodes), strict=True))
    assert plants == {f"{kind}_1"}
    assert NEEDED[kind] <= nodes


@pytest.mark.long
@pytest.mark.parametrize("kind", ["overflow", "cancel", "epsilon"])
def test_no_smaller_set_will_do(kind: str) -> None:
    model = planted(2, {0: kind})
    found = search(model)
    names = [node.name for node in model.graph.node if node.op_type != "Identity"]
    assert within_budget(model, set(found.keep_fp32_nodes))
    for smaller in itertools.combinations(names, len(found.keep_fp32_nodes) - 1):
        assert not within_budget(model, set(smaller)), smaller


@pytest.mark.long
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.dictionaries(st.integers(0, 7), st.sampled_from(sorted(NEEDED)), min_size=1, max_size=3), st.integers(0, 99))
def test_plants_anywhere_are_found_and_no_member_can_be_left_out(plants: dict[int, str], seed: int) -> None:
    model = planted(8, plants, seed)
    found = search(model)
    assert (found.passed, found.minimal) == (True, True)
    assert {name.partition("/")[0] for name in found.keep_fp32_nodes} <= {f"{kind}_{place}" for place, kind in plants.items()}
    assert within_budget(model, set(found.keep_fp32_nodes)) or not found.keep_fp32_nodes
    for name in found.keep_fp32_nodes:
        assert not within_budget(model, {*found.keep_fp32_nodes} - {name})


@pytest.mark.parametrize("layers", [8, pytest.param(64, marks=pytest.mark.long), pytest.param(120, marks=pytest.mark.long)])
def test_runs_grow_at_most_with_the_logarithm_of_the_model(layers: int) -> None:
    found = search(planted(layers, {layers // 2: "overflow"}))
    assert set(found.keep_fp32_nodes) == {f"overflow_{layers // 2}/far", f"overflow_{layers // 2}/back"}
    assert found.runs <= math.log2(found.candidates) + len(found.keep_fp32_nodes) + 2


@pytest.mark.long
def test_ten_plants_among_a_hundred_nodes() -> None:
    kinds = itertools.cycle(["overflow", "cancel"])
    plants = {4 * place: next(kinds) for place in range(10)}
    found = search(planted(40, plants))
    assert (found.passed, found.minimal) == (True, True)
    assert {name.partition("/")[0] for name in found.keep_fp32_nodes} == {f"{kind}_{place}" for place, kind in plants.items()}
    assert len(found.keep_fp32_nodes) == 20
    assert found.runs <= len(found.keep_fp32_nodes) + 3 * math.log2(found.candidates)


def test_the_same_set_every_time_and_the_model_untouched() -> None:
    model = planted(4, {1: "cancel", 2: "exponential"})
    before = model.SerializeToString(deterministic=True)
    first, second = search(model), search(model)
    assert first == second
    assert model.SerializeToString(deterministic=True) == before


def test_an_ir_model_is_taken_too() -> None:
    model = planted(3, {1: "overflow"})
    assert search(onnx_ir.from_proto(model)) == search(model)


def test_a_model_with_sparse_weights_is_searched() -> None:
    model = parse("g (float[n, 4] x) => (float[n, 4] y) { far = Mul (x, w) back = Div (far, w) y = Relu (back) }")
    values = helper.make_tensor("w", TensorProto.FLOAT, [4], [6e4] * 4)
    places = helper.make_tensor("i", TensorProto.INT64, [4], range(4))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4]))
    found = search(model, inputs=np.full((2, 4), 2, np.float32))
    assert (found.passed, set(found.keep_fp32_nodes)) == (True, {"far", "back"})


def test_each_kept_node_says_where_it_comes_from_and_what_it_costs() -> None:
    model = planted(3, {1: "overflow"})
    far = next(node for node in model.graph.node if node.name == "overflow_1/far")
    far.metadata_props.add(key="halfserve.source", value="net/model.py:42")
    first, second = search(model).kept
    assert (first.node, first.op_type, first.module, first.source) == ("overflow_1/far", "Mul", "overflow_1", "net/model.py:42")
    assert first.reason.startswith("its output overflows: ")
    assert first.local_error == math.inf
    assert first.propagated_error == math.inf
    assert first.cost.weight_bytes == 2
    assert first.cost.casts == 0  # the cast behind it would only stand before it
    assert second.reason.startswith("its input 'v6' overflows: ")
    assert second.source is None


def test_blocked_nodes_stay_float32_and_are_not_candidates() -> None:
    model = planted(4, {0: "overflow", 2: "cancel"})
    found = search(model, keep_fp32_nodes=["overflow_0/*"])
    assert set(found.keep_fp32_nodes) == {"cancel_2/add", "cancel_2/sub"}
    by_operator = search(model, keep_fp32_ops=["Mul"])
    assert set(by_operator.keep_fp32_nodes) == {"cancel_2/add", "cancel_2/sub"}


def test_a_budget_that_float16_inputs_alone_exceed_is_explained() -> None:
    found = search(planted(2, {}), budget=Budget(max_abs_error=1e-7, min_agreement=0), keep_io_types=False)
    assert not found.passed
    assert not found.minimal
    assert found.violations
    assert found.runs == 2
    assert "even with all 4 in float32: output 'y' (rounded): max abs error" in found.explanation
    assert found.explanation.endswith("let them keep their types (keep_io_types=True or --keep-io-types)")
    assert all(output.figures.elements for output in found.outputs)


def test_a_tight_budget_keeps_everything_that_counts() -> None:
    found = search(planted(2, {}), budget=Budget(max_abs_error=0, min_agreement=0))
    assert (found.passed, set(found.keep_fp32_nodes)) == (True, {"MatMul_1", "Min_2", "MatMul_3", "Min_4"})


@pytest.mark.long
def test_runs_that_end_early_give_a_set_that_passed() -> None:
    model = planted(6, {2: "variance"})
    enough = search(model)
    few = search(model, max_runs=5)
    assert few.passed
    assert not few.minimal
    assert few.runs <= 5
    assert len(few.keep_fp32_nodes) >= len(enough.keep_fp32_nodes)
    assert few.ending == "max_runs"
    assert "the limit of 5 runs ended the search: allow more with --max-runs" in few.explanation
    assert within_budget(model, set(few.keep_fp32_nodes))


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"max_runs": 1}, "max_runs is 1; expected at least 2: one with all nodes in float16, one with none"),
        ({"max_minutes": 0.0}, "max_minutes is 0.0; expected a number above 0"),
        ({"max_minutes": math.nan}, "max_minutes is nan; expected a number above 0"),
    ],
)
def test_limits_that_leave_nothing_to_search_in_are_refused(limit: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        search(planted(1, {}), **limit)


def test_a_time_limit_gives_the_smallest_set_so_far() -> None:
    found = search(planted(4, {1: "overflow"}), max_minutes=1e-9)
    assert (found.passed, found.minimal, found.ending, found.runs) == (True, False, "max_minutes", 2)
    assert len(found.keep_fp32_nodes) == found.candidates
    assert "allow more with --max-minutes (max_minutes); this is the smallest set found" in found.explanation


def interrupting(run: int, error: BaseException | None = None) -> Callable[[str], None]:
    """Progress callback that interrupts at the given run."""

    def progress(step: str) -> None:
        if step.startswith(f"searching: run {run} of"):
            raise error or KeyboardInterrupt

    return progress


def test_an_interrupt_gives_the_smallest_set_so_far() -> None:
    model = planted(8, {2: "variance", 5: "cancel"})
    found = search(model, progress=interrupting(9))
    assert (found.passed, found.minimal, found.ending, found.runs) == (True, False, "interrupted", 8)
    assert 0 < len(found.keep_fp32_nodes) < found.candidates
    assert within_budget(model, set(found.keep_fp32_nodes))
    assert found.explanation.startswith("an interrupt ended the search")


def test_an_interrupt_before_anything_passed_ends_the_search() -> None:
    with pytest.raises(KeyboardInterrupt):
        search(planted(4, {1: "overflow"}), progress=interrupting(2))


def test_sets_that_cannot_be_tried_do_not_lose_what_was_found() -> None:
    found = search(planted(8, {2: "variance", 5: "cancel"}), progress=interrupting(9, ExportError("the disk is full")))
    assert (found.passed, found.minimal, found.runs) == (True, False, 8)
    assert 0 < len(found.keep_fp32_nodes) < found.candidates
    assert re.search(r"a set of \d+ nodes could not be tried \(the disk is full\)", found.explanation)


def near_ties(model: onnx.ModelProto, seed: int) -> Any:
    """150 samples of a net, [150, 8]: in 50 of them its two largest outputs are as close as in the closest of 20,000."""
    x = np.random.default_rng(seed).uniform(-1, 1, (20_000, 8)).astype(np.float32)
    y = np.sort(answers(model, {"x": x}, "ORT_ENABLE_ALL")["y"], -1)
    closest = np.argsort((y[:, -1] - y[:, -2]) / np.abs(y).max())[:300:6]
    others = np.random.default_rng(seed + 1).uniform(-1, 1, (100, 8)).astype(np.float32)
    return np.concatenate([x[closest], others])


@pytest.mark.long
@pytest.mark.parametrize(("kind", "seed"), [("overflow", 1), ("variance", 4)])
def test_sets_that_only_the_simulation_accepts_do_not_pass(kind: str, seed: int) -> None:
    model = Net(seed).layers(2).plant(kind).layers(2).model()
    x = near_ties(model, seed)
    budget = Budget(max_scaled_error=0.02)
    found = search(model, inputs=x, budget=budget, repair=True)
    assert found.passed
    assert {output.execution for output in found.outputs} >= {"rounded", "runtime"}
    converted = convert(onnx_ir.from_proto(model), ConversionSettings(keep_fp32_nodes=found.keep_fp32_nodes))
    assert verify(model, onnx_ir.to_proto(converted.model), x, budget=budget, adversarial=False).passed


def test_sets_are_compared_with_a_separate_reference() -> None:
    model, other = planted(2, {}), planted(2, {}, seed=5)
    found = search(model, reference=other)
    assert not found.passed
    assert "the float32 ONNX model itself is over budget beside the reference: output 'y': " in found.explanation
    assert search(other, reference=other).passed


def test_unsuitable_samples_and_names_are_refused() -> None:
    model = planted(2, {})
    with pytest.raises(ExportError, match=r"input 'x': expected float \[N, 8\], got float32 \[4, 9\]"):
        search(model, inputs=[np.zeros((4, 9), np.float32)])
    with pytest.raises(ExportError, match=r"the model takes 1 inputs \(x\), 2 were given"):
        search(model, inputs=[*samples(), *samples()])
    with pytest.raises(ExportError, match="keep_fp32_nodes: the node 'MatMul_2' matches no node"):
        search(model, keep_fp32_nodes=["MatMul_2"])


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "If": (
        """a = Abs (x) m = ReduceMax <keepdims = 0> (a) flag = Cast <to = 9> (m) body = If (flag) <
        then_branch = t () => (float[N, 8] p) { huge = Mul (x, wide) p = Mul (huge, narrow) },
        else_branch = e () => (float[N, 8] q) { q = Neg (x) }>""",
        {"wide": 3e6, "narrow": 1 / 3e6},
    ),
    # Abs, or else it is a sum, which needs no search.
    "Loop": (
        """body = Loop (count, , x) <body = b (int64 turn, bool go, float[] state) => (bool on, float[] back) {
        on = Identity (go) far = Add (state, offset) same = Abs (far) back = Sub (same, offset) }>""",
        {"count": np.int64(2), "offset": 3e3},
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_what_breaks_inside_a_body_keeps_its_node(kind: str) -> None:
    text, weights = BODIES[kind]
    found = search(parse(f"g (float[N, 8] x) => (float[N, 8] y) {{ {text} y = Identity (body) }}", opset=17, ir=8, **weights))
    assert (found.passed, found.minimal, found.keep_fp32_nodes) == (True, True, ("body",))
    assert found.kept[0].op_type == kind


def test_a_choice_that_flips_is_traced_to_what_flips_it() -> None:
    net = Net().layers(2).plant("cancel").layers(1)
    net.nodes.append(helper.make_node("ArgMax", [net.x], ["choice"], name="choose", axis=1, keepdims=0))
    model = net.model()
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("choice", TensorProto.INT64, None))
    found = search(model, budget=Budget(min_agreement=1))
    assert (found.passed, set(found.keep_fp32_nodes)) == (True, {"cancel/add", "cancel/sub"})


def test_a_mask_that_overflows_before_a_softmax_is_not_kept() -> None:
    net = Net().layers(1)
    blocked = net.constant(np.r_[np.zeros(6), np.ones(2)])
    masked = net.add("Add", net.x, net.add("Mul", blocked, net.constant(-1e9), name="mask"), name="masked")
    net.x = net.add("Softmax", masked, axis=-1, name="softmax")
    found = search(net.layers(1).plant("cancel").layers(1).model())
    assert (found.passed, set(found.keep_fp32_nodes)) == (True, {"cancel/add", "cancel/sub"})
    assert found.runs <= 5


@pytest.mark.parametrize("opset", [8, pytest.param(11, marks=pytest.mark.long), 21])
def test_old_and_new_opsets(opset: int) -> None:
    net = Net().layers(2).plant("overflow").layers(1)
    assert set(search(net.model(opset)).keep_fp32_nodes) == {"overflow/far", "overflow/back"}


def test_progress_is_reported() -> None:
    reported: list[str] = []
    search(planted(2, {0: "overflow"}), progress=reported.append)
    assert reported[0] == "searching: preparing the model"
    first = r"searching: run 1 of at most 120, \d+\.\d min: 0 of 8 nodes in float32"
    assert any(re.fullmatch(first, text) for text in reported)
    assert any(text.startswith("searching: run 3 of at most 120") and text.endswith("; enough so far: 8") for text in reported)
    assert "searching: measuring 8 nodes" in reported


def test_sums_beyond_float16_count_with_float16_accumulators() -> None:
    net = Net().layers(1)
    large = net.add("Mul", net.x, net.constant(1.5e4), name="large")
    net.x = net.add(
        "Mul", net.add("ReduceMean", net.add("Abs", large), axes=[1], name="mean"), net.constant(1e-4), name="small"
    )
    model = net.model()
    assert search(model).keep_fp32_nodes == ()
    found = search(model, accumulators="float16")
    assert (found.passed, found.keep_fp32_nodes) == (True, ("mean",))


def test_empty_outputs_are_explained() -> None:
    model = parse(
        """g (float[n, 4] x) => (float[m, 4] y)
        <int64[1] nothing = {0}> {
            grown = Exp(x)
            y = Slice(grown, nothing, nothing)
        }"""
    )
    found = find_fp32_nodes(model, [np.ones((3, 4), np.float32)], budget=Budget())
    assert not found.passed
    assert found.explanation == "nothing was compared: no output has elements on these samples; give others"
