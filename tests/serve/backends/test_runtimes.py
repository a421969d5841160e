from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper
from torch import nn
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

from halfserve import export_onnx, to_half
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.openvino.fitness import computed_halves
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import ONNX, OPENVINO, Backend, DevicePlacement, ModelInterface, Trust
from halfserve.serve.engine.config.model_config import Defaults, read_config
from halfserve.serve.engine.errors import BackendError, ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.tensors import ANY_SIZE, Array
from tests.models import mlp_weights, save_model
from tests.serve.backends.conftest import KINDS
from tests.serve.backends.support import load_backend
from tests.serve.running_server import running_server

ON_CPU = DevicePlacement(use_gpu=False, threads=1)
HALF = TensorProto.FLOAT16
PLATFORMS = {
    "onnx": "onnxruntime_onnx",
    "torch": "torch_export",
    "openvino": "openvino",
    "onnx_on_openvino": "onnxruntime_onnx",
}


@pytest.fixture(scope="module")
def runtimes() -> Runtimes:
    return Runtimes(trust=Trust(torch_archives=True))


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def load(runtimes: Runtimes, folder: Path, name: str) -> tuple[ModelInterface, Backend]:
    path = model_file(folder, name)
    interface = runtimes.describe(path)
    return interface, runtimes.load(path, interface, ON_CPU, read_config(folder / name / "config.pbtxt").message)


def model_file(folder: Path, name: str) -> Path:
    (path,) = (path for path in (folder / name / "1").iterdir() if path.suffix != ".bin")
    return path


def bf16_precision(interface: ModelInterface) -> str:
    """In which a bf16 model is computed: OpenVINO computes its own graphs as they are written, where the processor can."""
    return "bf16" if interface.kind is OPENVINO and "bf16" in computed_halves() else "fp32 (the bf16 model, upcast)"


def expected_mlp(x: Array) -> Array:
    first, second = (w.astype(np.float32) for w in mlp_weights())
    return np.asarray(np.maximum(x.astype(np.float32) @ first, 0) @ second)


def test_the_interface_is_as_clients_see_it(runtimes: Runtimes, folder: Path) -> None:
    interface, _ = load(runtimes, folder, "mlp")
    told = [(spec.name, spec.datatype.wire, spec.shape) for spec in (*interface.inputs, *interface.outputs)]
    assert told == [("x", "FP16", (-1, 64)), ("y", "FP16", (-1, 10))]
    assert interface.batched
    assert not load(runtimes, folder, "unbatched")[0].batched


@pytest.mark.parametrize("rows", [1, 7])
def test_the_cpu_computes_an_fp16_model_in_fp32_and_answers_in_fp16(runtimes: Runtimes, folder: Path, rows: int) -> None:
    _, backend = load(runtimes, folder, "mlp")
    assert backend.precision == "fp32 (the fp16 model, upcast)"
    assert backend.compute_dtype("x") == np.float16
    x = np.random.default_rng(2).standard_normal((rows, 64)).astype(np.float16)
    y = backend.run({"x": x})["y"]
    assert y.dtype == np.float16
    # Half a unit in the last place of fp16: nothing but the last rounding is lost.
    np.testing.assert_allclose(y.astype(np.float32), expected_mlp(x), rtol=2**-11, atol=1e-6)


def test_an_overflow_of_fp16_is_an_infinity(runtimes: Runtimes, folder: Path) -> None:
    _, backend = load(runtimes, folder, "twice")
    y = backend.run({"x": np.array([[60000.0], [1.0], [np.nan]], np.float16)})["y"]
    np.testing.assert_array_equal(y, np.array([[np.inf], [2.0], [np.nan]], np.float16), strict=True)


