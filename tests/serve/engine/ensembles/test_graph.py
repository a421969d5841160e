"""The structure of an ensemble is read from its configuration, and refused where it cannot be computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.ensembles.graph import EnsembleGraph, is_ensemble, read_graph, step_models
from halfserve.serve.engine.errors import ModelLoadError
from tests.serve.engine.ensembles.configurations import ensemble, step

SOURCE = Path("pipe/config.pbtxt")


def graph(*steps: str, **declared: str) -> EnsembleGraph:
    return read_graph(text_format.Parse(ensemble(*steps, **declared), ModelConfig(name="pipe")), SOURCE)


def refusal(*steps: str, **declared: str) -> str:
    with pytest.raises(ModelLoadError) as refused:
        graph(*steps, **declared)
    return str(refused.value).removeprefix(f"{SOURCE}: ")


DIAMOND = (
    step("left", "x=a", "y=b"),
    step("join", "p=b q=c", "y=out"),
    step("right", "x=a", "y=c"),
    step("first", "x=x", "y=a"),
)


def test_steps_wait_for_those_whose_outputs_they_read_whatever_their_order() -> None:
    made = graph(*DIAMOND)
    assert [made.waits_for(index) for index in range(4)] == [{3}, {0, 2}, {3}, set()]
    assert made.needed(["out"]) == {0, 1, 2, 3}


def test_only_steps_that_the_wanted_outputs_need_are_computed() -> None:
    made = graph(
        step("first", "x=x", "y=a z=b"),
        step("second", "x=a", "y=c"),
        step("third", "x=b", "y=d"),
        output="c d",
    )
    assert made.needed(["c"]) == {0, 1}
    assert made.needed(["d"]) == {0, 2}


def test_versions_below_one_are_the_latest() -> None:
    made = graph(step("a", "x=x", "y=t", version=-1), step("b", "x=t", "y=u"), step("c", "x=u", "y=out", version=3))
    assert [one.version for one in made.steps] == [None, None, 3]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], "ensemble_scheduling has no step, expected one at least"),
        ([step("", "x=x", "y=out")], "ensemble_scheduling: step 1 has no model_name; expected one"),
        ([step("a", "", "y=out")], "ensemble_scheduling: step 1 has no input_map; expected one"),
        ([step("a", "x=x", "")], "ensemble_scheduling: step 1 has no output_map; expected one"),
        (
            [step("a", "x=x", "y=out"), step("b", "x=x", "z=out")],
            (
                "step 2 (model 'b'): output 'z' writes the tensor 'out', which is written by step 1 (model 'a'); give it "
                "another name"
            ),
        ),
        (
            [step("a", "x=x", "y=out z=x")],
            "step 1 (model 'a'): output 'z' writes the tensor 'x', which is an input of the ensemble; give it another name",
        ),
        (
            [step("a", "x=x", "y=t"), step("b", "x=tt", "y=out")],
            (
                "step 2 (model 'b'): input 'x' reads the tensor 'tt', which no step writes and which is no input of the "
                "ensemble; there are 'out', 't', 'x'"
            ),
        ),
        ([step("a", "x=x", "y=t")], "no step writes the output 'out' of the ensemble; steps write 't'"),
        (
            [step("a", "x=x", "y=out z=t")],
            (
                "step 1 (model 'a') writes the tensor 't', which no step reads and which is no output of the ensemble; "
                "remove it from output_map"
            ),
        ),
        (
            [step("a", "x=x w=u", "y=t"), step("b", "x=t", "y=u z=out")],
            (
                "the steps wait for each other: step 1 (model 'a') -> step 2 (model 'b') -> step 1 (model 'a'); remove one of "
                "the tensors between them"
            ),
        ),
        (
            [step("a", "x=x w=out", "y=out")],
            "the steps wait for each other: step 1 (model 'a') -> step 1 (model 'a'); remove one of the tensors between them",
        ),
    ],
)
def test_what_is_no_graph_is_refused(steps: list[str], text: str) -> None:
    assert refusal(*steps) == text


ONE = step("a", "x=x", "y=out")


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"input": ""}, "the ensemble has no input, expected one at least; declare it"),
        ({"output": ""}, "the ensemble has no output, expected one at least; declare it"),
        ({"input": "x x"}, "input 'x' is there twice, expected each once; remove one"),
        ({"input": "x w"}, "no step reads the input 'w' of the ensemble; remove it, or map it"),
        ({"more": 'input { name: "w" dims: 1 }'}, "input 'w' has no data_type; an ensemble declares its tensors"),
        (
            {"more": 'input { name: "w" data_type: TYPE_FP32 dims: -2 }'},
            "input 'w' has dims [-2], expected sizes of 0 or more, or -1 for any size",
        ),
        ({"more": "max_batch_size: -1"}, "max_batch_size is -1, expected 0 (no batching) or more"),
        (
            {"more": "instance_group { count: 2 }"},
            "instance_group is not for ensembles; set it for the models of the steps instead",
        ),
        ({"more": "optimization { }"}, "optimization is not for ensembles; set it for the models of the steps instead"),
    ],
)
def test_what_an_ensemble_declares_is_checked(declared: dict[str, str], text: str) -> None:
    assert refusal(ONE, **declared) == text


def test_a_namespace_is_refused() -> None:
    with_namespace = ONE.replace("model_name", 'model_namespace: "n" model_name')
    assert refusal(with_namespace) == (
        "ensemble_scheduling: step 1 has a model_namespace, which is not supported; one repository is served here"
    )


def test_a_long_chain_is_no_deep_recursion() -> None:
    links = [step("a", f"x=t{number}", f"y=t{number + 1}") for number in range(2000)]
    made = graph(*links, input="t0", output="t2000")
    assert len(made.needed(["t2000"])) == 2000


def test_an_ensemble_is_known_by_its_platform_or_by_its_steps() -> None:
    def config(text: str) -> ModelConfig:
        return text_format.Parse(text, ModelConfig())

    assert is_ensemble(config('platform: "ensemble"'))
    assert is_ensemble(config(f"ensemble_scheduling {{ {ONE} }}"))
    assert not is_ensemble(config(f'platform: "onnxruntime_onnx" ensemble_scheduling {{ {ONE} }}'))
    assert step_models(config(f"ensemble_scheduling {{ {ONE} {ONE} }}")) == ["a"]
