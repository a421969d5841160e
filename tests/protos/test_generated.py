from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import descriptor_pb2, text_format
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import model_config_pb2 as triton_config
from tritonclient.grpc import service_pb2 as triton_service
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from halfserve.protos import generate, inference_pb2, model_config_pb2
from halfserve.protos.datatypes import BY_CONFIG, BY_ONNX, BY_WIRE, DATATYPES, Datatype
from halfserve.protos.model_config_pb2 import DataType


def test_generated_files_are_current() -> None:
    for path, text in generate.generated_files().items():
        assert (generate.ROOT / path).read_text() == text, f"{path} is stale; run: make proto"


def test_main_writes_what_is_stale_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "protos"
    folder.mkdir()
    for name in generate.FILES:
        (folder / name).write_text((generate.ROOT / "protos" / name).read_text())
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    generate.main()
    assert capsys.readouterr().out.count("wrote protos/") == 2 * len(generate.FILES)
    generate.main()
    assert capsys.readouterr().out == ""
    (folder / "inference_pb2.py").write_text("stale")
    generate.main()
    assert capsys.readouterr().out == "wrote protos/inference_pb2.py\n"


def test_a_broken_proto_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "protos").mkdir()
    for name in generate.FILES:
        (tmp_path / "protos" / name).write_text('syntax = "proto3"; message {')
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="protoc refused"):
        generate.generated_files()


# Our messages and tritonclient's, of the same names, in one process.

USE_BOTH = """
from halfserve.protos import inference_pb2
from tritonclient.grpc import service_pb2
ours = inference_pb2.ModelInferRequest(model_name="m")
theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
assert theirs.model_name == "m" and type(ours) is not type(theirs)
assert inference_pb2.ModelInferRequest.InferInputTensor.DESCRIPTOR.full_name == "inference.ModelInferRequest.InferInputTensor"
print("both work")
"""


@pytest.mark.parametrize(
    "order", [("halfserve.protos.inference_pb2", "tritonclient.grpc"), ("tritonclient.grpc", "halfserve.protos.inference_pb2")]
)
def test_both_import_in_either_order(order: tuple[str, str]) -> None:
    program = "".join(f"import {name}\n" for name in order) + USE_BOTH
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stdout) == (0, "both work\n"), done.stderr


# Our messages against the descriptors that tritonclient carries: same names, numbers, types, and the same bytes. What is only
# ours has numbers that Triton does not reach.
OWN_NUMBERS = 1000

FILES = [(inference_pb2, triton_service), (model_config_pb2, triton_config)]


def _nested(descriptor: Descriptor) -> Iterator[Descriptor]:
    yield descriptor
    for nested in descriptor.nested_types:
        yield from _nested(nested)


def _messages(module: Any) -> dict[str, Descriptor]:
    return {d.full_name: d for top in module.DESCRIPTOR.message_types_by_name.values() for d in _nested(top)}


def _fields(descriptor: Descriptor) -> set[tuple[Any, ...]]:
    proto = descriptor_pb2.DescriptorProto()
    descriptor.CopyToProto(proto)
    oneofs = [o.name for o in proto.oneof_decl]
    return {
        (f.name, f.number, f.type, f.label, f.type_name, oneofs[f.oneof_index] if f.HasField("oneof_index") else None)
        for f in proto.field
    }


@pytest.mark.parametrize(("ours", "theirs"), FILES)
def test_every_message_has_the_same_fields(ours: Any, theirs: Any) -> None:
    our_messages, their_messages = _messages(ours), _messages(theirs)
    own = [field.message_type for one in our_messages.values() for field in one.fields if field.number > OWN_NUMBERS]
    assert our_messages.keys() - {message.full_name for message in own if message is not None} == their_messages.keys()
    for name, descriptor in their_messages.items():
        assert {field for field in _fields(our_messages[name]) if field[1] <= OWN_NUMBERS} == _fields(descriptor), name


@pytest.mark.parametrize(("ours", "theirs"), FILES)
def test_every_enum_has_the_same_values(ours: Any, theirs: Any) -> None:
    def enums(module: Any) -> dict[str, list[tuple[str, int]]]:
        found = list(module.DESCRIPTOR.enum_types_by_name.values())
        found += [e for d in _messages(module).values() for e in d.enum_types]
        return {e.full_name: [(v.name, v.number) for v in e.values] for e in found}

    assert enums(ours) == enums(theirs)


def test_the_service_has_the_same_methods() -> None:
    def methods(module: Any) -> set[tuple[object, ...]]:
        service = module.DESCRIPTOR.services_by_name["GRPCInferenceService"]
        return {
            (m.name, m.input_type.full_name, m.output_type.full_name, m.client_streaming, m.server_streaming)
            for m in service.methods
        }

    assert methods(inference_pb2) == methods(triton_service)
    assert len(methods(inference_pb2)) == 20


def test_bytes_are_understood_both_ways() -> None:
    request = inference_pb2.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"\x00\x3c"])
    request.inputs.add(name="x", datatype="FP16", shape=[1, 1]).parameters["p"].int64_param = -3
    request.parameters["q"].double_param = 0.5
    copy = triton_service.ModelInferRequest.FromString(request.SerializeToString())
    assert copy.inputs[0].parameters["p"].int64_param == -3
    assert inference_pb2.ModelInferRequest.FromString(copy.SerializeToString()) == request


def test_a_triton_config_file_parses_whole() -> None:
    text = """
      name: "m" backend: "onnxruntime" max_batch_size: 8
      input [ { name: "x" data_type: TYPE_FP16 dims: [ 3, -1 ] } ]
      dynamic_batching { preferred_batch_size: [ 4, 8 ] default_queue_policy { max_queue_size: 9 } }
      optimization { cuda { graphs: true } execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }
      instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0 ] } ]
      model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP16 dims: [ 3, 4 ] zero_data: true } } }
    """
    ours = text_format.Parse(text, model_config_pb2.ModelConfig())
    theirs = text_format.Parse(text, triton_config.ModelConfig())
    assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)


@pytest.mark.parametrize("row", DATATYPES, ids=lambda row: row.wire)
def test_a_row_agrees_with_onnx_and_with_tritonclient(row: Datatype) -> None:
    assert BY_WIRE[row.wire] is BY_CONFIG[row.config] is BY_ONNX[row.onnx] is row
    if row.numpy is None:
        assert (row.wire, row.itemsize, row.onnx) == ("BF16", 2, onnx.TensorProto.BFLOAT16)
        return
    assert onnx.helper.tensor_dtype_to_np_dtype(row.onnx) == row.numpy
    assert np.dtype(triton_to_np_dtype(row.wire)) == row.numpy
    assert np_to_triton_dtype(bool if row.wire == "BOOL" else row.numpy.type) == row.wire  # it fails on numpy.bool
    assert row.itemsize == (None if row.wire == "BYTES" else row.numpy.itemsize)


def test_every_data_type_of_the_config_has_a_row() -> None:
    assert {row.config for row in DATATYPES} == set(DataType.values()) - {0}
    assert BY_WIRE["BYTES"].config_name == "TYPE_STRING"
    assert BY_WIRE["FP16"].config_name == "TYPE_FP16"


def test_only_the_16_bit_floats_have_no_typed_contents() -> None:
    assert {row.wire for row in DATATYPES if row.contents is None} == {"FP16", "BF16"}