def test_a_bf16_model_takes_and_gives_bf16(runtimes: Runtimes, folder: Path) -> None:
    interface, backend = load(runtimes, folder, "twice_bf16")
    assert [spec.datatype.wire for spec in (*interface.inputs, *interface.outputs)] == ["BF16", "BF16"]
    assert backend.precision == bf16_precision(interface)
    x = np.array([[1.5], [3e38]], ml_dtypes.bfloat16)
    y = backend.run({"x": x.astype(backend.compute_dtype("x"))})["y"]
    np.testing.assert_array_equal(y, np.array([[3.0], [np.inf]], ml_dtypes.bfloat16), strict=True)


@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_a_request_that_cannot_be_computed_is_a_backend_error(runtimes: Runtimes, folders: dict[str, Path], kind: str) -> None:
    _, backend = load(runtimes, folders[kind], "picky")
    with pytest.raises(BackendError, match="the model failed on this request: .*(?i:ind(ex|ices)).* out of"):
        backend.run({"i": np.array([[5]])})
    assert backend.run({"i": np.array([[1]])})["y"].tolist() == [[20.0]]


def test_read_only_and_unaligned_inputs_are_left_as_they_are(runtimes: Runtimes, folder: Path) -> None:
    _, backend = load(runtimes, folder, "twice")
    raw = b"\x00" + np.array([[1.0], [2.0]], np.float16).tobytes()
    x = np.frombuffer(raw, np.float16, 2, 1).reshape(2, 1)
    assert backend.run({"x": x.astype(np.float16, copy=not x.flags.aligned)})["y"].tolist() == [[2.0], [4.0]]
    assert x.tolist() == [[1.0], [2.0]]


def test_an_answer_is_never_a_view_on_its_input(runtimes: Runtimes, folder: Path) -> None:
    _, backend = load(runtimes, folder, "same")
    x = np.array([[1.0], [2.0]], np.float32)
    y = backend.run({"x": x})["y"]
    assert not np.shares_memory(x, y)
    x[:] = 0
    assert y.tolist() == [[1.0], [2.0]], "the buffer may hold the next batch by now"


def test_the_answers_of_one_batch_outlive_the_next(runtimes: Runtimes, folder: Path) -> None:
    _, backend = load(runtimes, folder, "twice")
    first = backend.run({"x": np.array([[1.0]], np.float16)})["y"]
    backend.run({"x": np.array([[8.0]], np.float16)})
    assert first.tolist() == [[2.0]]


def test_a_whole_repository_is_loaded(runtimes: Runtimes, folder: Path) -> None:
    models = [load_model(files, runtimes, ON_CPU, Defaults()) for files in find_models(folder)]
    sizes = {model.name: model.max_batch_size for model in models}
    assert sizes == {"mlp": 32, "picky": 32, "same": 32, "twice": 32, "twice_bf16": 32, "unbatched": 0}
    (kind,) = {model.interface.kind for model in models}
    backend = "openvino" if (folder / "mlp" / "config.pbtxt").exists() else kind.backend
    assert {(m.config.platform, m.config.backend) for m in models} == {(kind.platform, backend)}


@pytest.mark.parametrize("asked", ['backend: "tensorrt_plan"', 'platform: "onnxruntime_onnx" backend: "pytorch"'])
def test_a_backend_that_is_not_the_files_is_refused(runtimes: Runtimes, folder: Path, tmp_path: Path, asked: str) -> None:
    shutil.copytree(folder / "mlp" / "1", tmp_path / "mlp" / "1")
    (tmp_path / "mlp" / "config.pbtxt").write_text(asked)
    with pytest.raises(ModelLoadError, match="models are not supported, expected platform '.*' or backend '.*' for this"):
        load_model(find_models(tmp_path)[0], runtimes, ON_CPU, Defaults())


def test_the_configuration_chooses_between_two_files(runtimes: Runtimes, folders: dict[str, Path], tmp_path: Path) -> None:
    version = tmp_path / "mlp" / "1"
    for kind in KINDS:
        shutil.copytree(folders[kind] / "mlp" / "1", version, dirs_exist_ok=True)
    for config, file_name in (
        ("", "model.onnx"),
        ('backend: "pytorch"', "model.pt2"),
        ('backend: "openvino"', "model.xml"),
        ('backend: "openvino" default_model_filename: "model.onnx"', "model.onnx"),
        ('platform: "onnxruntime_onnx"', "model.onnx"),
        ('default_model_filename: "model.pt2"', "model.pt2"),
    ):
        (tmp_path / "mlp" / "config.pbtxt").write_text(config)
        (files,) = find_models(tmp_path)
        assert files.model.name == file_name, config
        assert load_model(files, runtimes, ON_CPU, Defaults()).interface.kind.file_name == file_name


