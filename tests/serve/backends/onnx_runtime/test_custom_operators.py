"""Models with operators of onnxruntime-extensions, and of a library in the repository."""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import NodeProto, TensorProto, helper, numpy_helper
from PIL import Image
from tritonclient.utils import InferenceServerException

from halfserve.serve.backends.onnx_runtime.crash_probe import CrashProbe
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.onnx_runtime.session_settings import packaged_library
from halfserve.serve.engine.backend import ONNX
from halfserve.serve.engine.config.model_config import OPERATOR_PACKAGES
from halfserve.serve.engine.config.parameters import ignored_settings
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_loading import started
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.trials.decisions import Decisions
from tests.serve.model_control.controlled import controlled_server, loader
from tests.serve.running_server import running_server

LIBRARY = packaged_library() or ""
TEXT, IMAGE = "ai.onnx.contrib", "com.microsoft.extensions"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "morning", "##s", "gr\u00fcn"]
PACKAGED = 'model_operations { op_library_filename: "onnxruntime_extensions" }'
IN_REPOSITORY = 'model_operations { op_library_filename: "operators.so" }'


def save(
    path: Path, nodes: list[NodeProto], inputs: list[Any], outputs: list[Any], weights: dict[str, Any] | None = None
) -> None:
    """Without a check: onnx does not know these operators."""
    given, wanted = ([helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs))
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(TEXT, 1), helper.make_opsetid(IMAGE, 1)]
    path.parent.mkdir(parents=True)
    onnx.save(
        helper.make_model(helper.make_graph(nodes, "g", given, wanted, tensors), opset_imports=opsets, ir_version=9), path
    )


def save_tokenizer(folder: Path, config: str = PACKAGED) -> None:
    """text BYTES [n] -> ids INT64 [k]: a BERT tokenizer."""
    vocabulary = "\n".join(VOCABULARY)
    node = helper.make_node("BertTokenizer", ["text"], ["ids", "types", "mask"], domain=TEXT, vocab_file=vocabulary)
    save(folder / "1" / "model.onnx", [node], [("text", TensorProto.STRING, ["n"])], [("ids", TensorProto.INT64, ["k"])])
    (folder / "config.pbtxt").write_text(f"max_batch_size: 0 {config}")


def save_image_mean(folder: Path) -> None:
    """image UINT8 [n], a PNG or a JPEG -> mean FP16 [3], of its pixels, in fp16."""
    nodes = [
        helper.make_node("DecodeImage", ["image"], ["pixels"], domain=IMAGE),
        helper.make_node("Cast", ["pixels"], ["halves"], to=TensorProto.FLOAT16),
        helper.make_node("ReduceMean", ["halves", "axes"], ["mean"], keepdims=0),
    ]
    weights = {"axes": np.array([0, 1])}
    image, mean = ("image", TensorProto.UINT8, ["n"]), ("mean", TensorProto.FLOAT16, [3])
    save(folder / "1" / "model.onnx", nodes, [image], [mean], weights)
    (folder / "config.pbtxt").write_text(PACKAGED)


@contextmanager
def client_of(repository: Path, *, trust: bool = False) -> Iterator[Any]:
    """A server on a repository, loaded as `halfserve serve` does, crash probe included."""
    probe = CrashProbe(Decisions())
    loading = loader(runtime=OnnxRuntime(probe, trust_custom_operators=trust))
    try:
        with (
            running_server(lambda: [started(loading.load(files)) for files in find_models(repository)]) as server,
            triton.InferenceServerClient(server.address) as client,
        ):
            yield client
    finally:
        probe.close()


def text_of(*texts: bytes) -> list[Any]:
    return [triton.InferInput("text", [len(texts)], "BYTES").set_data_from_numpy(np.array(texts, object))]


