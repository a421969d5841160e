"""OpenVINO's own files, and what is particular to its backend; test_runtimes.py has what all runtimes have in common."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from onnx import TensorProto, helper
from openvino import opset13

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.crash_probe import CrashProbe
from halfserve.serve.backends.onnx_runtime.onnx_interface import read_interface
from halfserve.serve.backends.openvino.ir_file import read_ir_interface
from halfserve.serve.backends.openvino.runtime import OpenVinoRuntime
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import OPENVINO, Backend, DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import InstanceLostError, InvalidArgumentError, ModelLoadError
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.tensors import ANY_SIZE
from halfserve.serve.trials.decisions import Decisions
from tests.models import save_mlp, save_model, save_table
from tests.serve.backends.conftest import save_graph

ON_CPU = DevicePlacement(use_gpu=False, threads=1)
FLOAT = TensorProto.FLOAT
WIDE = 1 << 16  # elements of a row whose copy would cost more than memory of its own


def with_parameters(**parameters: str) -> ModelConfig:
    config = ModelConfig(backend="openvino")
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def load(path: Path, config: ModelConfig | None = None) -> Backend:
    runtime = Runtimes()
    return runtime.load(path, runtime.describe(path), ON_CPU, config or with_parameters())


def save_wide(path: Path, op: str = "Relu") -> Path:
    shape: list[int | str] = ["batch", WIDE]
    return save_model(path, [helper.make_node(op, ["x"], ["y"])], [("x", FLOAT, shape)], [("y", FLOAT, shape)])


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """x FP16 [batch, 64] -> y FP16 [batch, 10], as OpenVINO's own file."""
    return save_graph(tmp_path / "1" / "model.xml", save_mlp(tmp_path / "mlp.onnx"))


def test_a_graphs_names_sizes_and_types_are_its_interface(tmp_path: Path) -> None:
    rows = ov.PartialShape([ov.Dimension(1, 8), ov.Dimension.dynamic(), ov.Dimension(3)])
    x, mask = opset13.parameter(rows, np.float16), opset13.parameter(rows, np.uint8)
    x.output(0).set_names({"x", "alias,1"})
    mask.output(0).set_names({"mask"})
    both = opset13.multiply(x, opset13.convert(mask, "f16"))
    both.output(0).set_names({"y"})
    ov.save_model(ov.Model([opset13.result(both)], [x, mask]), tmp_path / "model.xml")
    interface = read_ir_interface(tmp_path / "model.xml")
    told = [(spec.name, spec.datatype.wire, spec.shape) for spec in (*interface.inputs, *interface.outputs)]
    shape = (ANY_SIZE, ANY_SIZE, 3)
    assert told == [("alias,1", "FP16", shape), ("mask", "UINT8", shape), ("y", "FP16", shape)]
    assert (interface.batched, interface.most_rows, interface.kind, interface.open_ended) == (True, 8, OPENVINO, False)


def test_sizes_that_values_decide_make_a_graph_open_ended(tmp_path: Path) -> None:
    x, times = opset13.parameter([-1, 4], np.float32), opset13.parameter([2], np.int64)
    ov.save_model(ov.Model([opset13.result(opset13.tile(x, times))], [x, times]), tmp_path / "model.xml")
    assert read_ir_interface(tmp_path / "model.xml").open_ended


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<net>", r"model.xml: is not readable XML \(.*\); save the model again with ov.save_model"),
        ("<?xml version='1.0'?><svg/>", r"model.xml: is not an OpenVINO graph \(no net and layers in it\)"),
        ("<?xml version='1.0'?><!DOCTYPE net [<!ENTITY a 'b'>]><net/>", "model.xml: has a DOCTYPE"),
        (
            "<net><layers><layer name='x' type='Parameter'><output><port precision='STRING'/></output></layer></layers></net>",
            "model.xml: input 'x' has the type STRING, which cannot be served",
        ),
        ("<net><layers><layer id='0' name='y' type='Result'/></layers></net>", "model.xml: output 'y' has no value"),
    ],
)
def test_what_is_no_graph_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.xml").write_text(text)
    with pytest.raises(ModelLoadError, match=message) as refused:
        Runtimes().describe(tmp_path / "model.xml")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "iso-8859-1"])