def test_a_file_that_is_not_there_is_named(runtimes: Runtimes, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"absent.onnx: cannot be read: No such file"):
        runtimes.describe(tmp_path / "absent.onnx")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_that_is_not_there_is_refused(
    runtimes: Runtimes, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("halfserve.serve.backends.onnx_runtime.session.device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    path, config = model_file(folders[kind], "mlp"), read_config(folders[kind] / "mlp" / "config.pbtxt").message
    with pytest.raises(ModelLoadError, match="a GPU is required, but .*CUDA device 0"):
        runtimes.load(path, runtimes.describe(path), DevicePlacement(require_gpu=True), config)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """x FP16 [batch, 4] -> sum FP16 [batch, 4], with a weight of as many."""
    nodes = [helper.make_node("Add", ["x", "w"], ["sum"])]
    weights = {"w": np.ones(4, np.float16)}
    return save_model(tmp_path / "m.onnx", nodes, [("x", HALF, ["batch", 4])], [("sum", HALF, ["batch", 4])], weights)


def of_type_99(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 99


def with_an_output_twice(model: ModelProto) -> None:
    model.graph.output.add().CopyFrom(model.graph.output[0])


def with_a_weight_in_pieces(model: ModelProto) -> None:
    model.graph.initializer[0].segment.end = 1


def with_a_weight_that_is_too_short(model: ModelProto) -> None:
    model.graph.initializer[0].dims[0] = 5


def with_a_constant_that_lies_nowhere(model: ModelProto) -> None:
    constant = TensorProto(data_type=HALF, dims=[4], data_location=TensorProto.EXTERNAL)
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=constant))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (of_type_99, "input 'x' has the type number 99, which cannot be served"),
        (with_an_output_twice, "output 'sum' is there twice, expected each once; export the model again"),
        (with_a_weight_in_pieces, r"is not a sound ONNX model \(.*segments"),
        (with_a_weight_that_is_too_short, r"is not a sound ONNX model \(cannot reshape array of size 4"),
        (with_a_constant_that_lies_nowhere, "keeps weights in '', expected a file beside it; export it again"),
    ],
)
def test_it_is_refused_in_one_line(path: Path, spoil: Callable[[ModelProto], None], message: str) -> None:
    model = onnx.load(path)
    spoil(model)
    path.write_bytes(model.SerializeToString())
    refused_in_one_line(path, message)


@pytest.mark.parametrize("name", [b"\n\x03sum", b"\x12\x05batch"], ids=["an output's name", "a dimension's name"])
def test_names_that_are_not_utf8_are_refused(path: Path, name: bytes) -> None:
    content = path.read_bytes()
    assert name in content
    path.write_bytes(content.replace(name, name[:-1] + b"\xff"))
    refused_in_one_line(path, "put has a name that is not UTF-8|is not a readable ONNX file")


def test_a_setting_that_onnx_runtime_does_not_take_is_refused(path: Path) -> None:
    config = ModelConfig()
    config.parameters["session." + "x" * 2000].string_value = "1"
    refused_in_one_line(path, "ONNX Runtime refuses the model: Config key is", config)


def test_what_the_server_has_the_runtime_record_is_recorded_whatever_a_config_says(path: Path) -> None:
    config = ModelConfig()
    config.parameters["session.record_ep_graph_assignment_info"].string_value = "0"
    load_backend(path, ON_CPU, config)
    assert config.parameters["halfserve.nodes"].string_value.startswith("CPUExecutionProvider=")