def test_text_goes_in_and_tokens_come_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    with caplog.at_level(logging.WARNING), client_of(tmp_path) as client:
        ids = client.infer("tokenizer", text_of("good mornings gr\u00fcn".encode())).as_numpy("ids")
        assert [VOCABULARY[i] for i in ids] == ["[CLS]", "good", "morning", "##s", "gr\u00fcn", "[SEP]"]
        with pytest.raises(InferenceServerException, match="input 'text' has a BYTES element that is not UTF-8") as refused:
            client.infer("tokenizer", text_of(b"\xff\xd8"))
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert caplog.messages == []


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_picture_is_decoded_in_the_graph(tmp_path: Path, kind: str) -> None:
    save_image_mean(tmp_path / "picture")
    written = io.BytesIO()
    Image.new("RGB", (9, 5), (250, 100, 10)).save(written, kind)
    content = np.frombuffer(written.getvalue(), np.uint8)
    with pytest.raises(UnicodeDecodeError):  # BYTES could not carry it
        content.tobytes().decode()
    with client_of(tmp_path) as client:
        image = triton.InferInput("image", [len(content)], "UINT8").set_data_from_numpy(content)
        np.testing.assert_allclose(client.infer("picture", [image]).as_numpy("mean"), [10, 100, 250], atol=2)
        broken = triton.InferInput("image", [4], "UINT8").set_data_from_numpy(np.ones(4, np.uint8))
        with pytest.raises(InferenceServerException, match="Invalid image data"):
            client.infer("picture", [broken])


def test_a_library_of_the_repository_needs_trust(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", IN_REPOSITORY)
    shutil.copy(LIBRARY, tmp_path / "tokenizer" / "operators.so")
    with pytest.raises(ModelLoadError, match=r"'operators.so', which can run any code .* with --trust-custom-operators"):
        load(tmp_path)
    with client_of(tmp_path, trust=True) as client:
        assert client.infer("tokenizer", text_of(b"good")).as_numpy("ids").tolist() == [2, 5, 3]


def load(repository: Path, *, trust: bool = False) -> None:
    (files,) = find_models(repository)
    loader(runtime=OnnxRuntime(trust_custom_operators=trust)).load(files)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("operators.so", None, "'operators.so' of model_operations is not in the model's folder"),
        ("operators.so", b"no library", "ONNX Runtime cannot load the operators of 'operators.so'"),
        ("../operators.so", b"", "model_operations is '../operators.so', expected a file name without folders"),
        ("/lib/x86_64-linux-gnu/libm.so.6", None, "expected a file name without folders"),
    ],
)
def test_a_library_that_cannot_be_used_is_one_clear_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    save_tokenizer(tmp_path / "tokenizer", f'model_operations {{ op_library_filename: "{name}" }}')
    if content is not None:
        (tmp_path / "tokenizer" / name).write_bytes(content)
    with pytest.raises(ModelLoadError) as refused:
        load(tmp_path, trust=True)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_library_outside_of_the_repository_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "repository" / "tokenizer", IN_REPOSITORY)
    (tmp_path / "repository" / "tokenizer" / "operators.so").symlink_to(LIBRARY)
    with pytest.raises(ModelLoadError, match="is a link out of the repository"):
        load(tmp_path / "repository", trust=True)


def test_without_its_library_a_model_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", "")
    with pytest.raises(ModelLoadError, match="ONNX Runtime refuses the model: .*BertTokenizer"):
        load(tmp_path)


def test_a_load_request_may_name_the_package_and_no_file(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", "")
    with controlled_server(tmp_path, ControlMode.EXPLICIT) as server, triton.InferenceServerClient(server.address) as client:
        named = '{{"model_operations": {{"op_library_filename": ["{}"]}}}}'
        with pytest.raises(InferenceServerException, match="sets model_operations to 'operators.so', a library on the server"):
            client.load_model("tokenizer", config=named.format("operators.so"))
        client.load_model("tokenizer", config=named.format("ortextensions"))
        assert client.infer("tokenizer", text_of(b"good")).as_numpy("ids").tolist() == [2, 5, 3]


def test_custom_operators_may_take_any_time(tmp_path: Path) -> None:
    save_image_mean(tmp_path / "picture")
    (files,) = find_models(tmp_path)
    assert OnnxRuntime().describe(files.model).open_ended
    assert ignored_settings(files.config.message, ONNX, on_device=False) == []
    assert "onnxruntime_extensions" in OPERATOR_PACKAGES
