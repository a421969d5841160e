from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper, parser

from halfserve.export.export_errors import ExportError
from halfserve.export.verification.generated import synthetic
from halfserve.export.verification.generated.adversarial import FACTORS, ROWS, AdversarialCase, adversarial_cases, is_mask
from halfserve.export.verification.generated.synthetic import synthesize, synthetic_samples
from halfserve.export.verification.samples import Array, Input, inputs_of, make_feeds
from tests.export.stored_models import answers, parse

X = Input(name="x", elem_type=TensorProto.FLOAT16, dims=("batch", "length"))
IDS = Input(name="ids", elem_type=TensorProto.INT64, dims=("batch", "length"))
POSITIONS = Input(name="position_ids", elem_type=TensorProto.INT64, dims=("batch", "length"))
MASK = Input(name="attention_mask", elem_type=TensorProto.INT64, dims=("batch", "length"))

floats = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 4)), elements=st.floats(-100, 100, width=32))
TEXT = """
<ir_version: 8, opset_import: ["": 17]>
g (int64[batch,seq] input_ids, int64[batch,seq] attention_mask, int64[batch,seq] position_ids, float[batch,3,h,w] image,
   bool[batch] flag, int64[batch] other) => (float[batch,seq,4] y) {
    cast = Cast<to=6>(input_ids)
    words = Gather(vocabulary, cast)
    places = Gather(positions, position_ids)
    y = Add(words, places)
}
"""


def by_name(cases: list[AdversarialCase]) -> dict[str, AdversarialCase]:
    assert len({case.name for case in cases}) == len(cases)
    return {case.name: case for case in cases}


@given(floats)
@example(np.full((1, 3), 5.8159266, np.float32))  # whose mean is rounded up
def test_cases_are_finite_within_the_users_range_or_scaled_from_it(x: Array) -> None:
    cases = adversarial_cases([X], [{"x": x}], resizable=True)
    for case in cases:
        array = case.feed["x"]
        assert array.dtype == x.dtype
        assert np.isfinite(array).all()
        assert array.shape[1:] == x.shape[1:]
        assert np.abs(array).max() <= max(float(np.abs(x).max()), 1.0) * (case.factor or 1.0)


def test_constant_rows_of_the_largest_numbers_stay_finite() -> None:
    x = np.full((1, 3), 3e38, np.float32)  # whose sum is infinite
    constant = by_name(adversarial_cases([X], [{"x": np.concatenate([x, -x])}], resizable=True))["constant rows"]
    assert np.array_equal(constant.feed["x"], x)


@given(floats)
def test_cases_are_deterministic_and_distinct(x: Array) -> None:
    one, two = (adversarial_cases([X], [{"x": x}], resizable=True) for _ in range(2))
    assert [case.name for case in one] == [case.name for case in two]
    assert all(np.array_equal(a.feed["x"], b.feed["x"]) for a, b in zip(one, two, strict=True))
    assert len({(case.feed["x"].tobytes(), case.feed["x"].shape) for case in one}) == len(one)


def test_floating_inputs_become_zeros_extremes_and_larger_values() -> None:
    x = np.array([[1.0, -3.0], [2.0, 0.5], [0.25, 7.0]], np.float32)
    cases = by_name(adversarial_cases([X], [{"x": x}], resizable=True))
    assert not cases["zeros"].feed["x"].any()
    assert (np.abs(cases["largest"].feed["x"]) == 7).all()
    assert cases["constant rows"].feed["x"].tolist() == [[-1, -1]]
    assert cases["batch of one"].feed["x"].shape == (1, 2)
    assert np.array_equal(cases["duplicates"].feed["x"], np.repeat(x[:1], ROWS, axis=0))
    for factor in FACTORS:
        assert np.array_equal(cases[f"{factor:g} times larger"].feed["x"], x[:1] * factor)


@pytest.mark.parametrize(("sign", "expected"), [(1, 5.0), (-1, -5.0)])
def test_the_largest_keeps_the_users_sign(sign: int, expected: float) -> None:
    x = sign * np.array([[1.0, 5.0]], np.float32)
    assert (by_name(adversarial_cases([X], [{"x": x}], resizable=True))["largest"].feed["x"] == expected).all()