def test_a_doctype_is_refused_in_each_encoding(tmp_path: Path, encoding: str) -> None:
    declared = encoding.removesuffix("-sig").removesuffix("-le").removesuffix("-be")
    text = f"<?xml version='1.0' encoding='{declared}'?><!DOCTYPE net [<!ENTITY a '\u00e9'>]><net><layers/>&a;</net>"
    (tmp_path / "model.xml").write_bytes(text.encode(encoding))
    with pytest.raises(ModelLoadError, match=r"model.xml: (has a DOCTYPE|is not UTF-8 text), expected an OpenVINO graph"):
        read_ir_interface(tmp_path / "model.xml")


def test_a_graph_is_read_as_utf8_whatever_it_declares(tmp_path: Path) -> None:
    text = "<?xml version='1.0' encoding='iso-8859-1'?><net name='\u00e9'><layers/></net>"
    (tmp_path / "model.xml").write_text(text, encoding="iso-8859-1")
    with pytest.raises(ModelLoadError, match="model.xml: is not readable XML"):
        read_ir_interface(tmp_path / "model.xml")


def test_missing_weights_are_named(graph: Path) -> None:
    graph.with_suffix(".bin").unlink()
    with pytest.raises(ModelLoadError, match=r"model.bin: is missing, and the model model.xml beside it keeps its weights"):
        load(graph)


def test_weights_that_are_a_link_out_of_the_folder_are_refused(graph: Path, tmp_path: Path) -> None:
    weights = graph.with_suffix(".bin")
    weights.rename(tmp_path / "elsewhere.bin")
    weights.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(ModelLoadError, match=r"model.bin: is a link out of the repository"):
        load(graph)


