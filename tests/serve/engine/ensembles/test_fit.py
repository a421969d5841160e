"""An ensemble is refused where its tensors and the models of its steps do not meet."""

from __future__ import annotations

import pytest

from halfserve.serve.engine.ensembles.composition import EnsembleComposition
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.engine.ensembles.scene import made, model

FP32_4, FP16_4 = ("FP32", (-1, 4)), ("FP16", (-1, 4))


def connect(text: str, *models: Model) -> None:
    composition = made(text).composition
    assert isinstance(composition, EnsembleComposition)
    composition.connect(InferenceCore(models))


def refusal(text: str, *models: Model) -> str:
    with pytest.raises(ModelLoadError) as refused:
        connect(text, *models)
    return str(refused.value).removeprefix("pipe/config.pbtxt: ")


BATCHED = "max_batch_size: 8"
CHAIN = ensemble(step("a", "x=x", "y=t"), step("b", "x=t", "y=out"), more=BATCHED)


def test_a_model_that_is_not_served_is_named_with_its_step() -> None:
    assert refusal(CHAIN, model("a")) == "step 2 (model 'b'): the model is not served; load or repair it, or correct model_name"


def test_a_version_that_is_not_served_is_named_with_those_that_are() -> None:
    text = ensemble(step("a", "x=x", "y=out", version=7), more=BATCHED)
    assert refusal(text, model("a"), model("a", version=3)) == (
        "step 1 (model 'a'): version 7 of the model is not served; served: 1, 3"
    )


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ("u=x", "y=out", "step 1 (model 'a'): input_map names 'u', but the model's inputs are 'x', 'w'"),
        ("x=x w=x", "z=out", "step 1 (model 'a'): output_map names 'z', but the model's outputs are 'y'"),
        ("x=x", "y=out", "step 1 (model 'a'): input_map has no entry for input 'w' of the model; map a tensor to it"),
    ],
)
def test_maps_name_the_tensors_of_the_model(inputs: str, outputs: str, text: str) -> None:
    two = model("a", inputs={"x": ("FP32", (-1, 1)), "w": ("FP32", (-1, 1))})
    assert refusal(ensemble(step("a", inputs, outputs), more=BATCHED), two) == text


def test_types_of_a_tensor_must_be_the_same() -> None:
    chain = ensemble(step("a", "x=x", "y=t"), step("b", "x=t", "y=out"), input="x:FP32:4", output="out:FP32:4", more=BATCHED)
    half = model("a", inputs={"x": FP32_4}, outputs={"y": FP16_4})
    full = model("b", inputs={"x": FP32_4}, outputs={"y": FP32_4})
    assert refusal(chain, half, full) == (
        "step 2 (model 'b'): input 'x' is FP32, but the tensor 't' is FP16, as output 'y' of step 1 (model 'a'); put a step "
        "that casts between them"
    )
    assert refusal(chain.replace("TYPE_FP32", "TYPE_FP16"), half, full) == (
        "step 1 (model 'a'): input 'x' is FP32, but the tensor 'x' is FP16, as input 'x' of the ensemble; put a step that "
        "casts between them"
    )


def test_shapes_of_a_tensor_must_meet() -> None:
    four, five = (model(name, inputs={"x": FP32_4}, outputs={"y": ("FP32", (-1, n))}) for name, n in (("a", 5), ("b", 4)))
    chain = ensemble(step("a", "x=x", "y=t"), step("b", "x=t", "y=out"), input="x:FP32:4", output="out:FP32:4", more=BATCHED)
    assert refusal(chain, four, five) == (
        "step 2 (model 'b'): input 'x' has shape [-1, 4], but the tensor 't' has shape [-1, 5], as output 'y' of step 1 "
        "(model 'a')"
    )
    lone = ensemble(step("a", "x=x", "y=out"), input="x:FP32:4", output="out:FP32:4", more=BATCHED)
    assert refusal(lone, four) == (
        "output 'out' of the ensemble has shape [-1, 4], but the tensor 'out' has shape [-1, 5], as output 'y' of step 1 "
        "(model 'a')"
    )


def test_a_batch_of_the_ensemble_fits_into_each_of_its_models() -> None:
    small = model("b", config="max_batch_size: 4")
    assert refusal(CHAIN, model("a"), small) == (
        "step 2 (model 'b'): the model's max_batch_size is 4, the ensemble's is 8; set the ensemble's to 4 or less"
    )
    connect(CHAIN.replace(BATCHED, "max_batch_size: 4"), model("a"), small)


@pytest.mark.parametrize("shape", [(-1, 1), (1,), (2, 1)])
def test_models_without_a_batch_dimension_take_a_whole_batch_or_one_row(shape: tuple[int, ...]) -> None:
    whole = model("b", inputs={"x": ("FP32", shape)}, outputs={"y": ("FP32", shape)}, config="")
    connect(CHAIN, model("a"), whole)


def test_models_without_a_batch_dimension_of_another_shape_are_refused() -> None:
    whole = model("b", inputs={"x": ("FP32", (3, 3, 1))}, outputs={"y": ("FP32", (1,))}, config="")
    assert "but the tensor 't' has shape [-1, 1]" in refusal(CHAIN, model("a"), whole)


SIDE = ensemble(step("a", "x=x", "y=t"), step("b", "x=x", "y=u"), step("c", "p=t q=u", "y=out"), more=BATCHED)
BOTH = {"p": ("FP32", (-1, 1)), "q": ("FP32", (-1, 1))}
DECOUPLED = f"{BATCHED} model_transaction_policy {{ decoupled: true }}"


@pytest.mark.parametrize(
    ("text", "b_is", "what"),
    [
        (SIDE, DECOUPLED, "step 3 (model 'c'): its inputs"),
        (SIDE, BATCHED, "step 3 (model 'c'): its inputs"),
        (
            ensemble(step("a", "x=x", "y=t"), step("b", "x=x", "y=u"), output="t u", more=BATCHED),
            BATCHED,
            "the outputs of the ensemble",
        ),
    ],
)
def test_responses_that_cannot_be_matched_are_refused(text: str, b_is: str, what: str) -> None:
    models = model("a", config=DECOUPLED), model("b", config=b_is), model("c", inputs=BOTH)
    other = "step 2 (model 'b')" if b_is == DECOUPLED else "no decoupled step"
    ways = " and ".join(f"after {way}" for way in sorted(("step 1 (model 'a')", other)))
    assert refusal(text, *models) == f"{what} come with different numbers of responses: {ways}; expected one of these for all"


def test_inputs_of_the_ensemble_meet_responses_of_a_decoupled_step() -> None:
    text = ensemble(step("a", "x=x", "y=t"), step("c", "p=t q=x", "y=out"), more=BATCHED)
    connect(text, model("a", config=DECOUPLED), model("c", inputs=BOTH))