def test_a_mask_has_a_row_fully_masked_and_tokens_take_the_largest_seen() -> None:
    feed = {"ids": np.array([[3, 9], [4, 5], [1, 1]]), "attention_mask": np.ones((3, 2), np.int64)}
    cases = by_name(adversarial_cases([IDS, MASK], [feed], resizable=True))
    assert cases["masked row"].feed["attention_mask"].tolist() == [[0, 0], [1, 1]]
    assert np.array_equal(cases["masked row"].feed["ids"], feed["ids"][:2])
    assert (cases["largest integers"].feed["ids"] == 9).all()
    assert "zeros" not in cases


def test_a_floating_mask_is_masked_with_its_lowest_value() -> None:
    mask = Input(name="mask", elem_type=TensorProto.FLOAT, dims=("batch", 2))
    feed = {"mask": np.array([[0.0, -1e4], [0.0, 0.0]], np.float32)}
    cases = by_name(adversarial_cases([mask], [feed], resizable=True))
    assert cases["masked row"].feed["mask"].tolist() == [[-1e4, -1e4], [0, 0]]


def test_masks_are_recognised_by_values_and_names() -> None:
    assert is_mask(MASK, [{"attention_mask": np.array([[1, 0]])}])
    assert not is_mask(IDS, [{"ids": np.array([[1, 2]])}])
    assert not is_mask(X, [{"x": np.array([[0.0, 1.0]])}])
    assert is_mask(Input(name="b", elem_type=TensorProto.BOOL, dims=(1,)), [{"b": np.array([True])}])
    assert not is_mask(Input(name="b", elem_type=TensorProto.BOOL, dims=()), [{"b": np.array(True)}])


@pytest.mark.parametrize("flag", [np.array(True), np.array(1), np.array(0.5, np.float32)])
@pytest.mark.parametrize("resizable", [False, True])
def test_scalars_stay_scalars(flag: Array, resizable: bool) -> None:
    takes = Input(name="flag", elem_type=helper.np_dtype_to_tensor_dtype(flag.dtype), dims=None if resizable else ())
    cases = adversarial_cases([X, takes], [{"x": np.ones((3, 2), np.float32), "flag": flag}], resizable=resizable)
    assert {"zeros", "tiny"} <= by_name(cases).keys()
    assert {(case.feed["x"].shape, case.feed["flag"].shape) for case in cases} == {((3, 2), ())}


def test_the_longest_sequence_repeats_samples_and_continues_positions() -> None:
    feed = {"ids": np.array([[7, 8]]), "position_ids": np.array([[0, 1]])}
    cases = by_name(adversarial_cases([IDS, POSITIONS], [feed], resizable=True, longest={"length": 5}))
    assert cases["longest"].feed["ids"].tolist() == [[7, 8, 7, 8, 7]]
    assert cases["longest"].feed["position_ids"].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("size", [10**14, 2**62, 10**30])
def test_a_length_beyond_memory_is_refused(size: int) -> None:
    feed = {"ids": np.array([[7, 8]])}
    with pytest.raises(ExportError, match=rf"input 'ids' with {size} along 'length' does not fit in memory; ask for a smaller"):
        adversarial_cases([IDS], [feed], resizable=True, longest={"length": size})


def test_a_model_of_fixed_sizes_keeps_them() -> None:
    x = np.ones((5, 2), np.float32)
    cases = adversarial_cases([X], [{"x": x}], resizable=False)
    assert cases
    assert all(case.feed["x"].shape == (5, 2) for case in cases)


def test_a_model_without_inputs_has_no_adversarial_cases() -> None:
    assert adversarial_cases([], [{}], resizable=False) == []


@pytest.fixture
def bert() -> onnx.ModelProto:
    model = parser.parse_model(TEXT)
    tables = {"vocabulary": (3, 4), "positions": (16, 4)}
    model.graph.initializer.extend(numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in tables.items())
    return model