def test_a_copy_is_not_reloaded_with_changed_weights(graph: Path, tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    graph.parent.rename(tmp_path / "repository" / "1")
    (tmp_path / "repository").rename(tmp_path / "m")
    (files,) = [files for files in find_models(tmp_path) if files.name == "m"]
    model = load_model(files, Runtimes(), ON_CPU, Defaults())
    weights = files.model.with_suffix(".bin")
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert model.reload is not None
    with pytest.raises(ModelLoadError, match="model.bin: has been changed since the model was loaded"):
        model.reload(0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"NUM_STREAMZ": "1"}, "parameter 'NUM_STREAMZ' is not one of an OpenVINO model, expected COMPILATION_NUM_THREADS, "),
        ({"NUM_STREAMS": "many"}, "parameter 'NUM_STREAMS' is 'many', expected AUTO, NUMA or a whole number"),
        ({"INFERENCE_NUM_THREADS": "-1"}, "parameter 'INFERENCE_NUM_THREADS' is '-1', expected a whole number of 0"),
        ({"PERFORMANCE_HINT": "FAST"}, "parameter 'PERFORMANCE_HINT' is 'FAST', expected CUMULATIVE_THROUGHPUT, LATENCY"),
        ({"HINT_BF16": "no"}, "parameter 'HINT_BF16' is 'no', expected YES"),
        ({"RESHAPE_IO_LAYERS": "yes"}, "parameter 'RESHAPE_IO_LAYERS' is 'yes', expected NO: reshape the model when you"),
        ({"TARGET_DEVICE": "GPU"}, "parameter 'TARGET_DEVICE' is 'GPU', expected CPU"),
        ({"CPU_EXTENSION_PATH": "own.so"}, "CPU_EXTENSION_PATH names the library 'own.so', which can run any code"),
    ],
)
def test_parameters_that_cannot_be_met_are_refused_by_name(graph: Path, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(graph, with_parameters(**parameters))


def test_tritons_parameters_are_taken(graph: Path) -> None:
    config = with_parameters(
        COMPILATION_NUM_THREADS="1",
        ENABLE_BATCH_PADDING="YES",
        INFERENCE_NUM_THREADS="1",
        NUM_STREAMS="1",
        PERFORMANCE_HINT="latency",
        RESHAPE_IO_LAYERS="no",
        SKIP_OV_DYNAMIC_BATCHSIZE="yes",
        TARGET_DEVICE="CPU",
    )
    backend = load(graph, config)
    assert backend.run({"x": np.zeros((3, 64), np.float16)})["y"].tolist() == [[0.0] * 10] * 3
    assert backend.provider == "OpenVINO on cpu"
    assert config.parameters["halfserve.nodes"].string_value.startswith("OpenVINO ")


def test_large_answers_have_memory_of_their_own(tmp_path: Path) -> None:
    backend = load(save_wide(tmp_path / "m.onnx"))
    answers = [backend.run({"x": np.full((rows, WIDE), rows, np.float32)})["y"] for rows in (1, 2, 1, 3)]
    for answer, rows in zip(answers, (1, 2, 1, 3), strict=True):
        assert answer.shape == (rows, WIDE)
        assert (answer == rows).all()


@pytest.mark.parametrize("op", ["Relu", "Identity"])
def test_read_only_memory_is_read_and_not_written(tmp_path: Path, op: str) -> None:
    backend = load(save_wide(tmp_path / "m.onnx", op))
    content = np.linspace(-1, 1, WIDE, dtype=np.float32).tobytes()
    x = np.frombuffer(content, np.float32).reshape(1, WIDE)
    y = backend.run({"x": x})["y"]
    assert not np.shares_memory(x, y)
    np.testing.assert_array_equal(y, np.maximum(x, 0) if op == "Relu" else x)
    np.testing.assert_array_equal(x, np.linspace(-1, 1, WIDE, dtype=np.float32)[None])


def test_an_input_that_is_also_an_output_is_read(tmp_path: Path) -> None:
    shape: list[int | str] = ["batch", 2]
    nodes = [helper.make_node("Dropout", ["a"], ["y"]), helper.make_node("Relu", ["b"], ["z"])]
    inputs: list[tuple[str, int, list[int | str]]] = [("unused", FLOAT, shape), ("b", FLOAT, shape)]
    outputs: list[tuple[str, int, list[int | str]]] = [("y", FLOAT, shape), ("z", FLOAT, shape)]
    alone = load(save_model(tmp_path / "alone.onnx", nodes[:1], [("a", FLOAT, shape)], outputs[:1]))
    assert alone.run({"a": np.array([[3, 4]], np.float32)})["y"].tolist() == [[3.0, 4.0]]
    both = load(save_model(tmp_path / "both.onnx", nodes, [("a", FLOAT, shape), inputs[1]], outputs))
    answers = both.run({"a": np.array([[3, 4]], np.float32), "b": np.array([[-1, 1]], np.float32)})
    assert {name: array.tolist() for name, array in answers.items()} == {"y": [[3.0, 4.0]], "z": [[0.0, 1.0]]}
    unused = load(save_model(tmp_path / "unused.onnx", nodes[1:], inputs, outputs[1:]))
    assert unused.run({"unused": np.ones((1, 2), np.float32), "b": -np.ones((1, 2), np.float32)})["z"].tolist() == [[0.0, 0.0]]


def test_an_index_out_of_a_table_is_refused(tmp_path: Path) -> None:
    backend = load(save_table(tmp_path / "m.onnx", np.float32))
    with pytest.raises(InvalidArgumentError, match="input 'i' has the value 2, expected -2 to 1: it is the index of one of 2"):
        backend.run({"i": np.array([[0], [2]])})
    assert backend.run({"i": np.array([[-2]])})["y"].tolist() == [[5.0]]


def test_integers_beyond_32_bits_are_refused(tmp_path: Path) -> None:
    shape: list[int | str] = ["batch", 2]
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    path = save_model(tmp_path / "m.onnx", nodes, [("x", TensorProto.INT64, shape)], [("y", TensorProto.INT64, shape)])
    backend = load(path)
    assert backend.run({"x": np.array([[3, -4]])})["y"].tolist() == [[6, -8]]
    with pytest.raises(InvalidArgumentError, match="input 'x' has the value 4294967296, expected -2147483648 to 2147483647"):
        backend.run({"x": np.array([[1, 2**32]])})


def test_sizes_that_do_not_fit_are_the_requests_error(tmp_path: Path) -> None:
    shapes: list[list[int | str]] = [["batch", "n"], ["batch", "m"]]
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    path = save_model(tmp_path / "m.onnx", nodes, [("a", FLOAT, shapes[0]), ("b", FLOAT, shapes[1])], [("y", FLOAT, shapes[0])])
    backend = load(path)
    given = np.zeros((1, 4), np.float32)
    backend.run({"a": given, "b": given})
    with pytest.raises(InvalidArgumentError, match=r"cannot compute inputs of these sizes: 'a' \[1, 4\], 'b' \[1, 3\]"):
        backend.run({"a": given, "b": given[:, :3]})
    assert backend.run({"a": given, "b": given})["y"].tolist() == [[0.0] * 4]


def test_sizes_for_which_openvino_would_write_beyond_its_memory_are_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "fixed"], ["r"]), helper.make_node("Add", ["r", "r"], ["y"])]
    weights = {"fixed": np.array([2, 2])}
    path = save_model(tmp_path / "m.onnx", nodes, [("x", FLOAT, ["n", "m"])], [("y", FLOAT, [2, 2])], weights)
    backend = load(path)
    with pytest.raises(InvalidArgumentError, match=r"cannot compute inputs of these sizes: 'x' \[1, 400\]"):
        backend.run({"x": np.zeros((1, 400), np.float32)})
    assert backend.run({"x": np.ones((1, 4), np.float32)})["y"].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_a_graph_for_one_number_of_rows_alone_is_refused(tmp_path: Path) -> None:
    x = opset13.parameter([-1, 4], np.float32)
    x.output(0).set_names({"x"})
    halves = opset13.split(x, opset13.constant(0), 2)
    y = opset13.concat([halves.output(1), halves.output(0)], 0)
    ov.save_model(ov.Model([opset13.result(y)], [x]), tmp_path / "model.xml")
    with pytest.raises(ModelLoadError, match="OpenVINO cannot compute every number of rows: .*divisible"):
        load(tmp_path / "model.xml")


