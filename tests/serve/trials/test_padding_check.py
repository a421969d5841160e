"""Padding is proved before a model serves, and refused where it changes answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from onnx import TensorProto

from halfserve.protos.certificates import SCHEMA, certificate_sha256, named_entry
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import Backend, BackendView, DevicePlacement, Runtime
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.padding.mixed_lengths import MixedLengths
from halfserve.serve.engine.repository.model_loading import load_version, started
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.tensors import Array, Tensors
from halfserve.serve.trials.padding_check import proved_padding
from halfserve.serve.trials.tried_version import TriedVersion
from tests.models import save_text
from tests.serve.model_control.controlled import loader
from tests.serve.padded_models import RULE, SIZE, VOCABULARY, expected, save_masked_mean, save_pooled, table, write_config
from tests.serve.running_server import running_server


def loaded(root: Path, runtime: Runtime | None = None) -> Model:
    (files,) = find_models(root)
    return loader(runtime=runtime).load(files)


def test_a_model_that_heeds_its_mask_is_padded(tmp_path: Path, caplog: pytest.LogCaptureFixture, runtime: Runtime) -> None:
    save_masked_mean(tmp_path / "m")
    version = loaded(tmp_path, runtime)
    assert version.mixed is not None
    assert version.mixed.costs.is_confident, "what batches cost has been measured"
    assert version.config.parameters["halfserve.padding"].string_value == RULE
    assert caplog.text == ""


def test_a_model_that_ignores_its_mask_is_served_unpadded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, runtime: Runtime
) -> None:
    save_masked_mean(tmp_path / "m", ignores_mask=True)
    version = loaded(tmp_path, runtime)
    assert version.mixed is None
    assert "halfserve.padding" not in version.config.parameters
    assert "m/1: it is served without padding" in caplog.text
    assert "output 'mean', column" in caplog.text


def test_a_mask_that_buckets_hide_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parameters = {"halfserve.padding": RULE, "halfserve.padding_buckets": "16,32"}
    save_masked_mean(tmp_path / "m", ignores_mask=True, parameters=parameters)
    version = loaded(tmp_path)
    assert version.mixed is None
    assert not {key for key in version.config.parameters if "padding" in key}, "clients see what is in force"
    assert "of a row of length 1 padded to 16 differs from what the row gets alone" in caplog.text


def test_a_column_of_large_numbers_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large, others = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
    large[3], others[3] = 1e4, 0
    save_pooled(
        tmp_path / "m",
        "a = Mul(right, large)  b = Mul(wrong, others)  y = Add(a, b)",
        weights={"large": large, "others": others},
    )
    assert loaded(tmp_path).mixed is None
    assert "output 'y', column" in caplog.text


@pytest.mark.parametrize(("vectors", "is_padded"), [("right", True), ("wrong", False)])
def test_class_names_must_be_those_of_the_row_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, vectors: str, *, is_padded: bool
) -> None:
    text = f"best = ArgMax<axis = 1, keepdims = 0>({vectors})  y = Gather(names, best)"
    names = np.array([f"class {number}" for number in range(SIZE)], object)
    save_pooled(tmp_path / "m", text, weights={"names": names}, output=TensorProto.STRING, shape=["batch"])
    assert (loaded(tmp_path).mixed is not None) is is_padded
    assert ("output 'y' of a row of length" in caplog.text) is not is_padded


FIRST_COUNT = """c = Cast<to = 1>(count)  is_counted = Less(place, count)  counted = Cast<to = 1>(is_counted)
    weights = Unsqueeze(counted, two)  kept = Mul(found, weights)  sum = ReduceSum<keepdims = 0>(kept, one)"""


def test_a_length_given_as_a_number_is_tried_with_the_rows_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_pooled(tmp_path / "good" / "m", f"{FIRST_COUNT} y = Div(sum, c)", inputs=["count"])
    assert loaded(tmp_path / "good").mixed is not None
    wrong_beyond_one = f"{FIRST_COUNT} more = Sub(c, unit)  error = Mul(wrong, more)  y = Add(sum, error)"
    unit = {"unit": np.array(1, np.float32)}
    save_pooled(tmp_path / "bad" / "m", wrong_beyond_one, inputs=["count"], weights=unit)
    assert loaded(tmp_path / "bad").mixed is None
    assert "differs from what the row gets alone" in caplog.text


def test_a_number_that_is_no_length_stays_what_the_model_takes(tmp_path: Path) -> None:
    text = "of_kind = Gather<axis = 0>(kinds, kind)  k = Squeeze(of_kind, one)  y = Add(right, k)"
    save_pooled(tmp_path / "m", text, inputs=["mask", "kind"], weights={"kinds": table()[:3]})
    assert loaded(tmp_path).mixed is not None


@pytest.mark.parametrize("beyond", [32, 700])
def test_a_model_that_computes_long_rows_in_another_way_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, beyond: int
) -> None:
    text = "is_long = Greater(size, beyond)  y = Where(is_long, wrong, right)"
    save_pooled(tmp_path / "m", text, weights={"beyond": np.array(beyond, np.float32)})
    assert loaded(tmp_path).mixed is None
    assert "of a row of length" in caplog.text


# Equal attention to all places, with `penalty` added to the logits of masked ones.
ATTENTION = """masked = Sub(unit, m)  logits = Mul(masked, penalty)  weights = Softmax<axis = 1>(logits)
    row = Unsqueeze(weights, one)  mixed = MatMul(row, found)  y = Squeeze(mixed, one)"""


def test_a_weak_mask_is_found_beside_a_long_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, penalty in (("weak", -8.0), ("strong", -1e4)):
        weights = {"unit": np.array(1, np.float32), "penalty": np.array(penalty, np.float32)}
        save_pooled(tmp_path / name / "m", ATTENTION, weights=weights)
    assert loaded(tmp_path / "weak").mixed is None
    assert "of a row of length 1 padded to" in caplog.text
    assert loaded(tmp_path / "strong").mixed is not None


POSITIONS = 40


def save_positions(root: Path, buckets: str = "") -> None:
    """A masked mean plus the vector of the last of POSITIONS places that a row has; longer rows fail."""
    text = """p = Gather<axis = 0>(positions, place)  of_places = Mul(column, p)
        total = ReduceSum<keepdims = 0>(of_places, one)  y = Add(right, total)"""
    save_pooled(root / "m", text, weights={"positions": table()[:POSITIONS]}, buckets=buckets)


def test_a_bucket_beyond_the_models_positions_is_clipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_positions(tmp_path, "16,64,128")
    version = loaded(tmp_path)
    assert version.config.parameters["halfserve.padding_buckets"].string_value == "16,40"
    assert version.config.parameters["halfserve.padding_proved"].string_value == "40"
    assert "m/1: the padding buckets 16,64,128 exceed the model, which takes 40; 16,40 are in force" in caplog.text
    tokens = np.arange(1, 31)[None]
    with running_server(lambda: [started(version)]) as server, triton.InferenceServerClient(server.address) as client:
        answer = client.infer("m", tensors(tokens)).as_numpy("y")
    assert np.allclose(answer, table()[tokens].mean(1) + table()[:30].sum(0), atol=1e-4)


def test_padding_is_proved_up_to_the_models_last_position(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_positions(tmp_path)
    version = loaded(tmp_path)
    assert version.config.parameters["halfserve.padding_proved"].string_value == "40"
    assert caplog.text == ""


def test_requests_above_every_bucket_keep_their_length(tmp_path: Path) -> None:
    save_masked_mean(tmp_path / "m", parameters={"halfserve.padding": RULE, "halfserve.padding_buckets": "8,16"})
    version = loaded(tmp_path)
    assert version.mixed is not None
    padding = version.mixed.padding
    found = [padding.length_of(((length,), (length,))) for length in (12, 20, 30)]
    assert [one and one.padded for one in found] == [16, 20, 30]
    assert len({one.family for one in found if one is not None}) == 3, "longer ones are not padded to each other"


class Slow(BackendView):
    """Takes a second of `clock` for each token."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.clock = 0.0

    def run(self, inputs: Tensors) -> Tensors:
        self.clock += inputs["tokens"].size
        return self._backend.run(inputs)

    def proved(self, version: Model, budget_s: float) -> MixedLengths | None:
        """Try to prove the padding of a version that has this backend."""
        tried = TriedVersion(replace(version, backends=[self]), budget_s)
        tried.clock = lambda: self.clock
        return proved_padding(tried)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, "in 500 s, padding was proved up to length 32; longer requests are answered, and share"),
        (
            {"halfserve.padding_buckets": "4,128"},
            "the padding buckets 4,128 were not all tried in 500 s (--warm-up-seconds); 4 are in",
        ),
    ],
)
def test_lengths_that_the_time_is_too_short_for_are_not_padded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parameters: dict[str, str], said: str
) -> None:
    save_masked_mean(tmp_path / "m", parameters={"halfserve.padding": RULE, **parameters})
    version = loaded(tmp_path)
    caplog.clear()
    slow = Slow(version.backends[0])
    if parameters:
        version.config.parameters["halfserve.padding_buckets"].string_value = parameters["halfserve.padding_buckets"]
    mixed = slow.proved(version, 500.0)
    assert mixed is not None
    assert said in caplog.text
    assert mixed.padding.settings.longest == int(version.config.parameters["halfserve.padding_proved"].string_value)
    assert slow.clock < 500


