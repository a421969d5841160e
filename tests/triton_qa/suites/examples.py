"""Suites of NVIDIA's example clients, with stand-ins for the models of Triton's documentation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from tests.triton_qa.onnx_models import add_sub, heading, identity, save, step, tensors
from tests.triton_qa.repository import REPEAT, stand_in
from tests.triton_qa.sequence_models import plain_sequence
from tests.triton_qa.suite import Builder, Suite

TESTS = "examples/example_clients.py"
CLASSES, LABEL_FILE = 1001, "labels.txt"
SEQUENCE = """max_batch_size: 8
sequence_batching {{
  max_sequence_idle_microseconds: 10000000
  oldest {{ max_candidate_sequences: 1024 max_queue_delay_microseconds: 10000 }}
  control_input [
    {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "END" control [ {{ kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "READY" control [ {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: {} }} ] }}
  ]
}}
input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
"""


def _network(name: str, given: str, shape: tuple[int, ...], gives: str, *, batch: int, classes: int) -> Builder:
    """Builder of a network whose class follows from the mean of its picture."""

    def build(_qa: Path, repository: Path) -> None:
        folder = repository / name
        rank = [*range(1, len(shape) + 1)] if batch else [*range(len(shape))]
        weights = numpy_helper.from_array(np.linspace(-1, 1, classes, dtype=np.float32).reshape(1, classes), "weights")
        ends = numpy_helper.from_array(np.array([-1, 1] if batch else [1, 1], np.int64), "ends")
        flat = numpy_helper.from_array(np.array([-1, classes] if batch else [classes], np.int64), "flat")
        nodes = [
            helper.make_node("ReduceMean", [given], ["mean"], axes=rank, keepdims=0),
            helper.make_node("Reshape", ["mean", "ends"], ["column"]),
            helper.make_node("MatMul", ["column", "weights"], ["scores"]),
            helper.make_node("Reshape", ["scores", "flat"], [gives]),
        ]
        made = ["batch"] if batch else []
        inputs = [helper.make_tensor_value_info(given, TensorProto.FLOAT, [*made, *shape])]
        outputs = [helper.make_tensor_value_info(gives, TensorProto.FLOAT, [*made, classes])]
        save(helper.make_graph(nodes, "network", inputs, outputs, [weights, ends, flat]), folder / "1")
        form = "FORMAT_NHWC" if shape[-1] == 3 else "FORMAT_NCHW"
        config = heading(name, "onnxruntime_onnx", batch)
        config += tensors("input", [(given, "float32", shape)], first_extra=f"format: {form}")
        config += tensors("output", [(gives, "float32", (classes,))], first_extra=f'label_filename: "{LABEL_FILE}"')
        (folder / "config.pbtxt").write_text(config)
        (folder / LABEL_FILE).write_text("".join(f"CLASS {number}\n" for number in range(classes)))

    return build


def _ensemble(_qa: Path, repository: Path) -> None:
    folder, given = repository / "preprocess_inception_ensemble", [("INPUT", "object", (1,))]
    (folder / "1").mkdir(parents=True)
    softmax = "InceptionV3/Predictions/Softmax"
    steps = [
        step("decoded_picture", {"INPUT": "INPUT"}, {"OUTPUT": "picture"}),
        step("inception_graphdef", {"input": "picture"}, {softmax: "OUTPUT"}),
    ]
    config = heading(folder.name, "ensemble", 8) + tensors("input", given)
    config += tensors("output", [("OUTPUT", "float32", (CLASSES,))], first_extra=f'label_filename: "{LABEL_FILE}"')
    (folder / "config.pbtxt").write_text(f"{config}ensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n")
    (folder / LABEL_FILE).write_text("".join(f"CLASS {number}\n" for number in range(CLASSES)))


def _picture(_qa: Path, repository: Path) -> None:
    Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(64, 64, 3)).save(
        repository.parent / "picture.jpg"
    )


# The programs of model control expect eight models, and seven.
EIGHT = (
    add_sub("int32", "int32", "int32", name="simple"),
    add_sub("int8", "int8", "int8", name="simple_int8"),
    add_sub("object", "object", "object", name="simple_string"),
    stand_in(  # ONNX Runtime ends a text at its first zero
        "identity",
        "simple_identity",
        """max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]""",
    ),
    plain_sequence("int32", name="simple_sequence"),
    stand_in("dyna_sequence", "simple_dyna_sequence", SEQUENCE.format("TYPE_UINT64")),
    _network("inception_graphdef", "input", (299, 299, 3), "InceptionV3/Predictions/Softmax", batch=128, classes=CLASSES),
    _network("densenet_onnx", "data_0", (3, 224, 224), "fc6_1", batch=0, classes=1000),
)
CUDA = "needs CUDA shared memory"
EXAMPLES = (
    Suite(
        name="example_clients",
        sources="clients",
        tests=TESTS,
        models=(
            *EIGHT,
            stand_in(
                "dyna_sequence", "simple_string_dyna_sequence", SEQUENCE.format("TYPE_STRING").replace("size: 8", "size: 1")
            ),
            stand_in(
                "picture",
                "decoded_picture",
                """max_batch_size: 8
input [ { name: "INPUT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 299, 299, 3 ] } ]""",
            ),
            identity(1, "int32", name="custom_identity_int32"),
            REPEAT,
            _ensemble,
            _picture,
        ),
        left_out={
            "test_simple_grpc_cudashm_client": CUDA,
            "test_simple_http_cudashm_client": CUDA,
            "test_simple_grpc_model_control": "runs in a suite of its own",
            "test_simple_http_model_control": "runs in a suite of its own",
        },
        method_seconds=120,
    ),
    *(
        Suite(
            name=f"example_clients_control_{client}",
            sources="clients",
            tests=TESTS,
            methods=(f"test_simple_{client}_model_control",),
            models=EIGHT[:count],
            flags=("--model-control-mode=explicit",),
        )
        for client, count in (("grpc", 8), ("http", 7))
    ),
)