def test_a_graph_of_fixed_sizes_is_served_in_whole_requests(tmp_path: Path) -> None:
    x = opset13.parameter([4, 3], np.float32)
    x.output(0).set_names({"x"})
    y = opset13.multiply(x, opset13.constant(np.full((4, 3), 2, np.float32)))
    y.output(0).set_names({"y"})
    path = tmp_path / "m" / "1" / "model.xml"
    path.parent.mkdir(parents=True)
    ov.save_model(ov.Model([opset13.result(y)], [x]), path, compress_to_fp16=False)
    for place in (tmp_path, path):  # a repository, and the file alone
        (files,) = find_models(place)
        model = load_model(files, Runtimes(), ON_CPU, Defaults())
        assert (model.provider, model.max_batch_size) == ("OpenVINO on cpu", 0)
        assert [spec.shape for spec in (*model.interface.inputs, *model.interface.outputs)] == [(4, 3), (4, 3)]
        np.testing.assert_array_equal(model.backends[0].run({"x": np.ones((4, 3), np.float32)})["y"], np.full((4, 3), 2))
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: 8")
    (files,) = find_models(tmp_path)
    with pytest.raises(ModelLoadError, match="max_batch_size is 8, but not every input and output of the model begins with a"):
        load_model(files, Runtimes(), ON_CPU, Defaults())


