"""Padding is proved before a model serves, and refused where it changes answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from onnx import TensorProto, helper

from halfserve.serve.backends.onnx_runtime.backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement, Runtime
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.loaded_version import LoadedVersion, load_version
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.tensors import Array
from halfserve.serve.model_control.padding_check import proved_padding
from tests.models import save_model
from tests.serve.model_control.controlled import loader
from tests.serve.padded_models import RULE, VOCABULARY, expected, save_masked_mean
from tests.serve.running_server import running_server

node = helper.make_node


def loaded(root: Path, runtime: Runtime | None = None) -> LoadedVersion:
    (files,) = find_models(root)
    return loader(runtime=runtime).load(files)


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


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
    assert "output 'mean' of a padded row differs from what the row gets alone by" in caplog.text


def test_an_output_that_is_not_cut_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_masked_mean(tmp_path / "m", parameters={"halfserve.padding": "tokens[1]=0 mask[1]=0"})
    assert loaded(tmp_path).mixed is None
    assert "output 'vectors' of a padded row has shape [1, 16, 8], alone [1, 5, 8]; name the axis to cut" in caplog.text


def test_a_sum_over_all_places_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape: list[int | str] = ["batch", "length"]
    save_model(
        tmp_path / "m" / "1" / "model.onnx",
        [node("ReduceMean", ["x", "one"], ["m"]), node("Sub", ["x", "m"], ["y"])],
        [("x", TensorProto.FLOAT, shape)],
        [("y", TensorProto.FLOAT, shape)],
        {"one": np.array([1], np.int64)},
    )
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: 8\n" + parameter("halfserve.padding", "x[1]=0 -> y[1]"))
    assert loaded(tmp_path).mixed is None
    assert "output 'y' of a padded row differs" in caplog.text


def test_padded_places_that_are_not_finite_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape: list[int | str] = ["batch", "length"]
    save_model(
        tmp_path / "m" / "1" / "model.onnx",
        [node("Mul", ["x", "x"], ["square"]), node("Reciprocal", ["square"], ["y"])],
        [("x", TensorProto.FLOAT, shape)],
        [("y", TensorProto.FLOAT, shape)],
    )
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: 8\n" + parameter("halfserve.padding", "x[1]=0 -> y[1]"))
    assert loaded(tmp_path).mixed is None
    assert "output 'y' is NaN or infinite in padded places" in caplog.text


def test_without_a_warm_up_nothing_is_padded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_masked_mean(tmp_path / "m", parameters={"halfserve.padding": RULE, "halfserve.warm_up": "off"})
    assert loaded(tmp_path).mixed is None
    assert "halfserve.warm_up is off" in caplog.text


def test_padding_settles_whether_rows_may_share_a_batch(tmp_path: Path) -> None:
    save_masked_mean(tmp_path / "m")
    config = tmp_path / "m" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 32", ""))
    (files,) = find_models(tmp_path)
    version = load_version(files, OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())
    assert version.invariance is not None
    version.invariance.is_doubtful = True
    assert proved_padding(version, budget_s=20.0) is not None
    assert not version.invariance.is_doubtful


def test_a_described_request_is_what_is_tried(tmp_path: Path) -> None:
    save_masked_mean(tmp_path / "m")
    config = tmp_path / "m" / "config.pbtxt"
    inputs = "".join(
        f'inputs {{ key: "{name}" value {{ data_type: TYPE_INT64 dims: 4 {what}: true }} }}'
        for name, what in (("tokens", "random_data"), ("mask", "random_data"))
    )
    config.write_text(f'{config.read_text()}\nmodel_warmup {{ name: "one" batch_size: 1 {inputs} }}')
    assert loaded(tmp_path).mixed is not None


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
        return [loaded(tmp_path, runtime).model()]

    with running_server(make) as server:
        answers = asyncio.run(ask(server.address))
        totals = server.call(lambda: server.core.model("m").statistics.totals)
    for tokens, answer in zip(asked, answers, strict=True):
        wanted = [expected(row) for row in tokens]
        assert np.array_equal(answer.as_numpy("vectors"), [row["vectors"] for row in wanted])
        assert np.allclose(answer.as_numpy("mean"), [row["mean"] for row in wanted], atol=1e-5)
    assert totals.rows == sum(map(len, asked))
    assert totals.batches < len(asked) / 2, "different lengths have shared batches"