def test_inputs_follow_shapes_types_tables_and_names(bert: onnx.ModelProto) -> None:
    ids, mask, positions, image, flag, other = synthesize(bert)
    assert (ids.shape, ids.dtype) == ((2, 16), np.int64)
    assert set(np.unique(ids)) == {0, 1, 2}
    assert (mask == 1).all()
    assert np.array_equal(positions, [np.arange(16)] * 2)
    assert (image.shape, image.dtype) == ((2, 3, 32, 32), np.float32)
    assert 0.9 < image.std() < 1.1
    assert flag.all()
    assert other.max() < 8
    feeds = {v.name: a for v, a in zip(bert.graph.input, (ids, mask, positions, image, flag, other), strict=True)}
    (y,) = answers(bert, feeds).values()
    assert y.shape == (2, 16, 4)


def test_sizes_can_be_given_by_name_or_axis(bert: onnx.ModelProto) -> None:
    arrays = synthesize(bert, dims={"seq": 5, "batch": 3, "image.2": 64})
    assert [array.shape for array in arrays[:4]] == [(3, 5), (3, 5), (3, 5), (3, 3, 64, 32)]


def test_the_same_seed_gives_the_same_inputs(bert: onnx.ModelProto) -> None:
    pairs = zip(synthesize(bert, seed=3), synthesize(bert, seed=3), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
    assert not np.array_equal(synthesize(bert, seed=3)[3], synthesize(bert, seed=4)[3])


def relu(shape: list[int | str]) -> onnx.ModelProto:
    value = f"float{shape}".replace("'", "") if shape else "float"
    return parse(f"g ({value} x) => ({value} y) {{ y = Relu (x) }}", opset=17, ir=8)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [(["n", 8], 32), ([1, 8], 32), ([3, 8], 33), ([64, 8], 64), ([], 32)],
    ids=["any", "1", "3", "64", "no batch"],
)
def test_at_least_32_rows_are_made_up_for_any_batch(shape: list[int | str], rows: int) -> None:
    model = relu(shape)
    made = synthetic_samples(model)
    feeds = make_feeds(inputs_of(model), made.inputs, 32)
    assert feeds.samples == rows
    assert len(np.unique(np.concatenate([np.atleast_2d(feed["x"]) for feed in feeds.batches]), axis=0)) == rows
    assert made.note.startswith(f"the inputs are {rows} made-up rows: ")


def test_rows_too_large_for_memory_are_fewer_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "MOST_NUMBERS", 100)
    made = synthetic_samples(relu(["n", 8]))
    text = "the inputs are 12 made-up rows and not 32, since the outputs of a batch hold 16 numbers: random numbers"
    assert made.note.startswith(text)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"sequence": 4}, "no input has a dimension 'sequence'; there are attention_mask.0, attention_mask.1, batch,"),
        ({"seq": 0}, "dimension 'seq' is 0; expected at least 1"),
        ({"image.1": 4}, "no input has a dimension 'image.1'"),
    ],
)
def test_sizes_that_no_input_has_are_refused(bert: onnx.ModelProto, dims: dict[str, int], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        synthesize(bert, dims=dims)


@pytest.mark.parametrize("size", [10**14, 2**62, 10**30])
def test_sizes_beyond_memory_are_refused(bert: onnx.ModelProto, size: int) -> None:
    with pytest.raises(ExportError, match=rf"of shape \[2, {size}\] does not fit in memory; ask for smaller sizes"):
        synthesize(bert, dims={"seq": size})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("float[]", "input 'x' declares no shape, so samples cannot be generated; give samples"),
        ("string[n]", r"input 'x' is string \[n\]; values for it cannot be generated: give samples"),
        ("bfloat16[n]", r"input 'x' is bfloat16 \[n\], which cannot be verified: export the model again, in"),
    ],
)
def test_inputs_that_cannot_be_generated_are_refused(value: str, message: str) -> None:
    model = parse(f"g ({value} x) => ({value} y) {{ y = Identity (x) }}", opset=17, ir=8)
    with pytest.raises(ExportError, match=message):
        synthesize(model)
