from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.cuda import FIRST_WAIT
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.backends.torch_backend import TorchBackend, TorchRuntime
from halfserve.serve.backends.torch_device_runs import CudaStream, DeviceRuns
from halfserve.serve.backends.torch_program import written
from halfserve.serve.engine.backend import DevicePlacement, ModelInterface, Trust
from halfserve.serve.engine.config.model_config import DeclaredConfig, Defaults, complete_config
from halfserve.serve.engine.errors import BackendError, InvalidArgumentError, ModelLoadError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.queueing.compute_slots import ComputeSlots
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.model_control.version_loading import VersionLoader
from tests.serve.backends.torch_programs import BATCH, Mlp, Outputs, Twice, save_program
from tests.serve.hostile_files import PICKLES, save_hostile_archive

ON_CPU = DevicePlacement(use_gpu=False)
HALF = torch.float16


def load(path: Path) -> tuple[ModelInterface, TorchBackend]:
    runtime = TorchRuntime()
    interface = runtime.describe(path)
    return interface, runtime.load(path, interface, ON_CPU, ModelConfig())


class EveryPlace(nn.Module):
    """Half precision in a parameter, a buffer that is not kept, a constant, a cast and a tensor made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5, dtype=HALF))
        self.register_buffer("kept_out", torch.full((4,), 2.0, dtype=HALF), persistent=False)
        self.constant = torch.tensor([1.0], dtype=HALF)

    def forward(self, x: torch.Tensor) -> Any:
        inner = x.float().to(HALF) * self.weight * self.get_buffer("kept_out") + self.constant
        return {"y": (inner + torch.ones(inner.shape, dtype=HALF), inner.sum(-1)), "count": torch.arange(3)}


def test_half_precision_is_upcast_wherever_it_is(tmp_path: Path) -> None:
    path = save_program(tmp_path / "m.pt2", EveryPlace(), torch.zeros(2, 4, dtype=HALF), dynamic_shapes=BATCH)
    interface, backend = load(path)
    assert [spec.name for spec in interface.outputs] == ["y.0", "y.1", "count"]
    assert not interface.batched, "`count` has no batch dimension"
    assert backend.precision == "fp32 (the fp16 model, upcast)"
    x = np.array([[2048.0, 2049.0, 0.0, 1.0]], np.float16)
    outputs = backend.run({"x": x})
    np.testing.assert_array_equal(outputs["y.0"], (x.astype(np.float32) + 2).astype(np.float16), strict=True)
    # 4102 in fp32; fp16 would have lost the odd ones on the way.
    assert outputs["y.1"].tolist() == [float(np.float16(x.astype(np.float64).sum() + 4))]
    assert outputs["count"].tolist() == [0, 1, 2]


class Bits(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.view(torch.int16) & 0x7FFF).view(HALF)


def test_a_program_that_reads_bits_stays_in_fp16(tmp_path: Path) -> None:
    interface, backend = load(save_program(tmp_path / "m.pt2", Bits(), torch.ones(2, 1, dtype=HALF), dynamic_shapes=BATCH))
    assert backend.precision == "fp16"
    assert [spec.name for spec in interface.outputs] == ["output"]
    assert backend.run({"x": np.array([[-3.0]], np.float16)})["output"].tolist() == [[3.0]]


class Counting(nn.Module):
    """Writes into its buffer and into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.get_buffer("calls").add_(1)
        x.mul_(2)
        return x + self.get_buffer("calls"), x


def test_a_program_that_writes_into_its_inputs_leaves_a_clients_bytes_alone(tmp_path: Path) -> None:
    path = save_program(tmp_path / "m.pt2", Counting(), torch.zeros(2, 1), dynamic_shapes=BATCH)
    interface, backend = load(path)
    assert [spec.name for spec in interface.outputs] == ["output_0", "output_1"]
    x = np.array([[1.0]], np.float32)
    x.flags.writeable = False
    assert backend.run({"x": x})["output_1"].tolist() == [[2.0]]
    assert x.tolist() == [[1.0]]


class Thrice(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"y": x * 3}