def test_without_time_for_any_length_nothing_is_padded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_masked_mean(tmp_path / "m")
    version = loaded(tmp_path)
    assert Slow(version.backends[0]).proved(version, 20.0) is None
    assert "finding out whether padding changes its answers takes too long" in caplog.text


RARE = 1100
# The mean over all places, of rows with the token RARE alone.
WRONG_FOR_RARE = """is_rare = Equal(tokens, rare)  rare_count = Cast<to = 1>(is_rare)
    has_rare = ReduceMax<keepdims = 1>(rare_count, one)  use_wrong = Cast<to = 9>(has_rare)
    y = Where(use_wrong, wrong, right)"""


def save_wrong_for_rare(folder: Path) -> Path:
    return save_pooled(folder, WRONG_FOR_RARE, weights={"rare": np.array(RARE)})


def described(folder: Path, requests: Mapping[str, Tensors]) -> str:
    """The model_warmup of requests, name to inputs of one row without the batch dimension, whose values are in files."""
    (folder / "warmup").mkdir()
    text = ""
    for name, row in requests.items():
        inputs = ""
        for key, values in row.items():
            (folder / "warmup" / f"{name}_{key}").write_bytes(values.tobytes())
            given = f'data_type: TYPE_INT64 dims: {len(values)} input_data_file: "{name}_{key}"'
            inputs += f'inputs {{ key: "{key}" value {{ {given} }} }} '
        text += f'model_warmup {{ name: "{name}" batch_size: 1 {inputs} }}\n'
    return text