def test_a_negative_size_is_any_size(path: Path) -> None:
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -(2**63)
    path.write_bytes(model.SerializeToString())
    interface = OnnxRuntime().describe(path)
    assert (interface.inputs[0].shape, interface.outputs[0].shape) == ((ANY_SIZE, 4), (ANY_SIZE, 4))
    assert load_backend(path, ON_CPU).run({"x": np.zeros((3, 4), np.float16)})["sum"].shape == (3, 4)


def refused_in_one_line(path: Path, message: str, config: ModelConfig | None = None) -> None:
    with pytest.raises(ModelLoadError, match=message) as refused:
        load_backend(path, ON_CPU, config)
    assert "\n" not in str(refused.value)


def load_all(folder: Path) -> list[Model]:
    runtimes, placement = Runtimes(trust=Trust(torch_archives=True)), DevicePlacement(use_gpu=False, threads=1)
    return [load_model(files, runtimes, placement, Defaults()) for files in find_models(folder)]


@pytest.fixture(scope="module")
def clients(folders: dict[str, Path]) -> Iterator[dict[str, InferenceServerClient]]:
    with ExitStack() as stack:
        made = {}
        for kind, folder in folders.items():
            running = stack.enter_context(running_server(lambda folder=folder: load_all(folder)))  # type: ignore[misc]  # (a default binds it)
            made[kind] = stack.enter_context(InferenceServerClient(running.address))
        yield made


@pytest.fixture(params=PLATFORMS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(client: InferenceServerClient, model: str, datatype: str, x: Array, classes: int = 0) -> Array:
    tensor = InferInput("x", x.shape, datatype)
    tensor.set_data_from_numpy(x)
    result = client.infer(model, [tensor], outputs=[InferRequestedOutput("y", class_count=classes)])
    return np.asarray(result.as_numpy("y"))


def test_metadata_name_the_platform(clients: dict[str, InferenceServerClient], kind: str) -> None:
    for model in ("mlp", "twice_bf16"):
        assert clients[kind].get_model_metadata(model).platform == PLATFORMS[kind]
    config = clients[kind].get_model_config("twice_bf16").config
    interface = ModelInterface(inputs=(), outputs=(), batched=True, kind=OPENVINO if kind == "openvino" else ONNX)
    assert config.parameters["halfserve.precision"].string_value == bf16_precision(interface)


def test_bf16_goes_in_and_comes_out(clients: dict[str, InferenceServerClient], kind: str) -> None:
    x = np.array([[1.0], [-2.5], [3e38], [np.nan]], ml_dtypes.bfloat16)
    y = ask(clients[kind], "twice_bf16", "BF16", x)
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y.astype(np.float32), np.array([[2.0], [-5.0], [np.inf], [np.nan]], np.float32))


def test_bf16_outputs_are_classified_by_value(clients: dict[str, InferenceServerClient], kind: str) -> None:
    x = np.array([[-2.0]], ml_dtypes.bfloat16)
    best = ask(clients[kind], "twice_bf16", "BF16", x, classes=1)
    assert best.tolist() == [[b"-4.000000:0"]]


def test_fp16_rows_of_one_request_are_answered_together(clients: dict[str, InferenceServerClient], kind: str) -> None:
    x = np.arange(9, dtype=np.float16)[:, None]
    np.testing.assert_array_equal(ask(clients[kind], "twice", "FP16", x), x + x, strict=True)


def test_it_is_served_on_the_cpu_with_the_fp32_models_answers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    path, samples = tmp_path / "model.onnx", torch.randn(3, 8, 32)
    export_onnx(to_half(model).module, [samples.half()], path, output_names=["y"])
    backend = load_backend(path, DevicePlacement(use_gpu=False, threads=1))
    (name,) = (spec.name for spec in OnnxRuntime().describe(path).inputs)
    with torch.no_grad():
        expected = model(samples).numpy()
    answer = backend.run({name: samples.half().numpy()})["y"]
    assert answer.dtype == np.float16
    np.testing.assert_allclose(answer.astype(np.float32), expected, atol=0.01)