def test_a_copy_is_never_made_of_a_file_that_was_refused_and_is_gone(tmp_path: Path) -> None:
    save_program(tmp_path / "m" / "1" / "model.pt2", Twice(), torch.zeros(2, 1), dynamic_shapes=BATCH)
    (served,) = find_models(tmp_path)
    runtime = TorchRuntime()
    model = load_model(served, runtime, ON_CPU, Defaults())
    kept = served.model.rename(tmp_path / "kept.pt2")
    save_program(served.model, Thrice(), torch.zeros(2, 1), dynamic_shapes=BATCH)
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: -1")
    (wrong,) = find_models(tmp_path)
    with pytest.raises(ModelLoadError, match="max_batch_size is -1"):
        load_model(wrong, runtime, ON_CPU, Defaults())
    kept.replace(served.model)
    assert model.reload is not None
    assert model.reload(0).run({"x": np.ones((1, 1), np.float32)})["y"].tolist() == [[2.0]]


class Nested(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"a": {"b": x}, "a.b": x * 2}


def test_outputs_that_would_have_one_name_are_refused(tmp_path: Path) -> None:
    path = save_program(tmp_path / "m.pt2", Nested(), torch.zeros(2, 1), dynamic_shapes=BATCH)
    with pytest.raises(ModelLoadError, match=r"m.pt2: output 'a.b' is there twice, expected each once; return other keys"):
        TorchRuntime().describe(path)


class Options(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, mode: str = "sum") -> torch.Tensor:
        y = x if mask is None else x * mask
        return y + 1 if mode == "sum" else y