def test_every_described_request_is_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_wrong_for_rare(tmp_path / "m")
    rows = {name: np.array(tokens) for name, tokens in (("plain", [5, 6, 7]), ("rare", [9, 8, RARE, 4]))}
    requests: dict[str, Tensors] = {name: {"tokens": row, "mask": np.ones_like(row)} for name, row in rows.items()}
    write_config(folder, {"halfserve.padding": "tokens[1]=0 mask[1]=0"}, described(folder, requests))
    assert loaded(tmp_path).mixed is None
    assert "differs from what the row gets alone" in caplog.text


def test_a_described_row_of_padding_alone_proves_nothing(tmp_path: Path) -> None:
    folder = save_masked_mean(tmp_path / "m", ignores_mask=True)
    padding: Tensors = {"tokens": np.zeros(6, np.int64), "mask": np.ones(6, np.int64)}
    write_config(folder, {"halfserve.padding": RULE}, described(folder, {"padding": padding}))
    assert loaded(tmp_path).mixed is None


def record(folder: Path, inputs: Tensors) -> None:
    """Put samples beside the model of a repository's folder, and a certificate that vouches for them."""
    model = folder / "1" / "model.onnx"
    answers = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(["y"], inputs)
    arrays = {f"input/{name}": array for name, array in inputs.items()} | {"output/y": answers[0]}
    np.savez(model.parent / "samples.npz", allow_pickle=False, **arrays)
    digest = hashlib.sha256((model.parent / "samples.npz").read_bytes()).hexdigest()
    content = {"schema": SCHEMA, "passed": True, "files": {"samples.npz": digest}}
    with model.open("ab") as file:
        file.write(named_entry(certificate_sha256(content)))
    content["onnx_sha256"] = hashlib.sha256(model.read_bytes()).hexdigest()
    (model.parent / "certificate.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("last", "is_padded"), [(RARE, False), (4, True)])
def test_samples_that_travel_with_a_model_are_tried(tmp_path: Path, last: int, is_padded: bool) -> None:
    tokens = np.array([[5, 6, 7, 8], [9, 8, last, 0]])
    record(save_wrong_for_rare(tmp_path / "m"), {"tokens": tokens, "mask": (tokens != 0).astype(np.int64)})
    assert (loaded(tmp_path).mixed is not None) == is_padded


def test_a_number_in_all_samples_is_no_length_as_one_has_it_by_chance(tmp_path: Path) -> None:
    kind = "of_kind = Gather<axis = 0>(kinds, kind)  k = Squeeze(of_kind, one)"
    text = f"{FIRST_COUNT} mean = Div(sum, c)  {kind}  y = Add(mean, k)"
    folder = save_pooled(tmp_path / "m", text, inputs=["count", "kind"], weights={"kinds": table()[:3]})
    tokens = np.array([[5, 6, 0, 0], [9, 8, 7, 4]])
    record(folder, {"tokens": tokens, "count": np.array([[2], [4]]), "kind": np.array([[2], [2]])})
    version = loaded(tmp_path)
    assert version.config.parameters["halfserve.padding_proved"].string_value == "1024"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (
            {"halfserve.padding": "tokens[1]=0 mask[1]=0"},
            "'vectors' of a row of length 1 padded to 8 has shape [1, 8, 8], alone [1, 1, 8]; name the axis",
        ),
        ({"halfserve.padding": RULE, "halfserve.warm_up": "off"}, "halfserve.warm_up is off"),
    ],
    ids=["an output that is not cut", "no warm-up"],
)
def test_what_keeps_a_model_from_being_padded_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parameters: dict[str, str], said: str
) -> None:
    save_masked_mean(tmp_path / "m", parameters=parameters)
    assert loaded(tmp_path).mixed is None
    assert said in caplog.text


