from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest

from halfserve.export.certificate.certificate import BudgetExceeded, Certificate
from halfserve.export.certificate.html import certificate_page
from halfserve.export.certificate.table import sizes_text
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.verification.generated import lengths
from halfserve.export.verification.generated.lengths import LongerSizes, VaryingSizes, longer_sizes
from halfserve.export.verification.samples import Array, make_feeds
from halfserve.export.verification.verify import verify
from tests.export.stored_models import both, parse

SUMMED = """g (T[N, L, 4] x) => (T[N, 4] y) {
    s = ReduceSum <keepdims = 0> (x, one)  d = Shape <start = 1, end = 2> (x)  n = Cast <to = NUMBER> (d)  y = Div (s, n)
}"""
TABLE = """g (int64[N, L] ids) => (float[N, L, 4] y) {
    words = Gather (vocabulary, ids)  d = Shape <start = 1, end = 2> (ids)
    places = Slice (table, zero, d, zero)  y = Add (words, places)
}"""
SHORT = np.random.default_rng(0).uniform(50, 60, (12, 16, 4)).astype(np.float32)


def table(rows: int) -> onnx.ModelProto:
    return parse(TABLE, vocabulary=np.ones((9, 4)), table=np.ones((rows, 4)), zero=[0])


def found(model: onnx.ModelProto, given: Any, **names: int) -> list[int]:
    sizes = longer_sizes(open_model(model), given).sizes
    assert all(set(size) == (set(names) or {"L"}) for size in sizes)
    return [max(size.values()) for size in sizes]


def certified(**given: Any) -> Certificate:
    wide, half = both(SUMMED, one=np.array([1]))
    try:
        return verify(wide, half, SHORT, **given)
    except BudgetExceeded as error:
        return error.certificate


def test_a_sum_that_overflows_on_longer_samples_is_over_budget_and_says_at_which() -> None:
    certificate = certified()
    assert certificate.sizes == {"L": (16, 512, 2048)}
    assert not any(output.violations for output in certificate.outputs)
    (text,) = [text for text in certificate.violations if "length 2048" in text]
    assert "NaN or infinite" in text


def test_the_sizes_that_were_tried_are_shown() -> None:
    certificate = certified(lengths=LongerSizes(sizes=({"L": 64},)))
    assert certificate.passed
    assert sizes_text(certificate) == "L 16, 64"
    assert re.search(r"sizes tried</dt><dd>L 16, 64<", certificate_page(certificate))


@pytest.mark.parametrize(("given", "sizes"), [({"adversarial": False}, (16,)), ({"longest": {"L": 32}}, (16, 32))])
def test_a_user_who_names_the_longest_or_wants_none_gets_no_longer_ones(given: Any, sizes: tuple[int, ...]) -> None:
    certificate = certified(**given)
    assert certificate.passed
    assert certificate.sizes == {"L": sizes}


@pytest.mark.parametrize(("rows", "sizes"), [(512, [512]), (300, [300]), (1030, [512, 1030]), (4096, [512, 2048, 4096])])
def test_a_position_table_is_tried_to_its_end(rows: int, sizes: list[int]) -> None:
    assert found(table(rows), np.ones((3, 8), np.int64)) == sizes


def test_samples_that_are_as_long_as_the_table_have_no_longer_ones() -> None:
    assert found(table(40), np.ones((3, 40), np.int64)) == []


def test_a_limit_that_no_table_shows_is_found_nearly() -> None:
    text = """g (float[N, L] x) => (float[N, L] y) {
        d = Shape <start = 1, end = 2> (x)  l = Min (d, most)  e = Concat <axis = 0> (one, l)
        o = Expand (unit, e)  y = Add (x, o) }"""
    model = parse(text, most=[700], one=[1], unit=np.ones((1, 1)))
    longest = longer_sizes(open_model(model), np.ones((3, 8), np.float32))
    first, last = (size["L"] for size in longest.sizes)
    assert first == 512
    assert 650 <= last <= 700
    assert "float32 itself fails on longer ones" in longest.note


def test_dimensions_grow_by_the_same_factor() -> None:
    text = """g (float[N, past] p, float[N, now] x, float[N, all] m) => (float[N, all] y) {
        c = Concat <axis = 1> (p, x)  y = Add (c, m) }"""
    given = {name: np.ones((2, size), np.float32) for name, size in (("p", 12), ("x", 4), ("m", 16))}
    (first, last) = longer_sizes(open_model(parse(text)), given).sizes
    assert (first, last) == ({"past": 384, "now": 128, "all": 512}, {"past": 1536, "now": 512, "all": 2048})


@pytest.mark.parametrize(("bound", "most"), [("MOST_SECONDS", 0.0), ("MOST_NUMBERS", 4 * 64)])
def test_sizes_beyond_the_bounds_are_not_tried_and_that_is_said(
    bound: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, bound, most)
    longest = longer_sizes(open_model(table(4096)), np.ones((3, 16), np.int64))
    assert [size["L"] for size in longest.sizes] == ([64] if bound == "MOST_NUMBERS" else [])
    assert "takes too long or answers too much" in longest.note


def test_a_fixed_model_and_one_of_which_the_batch_alone_varies_have_no_longer_samples() -> None:
    for dims in ("2, 4", "N, 4"):
        model = parse(f"g (float[{dims}] x) => (float[{dims}] y) {{ y = Neg (x) }}")
        assert longer_sizes(open_model(model), np.ones((2, 4), np.float32)) == LongerSizes()


def test_rows_that_are_summed_are_one_sample() -> None:
    model = parse("g (float[L, 4] x) => (float[4] y) { y = ReduceSum <keepdims = 0> (x, zero) }", zero=[0])
    assert found(model, np.ones((5, 4), np.float32)) == [512, 2048]


def test_the_longest_of_the_users_batches_is_repeated_with_its_mask_and_positions() -> None:
    text = "g (int64[N, L] ids, int64[N, L] attention_mask, int64[N, L] position_ids) => (int64[N, L] y) {y = Sum (ids, ids)}"
    varying = VaryingSizes(parse(text))
    ids: list[Array] = [np.array([[7, 8]]), np.array([[1, 2, 0], [3, 4, 5]])]
    batches = [
        {"ids": i, "attention_mask": (i > 0).astype(np.int64), "position_ids": np.arange(i.size).reshape(i.shape)} for i in ids
    ]
    (case,) = varying.cases(make_feeds(varying.inputs, batches, 2), [{"L": 7}])
    assert case.name == "length 7"
    assert case.feed["ids"].tolist() == [[1, 2, 0, 1, 2, 0, 1]]
    assert case.feed["attention_mask"].tolist() == [[1, 1, 0, 1, 1, 0, 1]]
    assert case.feed["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6]]