def test_what_was_fixed_at_the_export_is_no_input(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    program = torch.export.export(Options(), (torch.zeros(2, 1), None, "sum"), dynamic_shapes=({0: Dim("batch")}, None, None))
    torch.export.save(program, path)
    interface, backend = load(path)
    assert [spec.name for spec in interface.inputs] == ["x"]
    assert backend.run({"x": np.zeros((3, 1), np.float32)})["output"].tolist() == [[1.0]] * 3


def test_sizes_that_the_program_was_not_exported_for_are_refused(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    length = Dim("length", min=2, max=16)
    shapes = [{0: Dim("batch"), 1: length}] * 2
    example = torch.zeros(2, 4)
    _, backend = load(save_program(tmp_path / "m.pt2", Sum(), example, example, dynamic_shapes=shapes))
    x, longer = np.zeros((1, 16), np.float32), np.zeros((1, 17), np.float32)
    assert backend.run({"a": x, "b": x})["output"].shape == (1, 16)
    with pytest.raises(InvalidArgumentError, match="input 'a' has size 17 in dimension 1, expected 2 to 16; the model was"):
        backend.run({"a": longer, "b": longer})
    with pytest.raises(InvalidArgumentError, match="input 'b' has size 8 in dimension 1, expected 16 as in input 'a'"):
        backend.run({"a": x, "b": x[:, :8]})


@pytest.mark.parametrize(
    ("rows", "others", "text"),
    [
        (3, 41, "input 'b' has size 41 in dimension 1, expected 7 to go with input 'a'"),
        (3, 6, "input 'b' has size 6 in dimension 1, expected 2 times a whole number, and 1"),
    ],
)
def test_a_size_that_is_derived_from_another_goes_with_it(tmp_path: Path, rows: int, others: int, text: str) -> None:
    class Every(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a.sum(1) + b[:, ::2].sum(1)

    batch, length = Dim("batch"), Dim("length", max=64)
    examples = torch.ones(2, 4), torch.ones(2, 9)
    shapes = [{0: batch, 1: length}, {0: batch, 1: 2 * length + 1}]
    _, backend = load(save_program(tmp_path / "m.pt2", Every(), *examples, dynamic_shapes=shapes))
    a = np.ones((1, rows), np.float32)
    assert backend.run({"a": a, "b": np.ones((1, 2 * rows + 1), np.float32)})["output"].tolist() == [7]
    with pytest.raises(InvalidArgumentError, match=text):
        backend.run({"a": a, "b": np.ones((1, others), np.float32)})


def test_the_largest_exported_batch_bounds_the_servers(tmp_path: Path) -> None:
    shapes = {"x": {0: Dim("batch", max=6)}}
    interface, _ = load(save_program(tmp_path / "m.pt2", Twice(), torch.zeros(2, 1), dynamic_shapes=shapes))
    silent = DeclaredConfig(message=ModelConfig(), source=tmp_path, says_batch_size=False)
    assert complete_config(silent, interface, name="m", defaults=Defaults()).max_batch_size == 6
    asking = DeclaredConfig(message=ModelConfig(max_batch_size=7), source=tmp_path, says_batch_size=True)
    with pytest.raises(ModelLoadError, match="max_batch_size is 7, but the model was exported for batches of at most 6"):
        complete_config(asking, interface, name="m", defaults=Defaults())


def test_a_program_exported_for_several_rows_only_is_not_batched(tmp_path: Path) -> None:
    shapes = {"x": {0: Dim("batch", min=2)}}
    interface, _ = load(save_program(tmp_path / "m.pt2", Twice(), torch.zeros(4, 1), dynamic_shapes=shapes))
    assert not interface.batched


class HostStream:
    """What a program's runs need of a device, on the host: a recording is a call whose outputs keep their memory.

    Attributes:
        failures: recordings that fail from now on.
        recorded: recordings that were tried.
        replayed: recordings that were run.
    """

    device = torch.device("cpu")

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.recorded = self.replayed = 0

    def current(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    def record(self, work: Callable[[], Sequence[torch.Tensor]]) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        self.recorded += 1
        if self.failures:
            self.failures -= 1
            raise RuntimeError("operation not permitted when stream is capturing\nat a place")
        outputs = [output.clone() for output in work()]

        def replay() -> None:
            self.replayed += 1
            for output, now in zip(outputs, work(), strict=True):
                output.copy_(now)

        return outputs, replay

    def wait(self) -> None:
        pass


def on_stream(backend: TorchBackend, stream: HostStream, *, records: bool = True) -> TorchBackend:
    return replace(backend, _device_runs=DeviceRuns(backend.compute, cast("CudaStream", stream), records=records))


@pytest.mark.parametrize("records", [True, False])
def test_runs_on_a_stream_answer_as_the_program_does(tmp_path: Path, *, records: bool) -> None:
    _, plain = load(save_program(tmp_path / "m.pt2", Mlp(), torch.zeros(2, 64), dynamic_shapes=BATCH))
    stream, random = HostStream(), np.random.default_rng(0)
    backend, answers, expected = on_stream(plain, stream, records=records), [], []
    for rows in (4, 4, 1, 4, 1, 1, 8):
        feeds = {"x": random.standard_normal((rows, 64)).astype(np.float32)}
        answers.append(backend.run(feeds)["y"])
        expected.append(plain.run(feeds)["y"])
    for answer, wanted in zip(answers, expected, strict=True):  # an answer outlives the next run of its shape
        np.testing.assert_array_equal(answer, wanted, strict=True)
    assert (stream.recorded, stream.replayed) == ((2, 4) if records else (0, 0))


def test_a_failed_recording_of_a_program_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, plain = load(save_program(tmp_path / "m.pt2", Twice(), torch.zeros(2, 1), dynamic_shapes=BATCH))
    stream = HostStream(failures=1)
    backend = on_stream(plain, stream)
    for number in range(1 + 1 + FIRST_WAIT + 2):
        x = np.full((3, 1), number, np.float32)
        assert backend.run({"x": x})["y"].tolist() == (2 * x).tolist()
    assert (stream.recorded, stream.replayed) == (2, 2)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.endswith(
        f"(operation not permitted when stream is capturing); it is tried again after {FIRST_WAIT} batches of its size"
    )


@pytest.mark.gpu
def test_a_program_is_recorded_on_a_device(tmp_path: Path) -> None:
    if not torch.cuda.device_count():
        pytest.skip("no CUDA device")
    path, runtime = save_program(tmp_path / "m.pt2", Mlp(), torch.zeros(2, 64), dynamic_shapes=BATCH), TorchRuntime()
    backend = runtime.load(path, runtime.describe(path), DevicePlacement(require_gpu=True), ModelConfig(max_batch_size=8))
    _, plain = load(path)
    random = np.random.default_rng(0)
    for rows in (4, 4, 1, 4, 1, 1, 8):
        feeds = {"x": random.standard_normal((rows, 64)).astype(np.float32)}
        np.testing.assert_allclose(backend.run(feeds)["y"], plain.run(feeds)["y"], rtol=2e-3, atol=2e-3)


def test_settings_of_onnx_runtime_are_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_program(tmp_path / "m" / "1" / "model.pt2", Twice(), torch.ones(2, 1), dynamic_shapes=BATCH)
    config = tmp_path / "m" / "config.pbtxt"
    config.write_text('parameters { key: "execution_mode" value { string_value: "1" } }')
    loader = VersionLoader(
        runtime=Runtimes(trust=Trust(torch_archives=True)), placement=ON_CPU, defaults=Defaults(), warm_up_budget_s=5.0
    )
    loader.load(*find_models(tmp_path))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"{config}: no effect here: parameters.execution_mode"]


def test_a_zip_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(b"PK\x03\x04 and nothing more")
    with pytest.raises(
        ModelLoadError, match="m.pt2: is not a readable exported program .*; write it with torch.export.save"
    ) as no:
        Runtimes(trust=Trust(torch_archives=True)).describe(path)
    assert "\n" not in str(no.value)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "is a torch archive, which can run any code .*; export .* to ONNX, or start .* --trust-torch-archives if .*"),
        (["--trust-torch-archives"], r"is not a readable exported program \(.*\); write it with torch.export.save .*"),
    ],
)
def test_a_checkpoint_is_refused_in_one_line(tmp_path: Path, options: list[str], line: str) -> None:
    torch.save({"weights": torch.ones(2)}, tmp_path / "checkpoint.pt")
    program = "import sys; from halfserve.cli import main; main(['serve', '--grpc-port', '0', *sys.argv[1:]])"
    command = [sys.executable, "-c", program, str(tmp_path / "checkpoint.pt"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert re.fullmatch(rf"halfserve serve: \S+checkpoint.pt: {line}\n", ended.stderr)


def test_without_torch_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_program(tmp_path / "m.pt2", Twice(), torch.zeros(2, 1))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "halfserve.serve.backends.torch_backend")
    with pytest.raises(
        ModelLoadError, match="'torch' is not installed; export the model to ONNX, or .* make install EXTRAS=train"
    ):
        Runtimes(trust=Trust(torch_archives=True)).describe(path)


def test_onnx_models_are_served_without_torch() -> None:
    program = "import sys, halfserve.serve.backends.runtimes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_programs_on_the_cpu_compete_for_the_slots_of_the_server(tmp_path: Path) -> None:
    save_program(tmp_path / "m" / "1" / "model.pt2", Twice(), torch.zeros(2, 1), dynamic_shapes=BATCH)
    (files,) = find_models(tmp_path)

    async def scene() -> None:
        core = InferenceCore([])
        core.slots = ComputeSlots(1)
        model = load_model(files, TorchRuntime(), ON_CPU, Defaults())
        core.replace("m", [model])
        assert model.batcher._dispatcher.share is not None
        await core.drain()

    asyncio.run(scene())


@pytest.mark.long
@pytest.mark.parametrize("place", PICKLES)
@pytest.mark.parametrize("name", ["model.pt2", "model.pt", "model.onnx", "model.bin"])
def test_an_archive_that_runs_code_is_refused_where_archives_are_not_trusted(tmp_path: Path, place: str, name: str) -> None:
    marker = tmp_path / "ran"
    path = save_hostile_archive(tmp_path / name, place, marker)
    with pytest.raises(ModelLoadError, match=rf"{name}: is a torch archive, which can run .* --trust-torch-archives if"):
        Runtimes().describe(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "place", sorted(PICKLES.keys() - {"an opaque constant"})
)  # of which torch knows no other way to read it
def test_of_a_trusted_archive_tensors_alone_are_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # as somebody else's program may need it
    marker = tmp_path / "ran"
    path = save_hostile_archive(tmp_path / "model.pt2", place, marker)
    with pytest.raises(ModelLoadError, match=r"model.pt2: holds pickled objects other than tensors, which are not loaded"):
        Runtimes(trust=Trust(torch_archives=True)).describe(path)
    assert not marker.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("place", PICKLES)
def test_the_archives_of_these_tests_run_code_in_torch_itself(tmp_path: Path, place: str) -> None:
    marker = tmp_path / "ran"
    path = save_hostile_archive(tmp_path / "model.pt2", place, marker)
    with contextlib.suppress(Exception):  # what it does after that is torch's own affair
        torch.export.load(path)
    assert marker.exists()


class Keeping(nn.Module):
    """x [batch, 4] -> y: what `kept` held before, which x goes into."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1, 4, dtype=dtype))
        self.register_buffer("constant", torch.zeros(1, 4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> Outputs:
        before = self.get_buffer("kept") + 0 * x + self.get_buffer("constant")
        return {"y": before + 0 * self.keep(x.sum(0, keepdim=True))}

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_buffer("kept").copy_(x)


class KeepingInAView(Keeping):
    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_buffer("kept").view(4)[1:3].unbind()[0].add_(x.view(4)[0])


class KeepingWithoutGradient(Keeping):
    def keep(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.get_buffer("kept").mul_(0.5).add_(x)


class KeepingStatistics(Keeping):
    """As a normalization that was exported while it trained."""

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.get_buffer("kept").view(4)
        return torch.batch_norm(x.expand(2, 4), None, None, kept, kept, True, 0.5, 1e-5, False).sum()


class Normalizing(nn.Module):
    """x [batch, 4] -> y, as it was learned; writes into what it has just made, and not into what it has learned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> Outputs:
        return {"y": self.norm(x).mul_(2).relu_()}


def loaded(path: Path) -> TorchBackend:
    runtime = TorchRuntime()
    return runtime.load(path, runtime.describe(path), DevicePlacement(use_gpu=False), ModelConfig())


@pytest.mark.parametrize(
    "module",
    [
        KeepingInAView(),
        KeepingStatistics(),
        *(pytest.param(module, marks=pytest.mark.long) for module in (Keeping(), Keeping(HALF), KeepingWithoutGradient())),
    ],
)
def test_a_request_leaves_nothing_for_the_next_one(tmp_path: Path, module: Keeping) -> None:
    dtype = module.get_buffer("kept").dtype
    path = save_program(tmp_path / "m.pt2", module, torch.ones(3, 4, dtype=dtype), dynamic_shapes=BATCH)
    assert [name.removeprefix("b_") for name in written(torch.export.load(path).graph_module)] == ["kept"]
    secret = np.full((2, 4), 7, dtype=str(dtype).removeprefix("torch."))
    for backend in (loaded(path), on_stream(loaded(path), HostStream())):
        for _ in range(3):
            assert not backend.run({"x": secret})["y"].any()


@pytest.mark.parametrize(("module", "columns"), [(Mlp(), 64), (Normalizing(), 4)])
def test_a_program_that_writes_into_nothing_that_it_keeps_is_run_as_it_is(module: nn.Module, columns: int) -> None:
    dtype = next(module.parameters()).dtype
    program = torch.export.export(module.eval(), (torch.ones(3, columns, dtype=dtype),), dynamic_shapes=BATCH)
    assert not written(program.graph_module)


def test_a_constant_that_goes_into_a_subgraph_is_no_graph() -> None:
    inner, outer = torch.fx.Graph(), torch.fx.Graph()
    inner.output((inner.call_function(torch.ops.aten.add.Tensor, (inner.placeholder("a"), inner.placeholder("b"))),))
    x, constant, graph = outer.placeholder("x"), outer.get_attr("constant"), outer.get_attr("inner")
    outer.output(outer.call_function(torch.ops.higher_order.wrap_with_set_grad_enabled, (False, graph, x, constant)))
    root = nn.Module()
    root.register_buffer("constant", torch.ones(1))
    root.add_module("inner", torch.fx.GraphModule(nn.Module(), inner))
    assert not written(torch.fx.GraphModule(root, outer))


class Embedding(nn.Module):
    """ids INT64 [batch, n] -> y: a word's number of 5, and a kind's of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(5, 1), nn.Embedding(3, 1)

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.words(ids.to(torch.int32)) + self.kinds(kinds.unsqueeze(0))[0] + self.words(free + 1)
        return y


def test_an_index_out_of_an_embedding_is_the_callers_error(tmp_path: Path) -> None:
    examples = [torch.zeros(2, 3, dtype=torch.int64) for _ in range(3)]
    _, backend = load(save_program(tmp_path / "m.pt2", Embedding(), *examples))
    good = {name: np.ones((2, 3), np.int64) for name in ("ids", "kinds", "free")}
    assert backend.run(good)["output"].shape == (2, 3, 1)
    for name, value, range_of in (("ids", 5, "0 to 4"), ("ids", -1, "0 to 4"), ("kinds", 3, "0 to 2")):
        with pytest.raises(InvalidArgumentError, match=f"input '{name}' has the value {value}, expected {range_of}: "):
            backend.run({**good, name: np.array([[0, 1, value], [0, 0, 0]])})
    with pytest.raises(BackendError, match="index out of range"):  # computed with: its range is not known
        backend.run({**good, "free": np.full((2, 3), 4)})