@pytest.mark.parametrize(
    ("nodes", "weights", "said"),
    [
        ("m = ReduceMean(x, one)  y = Sub(x, m)", {"one": np.array([1])}, "output 'y' of a row of length"),
        ("square = Mul(x, x)  y = Reciprocal(square)", {}, "output 'y' is NaN or infinite in padded places"),
    ],
    ids=["sum over all places", "not finite"],
)
def test_padded_places_that_change_an_answer_are_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nodes: str, weights: dict[str, Array], said: str
) -> None:
    text = f"(float[batch, length] x) => (float[batch, length] y) {{ {nodes} }}"
    save_text(tmp_path / "m" / "1" / "model.onnx", text, **weights)
    write_config(tmp_path / "m", {"halfserve.padding": "x[1]=0 -> y[1]"})
    assert loaded(tmp_path).mixed is None
    assert said in caplog.text


def test_padding_settles_whether_rows_may_share_a_batch(tmp_path: Path) -> None:
    save_masked_mean(tmp_path / "m")
    config = tmp_path / "m" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 32", ""))
    (files,) = find_models(tmp_path)
    version = load_version(files, OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())
    assert version.invariance is not None
    version.invariance.is_doubtful = True
    assert proved_padding(TriedVersion(version, budget_s=20.0)) is not None
    assert not version.invariance.is_doubtful