COUNT_THREADS = """
import os, sys, threading
from pathlib import Path
import numpy as np
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.openvino.runtime import OpenVinoRuntime
from halfserve.serve.engine.backend import DevicePlacement

path, models, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
runtime, placement = OpenVinoRuntime(), DevicePlacement(use_gpu=False, threads=threads)
interface, x = runtime.describe(path), np.ones((8, 64), np.float16)
before = len(os.listdir("/proc/self/task"))
copies = [runtime.load(path, interface, placement, ModelConfig(max_batch_size=8)) for _ in range(models)]
callers = [
    threading.Thread(target=lambda copy=copy: [copy.run({"x": x.astype(copy.compute_dtype("x"))}) for _ in range(20)])
    for copy in copies
]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux has it")
def test_all_models_share_one_pool_of_threads(graph: Path) -> None:
    few, more, threads = 3, 9, 2
    started = []
    for models in (few, more):
        command = [sys.executable, "-c", COUNT_THREADS, str(graph), str(models), str(threads)]
        started.append(int(subprocess.run(command, capture_output=True, text=True, timeout=500, check=True).stdout))
    assert 0 < started[0] <= few * (threads + 2)
    # A copy has two threads beside those that compute, which wait for runs that are started in the background.
    assert started[1] - started[0] <= 2 * (more - few) + threads, "each has threads to compute with"


def test_an_error_of_openvinos_breaks_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that values decide are not known before. A compiled model that has failed can answer from an earlier batch."""
    nodes = [helper.make_node("Reshape", ["x", "sizes"], ["r"]), helper.make_node("Add", ["r", "w"], ["y"])]
    inputs: list[tuple[str, int, list[int | str]]] = [("x", FLOAT, [4]), ("sizes", TensorProto.INT64, [2])]
    path = save_model(tmp_path / "m.onnx", nodes, inputs, [("y", FLOAT, ["n", "m"])], {"w": np.ones((2, 2), np.float32)})
    backend = load(path)
    x = np.ones(4, np.float32)
    assert backend.run({"x": x, "sizes": np.array([2, 2])})["y"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    with pytest.raises(InstanceLostError, match="OpenVINO failed: "):
        backend.run({"x": x, "sizes": np.array([3, 2])})
    with pytest.raises(InstanceLostError, match="an earlier batch has failed"):
        backend.run({"x": x, "sizes": np.array([2, 2])})


def test_a_run_that_is_given_up_ends_before_its_next_node(tmp_path: Path) -> None:
    size, steps = 1024, 1000  # half a minute
    nodes = [helper.make_node("MatMul", [f"h{step}", "w"], [f"h{step + 1}"]) for step in range(steps)]
    nodes[0].input[0], nodes[-1].output[0] = "x", "y"
    shape: list[int | str] = [size, size]
    path = save_model(
        tmp_path / "m.onnx", nodes, [("x", FLOAT, shape)], [("y", FLOAT, shape)], {"w": np.eye(size, dtype=np.float32)}
    )
    config = with_parameters()
    config.parameters["halfserve.max_compute_s"].string_value = "1"
    backend = load(path, config)
    errors: list[BaseException] = []

    def compute() -> None:
        try:
            backend.run({"x": np.ones((size, size), np.float32)})
        except InstanceLostError as error:
            errors.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    while thread.is_alive():
        backend.give_up()
        thread.join(0.01)
    assert [type(error) for error in errors] == [InstanceLostError]


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[CrashProbe]:
    made = CrashProbe(Decisions(tmp_path / "verdicts"))
    yield made
    made.close()


def test_the_crash_probe_tries_a_graph_out_and_remembers_it(graph: Path, tmp_path: Path, probe: CrashProbe) -> None:
    runtime = OpenVinoRuntime(probe)
    for _ in range(2):
        runtime.load(graph, runtime.describe(graph), ON_CPU, ModelConfig())
        assert len(list((tmp_path / "verdicts").iterdir())) == 1


def test_a_graph_that_ends_its_process_is_refused(tmp_path: Path, probe: CrashProbe) -> None:
    """OpenVINO 2026.4's Python interface frees tensors of texts wrongly."""
    shape: list[int | str] = ["batch"]
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    path = save_model(tmp_path / "m.onnx", nodes, [("x", TensorProto.STRING, shape)], [("y", TensorProto.STRING, shape)])
    runtime = OpenVinoRuntime(probe)
    with pytest.raises(ModelLoadError, match=r"the model ends OpenVINO .*'s process \(SIG"):
        runtime.load(path, read_interface(path), ON_CPU, with_parameters())


@pytest.mark.parametrize(
    "code",
    [
        "import halfserve.serve.backends.openvino.runtime",
        "from halfserve.serve.doctor.examination import openvino; openvino()",
        "from halfserve.serve.backends.onnx_runtime.probe_child import _try_openvino; _try_openvino(sys.argv[1], {}, '')",
    ],
)
def test_openvino_reports_its_use_to_nobody(tmp_path: Path, code: str) -> None:
    path = save_mlp(tmp_path / "model.onnx")
    variables = {name: value for name, value in os.environ.items() if name != "CI"} | {"HOME": str(tmp_path)}
    said = "import sys; {}; print('openvino' in sys.modules, 'openvino_telemetry.main' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", said.format(code), path], env=variables, check=True, capture_output=True, text=True
    )
    assert done.stdout.split()[-2:] == ["True", "False"]
    assert not (tmp_path / "intel").exists()
