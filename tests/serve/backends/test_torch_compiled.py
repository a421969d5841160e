"""Programs that AOTInductor compiled, compiled here and served on the CPU."""

from __future__ import annotations

import gc
import json
import platform
import shutil
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from halfserve import Client
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.backends.torch_compiled import CompiledProgram
from halfserve.serve.engine.backend import DevicePlacement, Trust
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import BackendError, ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.tensors import Tensors
from tests.serve.running_server import running_server

ON_CPU = DevicePlacement(use_gpu=False, threads=1)
TRUST = Trust(torch_archives=True)
COMPILES = [pytest.mark.long, pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs g++")]
TENSORS = """platform: "torch_aoti" backend: "pytorch" max_batch_size: 8
input { name: "ARGS[0]" data_type: TYPE_FP32 dims: [ 3 ] }
input { name: "KWARGS[more][index]" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "RESULT[sums][1]" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP16 dims: [ 3 ] }
"""
Results = dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


class Structured(nn.Module):
    """x [batch, 3], index [batch, 1] of 4 factors -> y FP16: x * factor; sums: x's sum in FP64, and in FP32 with 1 added."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Embedding(4, 1, _weight=torch.arange(4.0)[:, None])

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> Results:
        total = x.sum(1, keepdim=True)
        return {"y": (x * self.factors(more["index"])[:, 0]).half(), "sums": (total.double(), total + 1)}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    batch = {0: Dim("batch", min=1, max=64)}
    example = (torch.zeros(2, 3),), {"more": {"index": torch.zeros(2, 1, dtype=torch.int64)}}
    program = torch.export.export(Structured().eval(), *example, dynamic_shapes=[batch, {"index": batch}])
    path = tmp_path_factory.mktemp("compiled") / "model.pt2"
    with warnings.catch_warnings(action="ignore"):  # torch's compiler uses what torch has deprecated
        return Path(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))


def archive(path: Path, **changes: str) -> Path:
    """Write an archive that says for which machine it was compiled, without a library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": platform.machine(), **changes}
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "m/data/aotinductor/model/a.wrapper_metadata.json",
            json.dumps(facts),
        )
    return path


def loaded(folder: Path, config: str, program: Path | None = None, **changes: str) -> Model:
    path = folder / "m" / "1" / "model.pt2"
    if program is None:
        archive(path, **changes)
    else:
        path.parent.mkdir(parents=True)
        shutil.copy(program, path)
    (folder / "m" / "config.pbtxt").write_text(config)
    (files,) = find_models(folder)
    return load_model(files, Runtimes(trust=TRUST), ON_CPU, Defaults())


class TestCompiled:
    pytestmark = COMPILES

    def test_a_program_is_served_in_batches_by_tritons_names(self, tmp_path: Path, compiled: Path) -> None:
        model = loaded(tmp_path, TENSORS, compiled)
        assert (model.config.platform, model.config.backend) == ("torch_aoti", "pytorch")
        assert model.config.HasField("dynamic_batching")
        x, index = np.arange(12, dtype=np.float32).reshape(4, 3), np.full((4, 1), 2)
        with running_server(lambda: [model]) as server, Client(server.address) as client:
            answer = client.infer("m", {"ARGS[0]": x, "KWARGS[more][index]": index})
        assert answer["RESULT[sums][1]"].tolist() == [[4], [13], [22], [31]]
        assert answer["OUTPUT__0"].dtype == np.float16
        np.testing.assert_array_equal(answer["OUTPUT__0"], x * 2)

    def test_an_unloaded_program_leaves_no_files(self, compiled: Path) -> None:
        program = CompiledProgram(compiled, torch.device("cpu"))
        folder = program.folder
        assert list(folder.glob("*.so"))
        del program
        gc.collect()
        assert not folder.exists()

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            (
                "RESULT[sums][1]",
                "RESULT[sums]",
                r"output 'RESULT\[sums\]' .* is not there, expected some of .*RESULT\[sums\]\[0\]",
            ),
            ("OUTPUT__0", "OUTPUT__2", r"output 'RESULT\[sums\]\[1\]' is declared again as 'OUTPUT__2'"),
            (
                "TYPE_INT64",
                "TYPE_INT32",
                "input 'KWARGS.*' is INT64, and its data_type INT32; correct",
            ),
            ("KWARGS[more][index]", "INPUT__0", r"input 'ARGS\[0\]' is declared again as 'INPUT__0'"),
        ],
    )
    def test_a_configuration_that_does_not_fit_is_refused(
        self, tmp_path: Path, compiled: Path, old: str, new: str, reason: str
    ) -> None:
        with pytest.raises(ModelLoadError, match=reason):
            loaded(tmp_path, TENSORS.replace(old, new), compiled)

    @pytest.mark.parametrize(
        ("left_out", "reason"),
        [
            ("KWARGS", r"declares no KWARGS\[more\]\[index\]; declare every input"),
            ("output", "declares no output; declare every"),
        ],
    )
    def test_what_is_not_declared_is_named(self, tmp_path: Path, compiled: Path, left_out: str, reason: str) -> None:
        config = "\n".join(line for line in TENSORS.splitlines() if left_out not in line)
        with pytest.raises(ModelLoadError, match=rf"{reason}.* some of RESULT\[y\], RESULT\[sums\]\[0\]"):
            loaded(tmp_path, config, compiled)

    def test_an_output_of_another_type_is_refused(self, tmp_path: Path, compiled: Path) -> None:
        model = loaded(tmp_path, TENSORS.replace("TYPE_FP16", "TYPE_FP32"), compiled)
        assert model.reload is not None
        inputs: Tensors = {"ARGS[0]": np.ones((1, 3), np.float32), "KWARGS[more][index]": np.ones((1, 1), np.int64)}
        with pytest.raises(BackendError, match="output 'OUTPUT__0' is FP16, and its data_type FP32; correct"):
            model.reload(0).run(inputs)

    def test_inputs_that_the_program_refuses_are_an_error_of_their_request(self, compiled: Path) -> None:
        program = CompiledProgram(compiled, torch.device("cpu"))
        assert [names[0] for names in program.inputs] == ["ARGS[0]", "KWARGS[more][index]"]
        with pytest.raises(BackendError, match="the model failed on this request"):
            program.run([torch.ones(2, 3), torch.full((2, 1), 4)], 0)
        assert program.run([torch.ones(2, 3), torch.full((2, 1), 3)], 0)[0].tolist() == [[3, 3, 3]] * 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"AOTI_DEVICE_KEY": "cuda"}, "was compiled for 'cuda'; compile it for 'cpu'"),
        ({"AOTI_MACHINE": "z80"}, "was compiled for 'z80', and this machine is .*; compile it on a machine like this one"),
        ({"AOTI_CPU_ISA": "AVX4096"}, "was compiled for processors with AVX4096, which this one lacks; compile it"),
        ({}, "the compiled program cannot be loaded .it holds 0 libraries, expected one .*; compile it again"),
    ],
)
def test_a_program_for_another_machine_is_refused(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"model.pt2: {reason}"):
        loaded(tmp_path, TENSORS, None, **changes)


def test_a_compiled_program_needs_trust_and_a_configuration(tmp_path: Path) -> None:
    path = archive(tmp_path / "m.pt2")
    with pytest.raises(ModelLoadError, match="is a torch archive, which can run any code"):
        Runtimes().describe(path)
    with pytest.raises(ModelLoadError, match=r"AOTInductor compiled it, .*; serve it as .* with a config.pbtxt that declares"):
        Runtimes(trust=TRUST).describe(path)