@pytest.mark.parametrize("what", ["zero_data", "random_data"])
def test_described_zeros_and_random_numbers_hide_no_mask(tmp_path: Path, what: str) -> None:
    inputs = "".join(
        f'inputs {{ key: "{name}" value {{ data_type: TYPE_INT64 dims: 4 {what}: true }} }}' for name in ("tokens", "mask")
    )
    for name, ignores_mask in (("good", False), ("bad", True)):
        save_masked_mean(tmp_path / name / "m", ignores_mask=ignores_mask)
        write_config(tmp_path / name / "m", {"halfserve.padding": RULE}, f'model_warmup {{ name: "w" batch_size: 1 {inputs} }}')
    assert loaded(tmp_path / "good").mixed is not None
    assert loaded(tmp_path / "bad").mixed is None


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"halfserve.padding": "words[1]=0"}, "names the input 'words', the model's are 'tokens', 'mask'"),
        ({"halfserve.padding": "tokens[1]=0 -> sum[1]"}, "names the output 'sum', the model's are 'mean', 'vectors'"),
        ({"halfserve.padding": "tokens[2]=0"}, r"names axis 2 of 'tokens', whose shape is \[-1, -1\]"),
        ({"halfserve.padding": "tokens[1]=0 -> mean[1]"}, r"names axis 1 of 'mean', whose shape is \[-1, 8\]"),
        ({"halfserve.padding": "tokens[1]=0.5"}, "pads 'tokens' with 0.5, which is no value of INT64"),
        ({"halfserve.padding_buckets": "8,16"}, "'halfserve.padding_buckets' has no effect without 'halfserve.padding'"),
    ],
)
def test_padding_that_does_not_fit_the_model_is_an_error(tmp_path: Path, parameters: dict[str, str], message: str) -> None:
    save_masked_mean(tmp_path / "m", parameters=parameters)
    with pytest.raises(ModelLoadError, match=message):
        loaded(tmp_path)


def tensors(tokens: Array) -> list[triton.InferInput]:
    both = (("tokens", tokens), ("mask", np.ones_like(tokens)))
    return [triton.InferInput(name, list(array.shape), "INT64").set_data_from_numpy(array) for name, array in both]


def test_requests_of_many_lengths_get_what_they_get_alone(tmp_path: Path, runtime: Runtime) -> None:
    save_masked_mean(tmp_path / "m")
    random = np.random.default_rng(0)
    asked = [random.integers(1, VOCABULARY, (int(random.integers(1, 4)), length)) for length in random.integers(1, 60, 120)]

    async def ask(address: str) -> list[triton.InferResult]:
        async with triton_aio.InferenceServerClient(address) as client:
            return list(await asyncio.gather(*(client.infer("m", tensors(tokens)) for tokens in asked)))

    def make() -> list[Model]:
        return [started(loaded(tmp_path, runtime))]

    with running_server(make) as server:
        answers = asyncio.run(ask(server.address))
        totals = server.call(lambda: server.core.model("m").statistics.totals)
    for tokens, answer in zip(asked, answers, strict=True):
        wanted = [expected(row) for row in tokens]
        assert np.array_equal(answer.as_numpy("vectors"), [row["vectors"] for row in wanted])
        assert np.allclose(answer.as_numpy("mean"), [row["mean"] for row in wanted], atol=1e-5)
    assert totals.rows == sum(map(len, asked))
    assert totals.batches < len(asked) / 2, "different lengths have shared batches"
