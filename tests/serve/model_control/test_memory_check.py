"""What is checked around a model's load: whether there is room for it, and what its configuration says."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from halfserve.serve.engine import resource_limits
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import find_model, find_models, model_names
from halfserve.serve.engine.resource_limits import available_bytes, memory_limit_bytes
from halfserve.serve.model_control import load_memory
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.model_control.load_memory import LoadMemory, needed_bytes
from tests.models import save_mlp
from tests.serve.hostile_files import elsewhere, reading_model
from tests.serve.model_control.controlled import controlled_server, lines, loader


def require_memory(model: Path, copies: int) -> None:
    async def load() -> None:
        async with LoadMemory().claimed(model, needed_bytes(model, copies)):
            pass

    asyncio.run(load())


def test_reported_parameters_cannot_be_declared(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    claims = [f'parameters {{ key: "halfserve.{key}" value {{ string_value: "passed" }} }}' for key in ("certificate", "nodes")]
    (tmp_path / "mlp" / "config.pbtxt").write_text("\n".join(claims))
    (files,) = find_models(tmp_path)
    found = loader().load(files).config.parameters
    assert "halfserve.certificate" not in found
    assert found["halfserve.nodes"].string_value.startswith("CPUExecutionProvider=")


def test_accelerators_have_no_effect_on_the_cpu_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    accelerator = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }'
    (tmp_path / "mlp" / "config.pbtxt").write_text(accelerator)
    (files,) = find_models(tmp_path)
    loader().load(files)
    assert "mlp/config.pbtxt: no effect here: optimization.execution_accelerators" in caplog.text


def test_a_model_beyond_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(b"x" * 1_000_000)
    (tmp_path / "model.onnx.data").write_bytes(b"x" * 2_000_000)
    (tmp_path / "other.onnx").write_bytes(b"x" * 9_000_000)
    monkeypatch.setattr(load_memory, "available_bytes", lambda: 3_000_000)
    require_memory(model, 1)
    with pytest.raises(ModelLoadError, match="not enough memory: it takes at least 6 MB, 3 MB are available; unload another"):
        require_memory(model, 2)
    monkeypatch.setattr(load_memory, "available_bytes", lambda: None)
    require_memory(model, 1000)


def test_models_that_load_at_once_fit_into_the_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_memory, "available_bytes", lambda: 3_000_000)
    memory, begun = LoadMemory(), list[str]()

    async def load(name: str, needed: int, end: asyncio.Event) -> None:
        async with memory.claimed(Path(name), needed):
            begun.append(name)
            await end.wait()

    async def main() -> None:
        ends = [asyncio.Event() for _ in range(4)]
        sizes = (("a", 1_000_000), ("b", 2_000_000), ("c", 3_000_000), ("code", 0))
        loads = [asyncio.create_task(load(*entry, end)) for entry, end in zip(sizes, ends, strict=True)]
        for ended, expected in ((None, ["a", "b"]), (0, ["a", "b"]), (1, ["a", "b", "c", "code"])):
            if ended is not None:
                ends[ended].set()
                await loads[ended]
            for _ in range(10):
                await asyncio.sleep(0)
            assert begun == expected
        for end in ends:
            end.set()
        with pytest.raises(ModelLoadError, match="d: not enough memory: it takes at least 4 MB, 3 MB are available"):
            await load("d", 4_000_000, ends[0])
        await asyncio.gather(*loads)

    asyncio.run(main())


def test_memory_must_hold_the_data_files_that_a_model_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_mlp(tmp_path / "model.onnx")
    onnx.save(onnx.load(model), model, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").write_bytes(b"x" * 2_000_000)
    monkeypatch.setattr(load_memory, "available_bytes", lambda: 1_000_000)
    with pytest.raises(ModelLoadError, match="it takes at least 2 MB, 1 MB are available"):
        require_memory(model, 1)


def test_memory_must_hold_each_tensor_that_reads_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.onnx"
    message = onnx.load_from_string(reading_model("initializer", "weights.bin"))
    message.graph.initializer.extend([elsewhere("weights.bin", count=1_000_000)] * 50)
    unsaid = elsewhere("weights.bin", count=1_000_000)
    del unsaid.external_data[1:]
    message.graph.initializer.extend([unsaid] * 50)
    model.write_bytes(message.SerializeToString())
    (tmp_path / "weights.bin").write_bytes(bytes(1_000_000))
    monkeypatch.setattr(load_memory, "available_bytes", lambda: 50_000_000)
    with pytest.raises(ModelLoadError, match="it takes at least 100 MB, 50 MB are available"):
        require_memory(model, 1)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /proc/meminfo, /proc/self/cgroup and /sys/fs/cgroup."""
    monkeypatch.setattr(resource_limits, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(resource_limits, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(resource_limits, "CGROUP", tmp_path)
    return tmp_path


def add_group(folder: Path, limit: str, used: str = "1000") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(used)
    (folder / "memory.stat").write_text("anon 5\ninactive_file 200\nactive_file 100")


@pytest.mark.parametrize(
    ("limit", "meminfo", "available", "most"),
    [
        ("max", "MemTotal: 9 kB\nMemAvailable:    7 kB\n", 7 * 1024, 9 * 1024),
        ("5000", "MemTotal: 9 kB\nMemAvailable: 7 kB", 5000 - 1000 + 300, 5000),
        ("5000", "", 5000 - 1000 + 300, 5000),
        ("none", "", None, None),
    ],
)
def test_the_machine_and_the_container_limit_memory(
    machine: Path, limit: str, meminfo: str, available: int | None, most: int | None
) -> None:
    add_group(machine, limit)
    (machine / "meminfo").write_text(meminfo)
    assert (available_bytes(), memory_limit_bytes()) == (available, most)


def test_enclosing_control_groups_limit_memory(machine: Path) -> None:
    (machine / "membership").write_text("0::/system.slice/halfserve.service\n")
    add_group(machine / "system.slice" / "halfserve.service", "9000", "2000")
    assert available_bytes() == 9000 - 2000 + 300
    add_group(machine / "system.slice", "9000", "5000")
    assert available_bytes() == 9000 - 5000 + 300
    add_group(machine / "other.slice", "100")
    # As it is named where a group beside it is the outermost one that is seen.
    (machine / "membership").write_text("0::/../system.slice/halfserve.service\n")
    assert available_bytes() == 9000 - 5000 + 300


@pytest.mark.parametrize("folder", ["docker/1f", "."])  # as the host sees it, and as the container does
def test_control_groups_of_version_1_limit_memory(machine: Path, folder: str) -> None:
    (machine / "membership").write_text("5:cpu,cpuacct:/other\n4:memory:/docker/1f\n1:name=systemd:/memory\n0::/\n")
    group = machine / "memory" / folder
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("5000\n")
    (group / "memory.usage_in_bytes").write_text("1000\n")
    (group / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100\ntotal_rss 9\n")
    assert available_bytes() == 5000 - 1000 + 300


def test_memory_is_known_here() -> None:
    assert (available_bytes() or 0) > np.iinfo(np.uint16).max


def test_running_out_of_memory_while_loading_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    (files,) = find_models(tmp_path)

    def run_out(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("halfserve.serve.trials.at_load.warm_up", run_out)
    with pytest.raises(ModelLoadError, match="mlp/1/model.onnx: not enough memory to load it; unload another model first"):
        loader().load(files)


def test_a_folder_that_may_not_be_looked_into_is_a_model_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mlp(tmp_path / "good" / "1" / "model.onnx")
    (tmp_path / "locked").mkdir()
    real = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:  # a test that runs as root may look into everything
        if path.name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert model_names(tmp_path) == ["good", "locked"]
    with pytest.raises(ModelLoadError, match="locked: cannot be read: Permission denied"):
        find_model(tmp_path, "locked")


@pytest.mark.parametrize(
    ("failure", "reason", "logged"),
    [
        (
            OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/elsewhere/secret"),
            "cannot be loaded: Too many open files",
            "{}/mlp/1/model.onnx: cannot be loaded: Too many open files",
        ),
        (ZeroDivisionError(), "ZeroDivisionError while it was loaded; the server's log says more", "mlp/1: failed to load"),
    ],
    ids=["system", "unexpected"],
)
def test_an_error_refuses_the_version_in_one_line_and_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    reason: str,
    logged: str,
) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr("halfserve.serve.trials.at_load.warm_up", fail)
    with controlled_server(tmp_path, ControlMode.NONE, keep_going=True) as server:
        assert lines(server) == [("mlp", "1", "UNAVAILABLE", f"mlp/1/model.onnx: {reason}")]
    assert caplog.messages[0] == logged.format(tmp_path)
    assert len(caplog.messages) == 1 or not isinstance(failure, OSError)
