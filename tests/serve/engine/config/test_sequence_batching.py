"""What `sequence_batching` may say, and what is refused at load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfserve.serve.engine.config.sequence_batching import SequencePlan
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.sequences.sequence_loading import first_step
from halfserve.serve.engine.sequences.sequence_scheduler import SequenceScheduler
from tests.models import save_text
from tests.serve.engine.model_folders import load
from tests.serve.engine.sequences.scene import STATE, SUM, TELLING, save_sum, save_telling


def sum_with(root: Path, config: str) -> Model:
    save_sum(root / "sum" / "1" / "model.onnx")
    (root / "sum" / "config.pbtxt").write_text(config)
    return load(root)


def plan_of(model: Model) -> SequencePlan:
    assert isinstance(model.scheduler, SequenceScheduler)
    return model.scheduler.plan


def test_clients_see_neither_states_nor_controls(tmp_path: Path) -> None:
    model = sum_with(tmp_path, SUM)
    assert (list(model.inputs), list(model.outputs)) == (["x"], ["y"])
    assert [entry.name for entry in model.config.input] == ["x"]
    assert not model.config.HasField("dynamic_batching")
    assert list(model.config.sequence_batching.oldest.preferred_batch_size) == [4]


def test_a_state_is_an_output_too_where_the_configuration_lists_it(tmp_path: Path) -> None:
    output = 'output { name: "new_total" data_type: TYPE_FP32 dims: 1 }'
    assert list(sum_with(tmp_path, f"{SUM} {output}").outputs) == ["new_total"]


def test_the_defaults_are_tritons(tmp_path: Path) -> None:
    model = sum_with(tmp_path, f"max_batch_size: 8 sequence_batching {{ {STATE} }}")
    plan = plan_of(model)
    assert (plan.slots, plan.idle_s, plan.aligned) == (8, 1.0, False)
    assert model.config.sequence_batching.max_sequence_idle_microseconds == 1_000_000


def test_oldest_says_how_batches_wait(tmp_path: Path) -> None:
    oldest = "oldest { max_candidate_sequences: 9 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 70 }"
    model = sum_with(tmp_path, f"max_batch_size: 8 sequence_batching {{ {oldest} {STATE} }} instance_group {{ count: 2 }}")
    assert (model.limits.preferred_rows, model.limits.max_delay_s, plan_of(model).slots) == ((2, 4), 70e-6, 18)


def test_direct_waits_only_for_a_utilization(tmp_path: Path) -> None:
    direct = "direct {{ max_queue_delay_microseconds: 70 minimum_slot_utilization: {} }}"
    limits = [
        sum_with(tmp_path, f"max_batch_size: 8 sequence_batching {{ {direct.format(share)} {STATE} }}").limits
        for share in (0, 0.3)
    ]
    assert [(limit.max_delay_s, limit.preferred_rows) for limit in limits] == [(0, ()), (70e-6, (3,))]


def initial(how: str) -> str:
    state = STATE.removesuffix("}") + f'initial_state {{ name: "s" data_type: TYPE_FP32 {how} }} }}'
    return f"max_batch_size: 4 sequence_batching {{ {state} }}"


def test_a_state_begins_with_zeros_or_with_a_files_content(tmp_path: Path) -> None:
    folder = tmp_path / "sum" / "initial_state"
    folder.mkdir(parents=True)
    (folder / "seven").write_bytes(np.float32(7).tobytes())
    begins = [plan_of(sum_with(tmp_path, config)).states[0].initial.tolist()
              for config in (SUM, initial("dims: 1 zero_data: true"), initial('dims: 1 data_file: "seven"'))]  # fmt: skip
    assert begins == [[[0]], [[0]], [[7]]]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("sequence_batching { iterative_sequence: true }", "has iterative_sequence, expected a Python model"),
        (SUM.replace('"total"', '"sum"'), "state names the input 'sum', the model has 'total', 'x'"),
        (SUM.replace('"new_total"', '"sum"'), "output_name names the output 'sum', the model has 'new_total', 'y'"),
        (SUM.replace("TYPE_FP32", "TYPE_FP16"), "state 'total' has TYPE_FP16, the model's input 'total' has TYPE_FP32"),
        (SUM.replace("dims: 1", "dims: [ 1, 2 ]"), r"state 'total' has dims \[1, 2\], the model's input 'total' has"),
        (SUM.replace("dims: 1", "dims: 3"), r"state 'total' has dims \[3\], the model's input 'total' has \[-1, 1\]"),
        (SUM.replace("oldest { }", f"oldest {{ }} {STATE}"), "has input 'total' twice, expected each once"),
        (SUM.replace("oldest { }", "oldest { max_candidate_sequences: -1 }"), "has max_candidate_sequences -1, expected 1 or"),
        (
            SUM.replace("oldest { }", "oldest { preferred_batch_size: 5 }"),
            "preferred_batch_size has 5, expected 1 to",
        ),
        (
            SUM.replace("oldest { }", "direct { minimum_slot_utilization: 2 }"),
            "has minimum_slot_utilization 2, expected 0",
        ),
        (initial("dims: 2"), r"has an initial_state of dims \[2\], expected the state's data_type and fixed sizes"),
        (initial('dims: 1 data_file: "none"'), "has data_file 'none': cannot read initial_state/none: No such file"),
        (initial('dims: 1 data_file: "../1/model.onnx"'), "has data_file '../1/model.onnx', expected a file name"),
    ],
)
def test_contradictions_are_refused_in_one_line(tmp_path: Path, config: str, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says) as refusal:
        sum_with(tmp_path, config)
    assert "\n" not in str(refusal.value)


def test_a_data_file_must_have_the_states_size(tmp_path: Path) -> None:
    (tmp_path / "sum" / "initial_state").mkdir(parents=True)
    (tmp_path / "sum" / "initial_state" / "short").write_bytes(b"123")
    with pytest.raises(ModelLoadError, match=r"its data_file has 3 bytes, expected 4 for \[1\]"):
        sum_with(tmp_path, initial('dims: 1 data_file: "short"'))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"start"', '"begin"', "control_input names the input 'begin', the model has"),
        ("[ 0, 1 ]", "[ 0 ]", r"'start' needs one of int32_false_true, .*, with two values"),
        ("[ 5, 6 ]", "[ 5, 6 ] bool_false_true: [ false, true ]", r"'end' needs one of int32_false_true"),
        ("fp32_false_true: [ 0, 1 ]", "int32_false_true: [ 0, 1 ]", "'start' is of type TYPE_INT32, the model has TYPE_FP32"),
        ("TYPE_UINT64", "TYPE_FP32", "'id' is CONTROL_SEQUENCE_CORRID, expected a data_type of TYPE_UINT64, TYPE_INT64,"),
        ("TYPE_UINT64", "TYPE_INT64", "'id' is of type TYPE_INT64, the model has TYPE_UINT64"),
        ("CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_START", "has control CONTROL_SEQUENCE_START twice"),
        ('"end" control', '"end" control { } control', "'end' has 2 controls, expected one"),
    ],
)
def test_controls_must_fit_the_model(tmp_path: Path, old: str, new: str, says: str) -> None:
    save_telling(tmp_path / "telling" / "1" / "model.onnx")
    config = f"max_batch_size: 4 sequence_batching {{ {TELLING} }}"
    (tmp_path / "telling" / "config.pbtxt").write_text(config.replace(old, new))
    with pytest.raises(ModelLoadError, match=says):
        load(tmp_path)


def test_a_latency_target_is_refused_where_rows_have_places(tmp_path: Path) -> None:
    save_telling(tmp_path / "telling" / "1" / "model.onnx")
    target = 'parameters { key: "halfserve.latency_target_ms" value { string_value: "5" } }'
    (tmp_path / "telling" / "config.pbtxt").write_text(f"max_batch_size: 4 sequence_batching {{ {TELLING} }} {target}")
    with pytest.raises(ModelLoadError, match=r"halfserve\.latency_target_ms has no meaning for batches with a row for each"):
        load(tmp_path)


def lstm_like(path: Path) -> Path:
    """x [batch, 2], h [3, batch, 2], gain [] -> y = gain * x + the sum of h, new_h = h + x: the batch of h is in the middle."""
    text = """(float[n, 2] x, float[3, n, 2] h, float gain) => (float[n, 2] y, float[3, n, 2] new_h) {
        sum = ReduceSum<keepdims = 0>(h, axis)  scaled = Mul(x, gain)  y = Add(scaled, sum)  new_h = Add(h, x) }"""
    return save_text(path, text, axis=np.array([0]))


LSTM = """max_batch_size: 4
    sequence_batching { state { input_name: "h" output_name: "new_h" data_type: TYPE_FP32 dims: [ 3, 2 ] } }
    parameters { key: "halfserve.constant_inputs" value { string_value: "gain=10" } }"""


def test_a_states_batch_may_be_in_any_dimension_and_inputs_may_be_constant(tmp_path: Path) -> None:
    lstm_like(tmp_path / "lstm" / "1" / "model.onnx")
    (tmp_path / "lstm" / "config.pbtxt").write_text(LSTM)
    model = load(tmp_path)
    assert list(model.inputs) == ["x"]
    plan = plan_of(model)
    assert plan.states[0].initial.shape == (1, 3, 2)
    x = np.array([[1, 2], [3, 4]], np.float32)
    inputs = {**first_step(plan, {"x": x}, 2), "h": np.arange(12, dtype=np.float32).reshape(2, 3, 2)}
    outputs = model.backends[0].run(inputs)
    assert outputs["y"].tolist() == [[10 + 6, 20 + 9], [30 + 24, 40 + 27]]
    assert outputs["new_h"].tolist() == (inputs["h"] + x[:, None]).tolist()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("gian=10", "fixes the input 'gian', the model has 'gain', 'h', 'x'"),
        ("x=1, gain=1", r"fixes the input 'x', which is FP32 \[-1, 2\]; expected numbers of a fixed size"),
        ("gain", "is 'gain', expected names and finite numbers, such as 'sr=16000, scale=0.5'"),
        ("gain=inf", "expected names and finite numbers"),
        ("", "expected names and finite numbers"),
    ],
)
def test_constant_inputs_must_fit_the_model(tmp_path: Path, value: str, says: str) -> None:
    lstm_like(tmp_path / "lstm" / "1" / "model.onnx")
    (tmp_path / "lstm" / "config.pbtxt").write_text(LSTM.replace("gain=10", value))
    with pytest.raises(ModelLoadError, match=says):
        load(tmp_path)
