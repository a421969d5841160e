"""The clients of docs/guides/other_languages.md, and what other languages' generators read in the .proto files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from halfserve.protos.model_config_pb2 import TYPE_FP16, ModelConfig
from tests.models import mlp_weights
from tests.serve.running_server import RunningServer
from tests.written_blocks import ROOT, blocks_of

DOCUMENT = "docs/guides/other_languages.md"
PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")


@pytest.mark.parametrize("where", ["the root", "the folder itself", "elsewhere"])
def test_protoc_finds_the_files_by_their_folder(where: str, tmp_path: Path) -> None:
    include, folder = {
        "the root": ("protos", ROOT),
        "the folder itself": (".", ROOT / "halfserve" / "protos"),
        "elsewhere": (str(ROOT / "halfserve" / "protos"), tmp_path),
    }[where]
    output = tmp_path / "inference.binpb"
    arguments = ["-I", include, f"--descriptor_set_out={output}", "--include_imports", "inference.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], cwd=folder, check=True, timeout=500)
    files = FileDescriptorSet.FromString(output.read_bytes()).file
    assert [file.name for file in files] == ["model_config.proto", "inference.proto"]
    for file in files:
        named = file.options.go_package, file.options.java_package, file.options.csharp_namespace
        assert named == ("halfserve/inference", "halfserve.inference", "Halfserve.Inference")
        assert file.options.java_multiple_files


@pytest.mark.long
def test_the_guides_model_has_the_input_that_its_programs_send(tmp_path: Path) -> None:
    blocks = blocks_of(DOCUMENT)
    made = next(block.text for block in blocks if block.language == "bash")
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    environment["PYTHONPATH"] = str(ROOT)
    subprocess.run(["bash", "-eu", "-c", made], cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=500)
    config = text_format.Parse((tmp_path / "models" / "mlp" / "config.pbtxt").read_text(), ModelConfig())
    (given,) = config.input
    assert (given.data_type, list(given.dims)) == (TYPE_FP16, [64])
    programs = [block.text for block in blocks if block.language in ("javascript", "go", "java")]
    assert len(programs) == 3
    assert all(f'"{given.name}"' in program and f'"{config.name}"' in program for program in programs)


@pytest.fixture(scope="module")
def node_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's program, beside its packages."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("node")
    (program,) = (block.text for block in blocks_of(DOCUMENT) if block.language == "javascript")
    (folder / "infer.js").write_text(program)
    (folder / "package.json").write_text("{}")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    if installed.returncode:
        pytest.skip(f"npm cannot install the packages: {installed.stderr.strip().splitlines()[-1:]}")
    return folder / "infer.js"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nodes_client_gets_the_answer(server: RunningServer, node_program: Path) -> None:
    command = ["node", str(node_program), server.address, str(ROOT / "halfserve" / "protos")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    *told, content = done.stdout.split()
    assert " ".join(told) == "from Node y FP16 [ 1, 10 ]"
    first, second = (weights.astype(np.float32) for weights in mlp_weights())
    expected = np.maximum(np.ones((1, 64), np.float32) @ first, 0) @ second
    np.testing.assert_allclose(np.frombuffer(bytes.fromhex(content), np.float16), expected[0], rtol=2e-3, atol=1e-3)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nodes_client_gets_status_and_text_of_an_error(server: RunningServer, node_program: Path) -> None:
    wrong = node_program.with_name("wrong.js")
    wrong.write_text(node_program.read_text().replace("shape: [1, 64]", "shape: [1, 65]"))
    command = ["node", str(wrong), server.address, str(ROOT / "halfserve" / "protos")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "INVALID_ARGUMENT input 'x' has shape [1, 65], expected [-1, 64] (-1 takes any size)"
