from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.crash_probe import (
    LOWEST,
    NICENESS,
    CrashProbe,
    CrashVerdict,
    ProbeProcess,
    onnx_trial,
)
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.onnx_runtime.session import Providers
from halfserve.serve.backends.onnx_runtime.session_settings import OPTIMIZATION_LEVEL, OptimizationLevel, SessionSettings
from halfserve.serve.backends.runtimes import probing_runtimes
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.trials.decisions import Decisions, users_folder
from tests.models import save_mlp, save_model, save_picky
from tests.serve.backends.support import save_crashing_always, save_crashing_when_folded

ON_CPU = DevicePlacement(use_gpu=False, threads=1)
if sys.platform == "win32":
    pytest.skip("how a process ended is told by POSIX signals here", allow_module_level=True)


@dataclass
class Probing:
    """A probe, and how often it had to start a process."""

    folder: Path
    command: tuple[str, ...] | None = None
    limit_s: float = 60.0
    started: list[ProbeProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.probe = CrashProbe(Decisions(self.folder), start=self.start, limit_s=self.limit_s)

    def start(self) -> ProbeProcess:
        self.started.append(ProbeProcess() if self.command is None else ProbeProcess(self.command))
        return self.started[-1]

    def level(self, path: Path) -> OptimizationLevel:
        trial = onnx_trial(path, [("CPUExecutionProvider", {})], SessionSettings())
        return self.probe.safe_level(trial, path.read_bytes())


@pytest.fixture
def probing(tmp_path: Path) -> Iterator[Probing]:
    made = Probing(tmp_path / "verdicts")
    yield made
    made.probe.close()


def test_a_model_that_crashes_when_it_is_optimized_is_served_without(
    probing: Probing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, config = save_crashing_when_folded(tmp_path / "m.onnx"), ModelConfig()
    runtime = OnnxRuntime(probing.probe)
    with caplog.at_level(logging.WARNING):
        backend = runtime.load(path, runtime.describe(path), ON_CPU, config)
    assert backend.run({"x": np.array([5]), "c": np.array(True)})["y"].tolist() == [4]
    assert config.parameters[OPTIMIZATION_LEVEL].string_value == "disabled"
    crashes = "SIGFPE at 'all', SIGFPE at 'extended', SIGFPE at 'basic'"
    assert f"ends ONNX Runtime {ort.__version__}'s process ({crashes}); it is optimized at the level 'disabled'" in caplog.text
    assert len(probing.started) == 4, "one process died at each level before the last"


def test_a_model_that_crashes_at_every_level_is_refused_and_remembered(probing: Probing, tmp_path: Path) -> None:
    path = save_crashing_always(tmp_path / "m.onnx")
    for _ in range(2):
        with pytest.raises(ModelLoadError, match=r"at every optimization level \(SIGFPE at 'all', .* at 'disabled'\); export"):
            probing.level(path)
    assert len(probing.started) == 4


def test_a_level_that_the_configuration_names_is_taken_without_a_trial(probing: Probing, tmp_path: Path) -> None:
    path = save_crashing_when_folded(tmp_path / "m.onnx")
    config = ModelConfig()
    config.parameters[OPTIMIZATION_LEVEL].string_value = "disabled"
    runtime = OnnxRuntime(probing.probe)
    assert runtime.load(path, runtime.describe(path), ON_CPU, config).provider == "CPUExecutionProvider"
    assert probing.started == []


def test_sound_models_share_a_process_and_are_tried_once(probing: Probing, tmp_path: Path) -> None:
    runtime = OnnxRuntime(probing.probe)
    for name in ("a", "b", "a"):
        path = save_mlp(tmp_path / f"{name}.onnx") if name == "a" else save_picky(tmp_path / f"{name}.onnx")
        config = ModelConfig()
        runtime.load(path, runtime.describe(path), ON_CPU, config)
        assert OPTIMIZATION_LEVEL not in config.parameters
    assert len(probing.started) == 1
    assert len(list((probing.folder / "crash_verdicts").iterdir())) == 2


def test_a_process_is_light_until_a_model_takes_much_memory(probing: Probing, tmp_path: Path) -> None:
    number, wide = TensorProto.FLOAT, {"wide": np.array([1, 1 << 26])}  # 256 MB
    nodes = [helper.make_node("Expand", ["x", "wide"], ["many"]), helper.make_node("ReduceMax", ["many"], ["y"])]
    large = save_model(tmp_path / "large.onnx", nodes, [("x", number, ["batch", 1])], [("y", number, [1, 1])], wide)
    lights = []
    for path in (save_mlp(tmp_path / "m.onnx"), large, save_picky(tmp_path / "n.onnx")):
        assert probing.level(path) is OptimizationLevel.ALL
        lights.append(probing.started[0].is_light)
    assert lights == [True, False, False]
    assert len(probing.started) == 1


def test_trials_give_way_to_the_server_from_the_start() -> None:
    process = ProbeProcess()
    try:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, process._process.pid) == min(LOWEST, own + NICENESS)
    finally:
        process.close()


def test_a_refusal_is_no_crash(probing: Probing, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no model at all")
    assert probing.level(tmp_path / "m.onnx") is OptimizationLevel.ALL


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import time; time.sleep(600)", "loading and running it once took more than 0.2 s"),
        ("import os; os.kill(os.getpid(), 9)", r"the system ended the trial \(out of memory\?\)"),
        *(
            (
                # A test before may have had this process ignore it, as the server command does.
                f"import signal; signal.signal({int(name)}, signal.SIG_DFL); signal.raise_signal({int(name)})",
                rf"the trial was stopped \({name.name}\)",
            )
            for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        ),
        ("raise SystemExit(3)", "the trial's process ended with code 3"),
    ],
)
def test_a_trial_that_says_nothing_about_the_model_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, program: str, reason: str
) -> None:
    limit_s = 0.2 if "more than" in reason else 60.0
    probing = Probing(tmp_path / "verdicts", command=(sys.executable, "-S", "-c", program), limit_s=limit_s)
    assert probing.level(save_mlp(tmp_path / "m.onnx")) is OptimizationLevel.ALL
    probing.probe.close()
    assert re.search(f"m.onnx: could not be tried out in a process of its own: {reason}", caplog.text)
    assert not probing.folder.exists(), "no verdict"


def test_a_process_that_cannot_be_started_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    probing = Probing(tmp_path, command=(str(tmp_path / "absent"),))
    path, runtime = save_mlp(tmp_path / "m.onnx"), OnnxRuntime(probing.probe)
    assert probing.level(path) is OptimizationLevel.ALL
    caplog.clear()
    assert runtime.load(path, runtime.describe(path), ON_CPU, ModelConfig()).provider == "CPUExecutionProvider"
    assert caplog.text.count(f"{path}: could not be tried out in a process of its own") == len(caplog.records) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"level": "most", "crashes": {}}', '{"level": null}', "\x00"])
def test_a_verdict_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "crash_verdicts").mkdir()
    (tmp_path / "crash_verdicts" / "k.json").write_text(content)
    assert Decisions(tmp_path).find(CrashVerdict, "k") is None


def test_a_folder_that_cannot_be_written_costs_no_more_than_the_trial(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    probing = Probing(tmp_path / "file" / "below")
    assert probing.level(save_mlp(tmp_path / "m.onnx")) is OptimizationLevel.ALL
    probing.probe.close()


def test_a_verdict_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "crash_verdicts" / "k.json").mkdir(parents=True)  # which no file can replace
    Decisions(tmp_path).keep("k", CrashVerdict(OptimizationLevel.ALL, {}))
    assert [path.name for path in (tmp_path / "crash_verdicts").iterdir()] == ["k.json"]


def test_verdicts_lie_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, runtimes = save_mlp(tmp_path / "m.onnx"), probing_runtimes()
    runtimes.load(path, runtimes.describe(path), ON_CPU, ModelConfig())
    assert [file.suffix for file in (tmp_path / "cache" / "halfserve" / "crash_verdicts").iterdir()] == [".json"]


def test_a_user_without_a_home_keeps_no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")  # what expanduser(3) leaves where nobody knows the user
    assert users_folder() is None
    decisions = Decisions(users_folder())
    decisions.keep("k", CrashVerdict(OptimizationLevel.ALL, {}))
    assert decisions.find(CrashVerdict, "k") is None


def test_a_verdict_holds_for_the_same_content_and_circumstances_only(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "m.onnx")
    cpu: Providers = [("CPUExecutionProvider", {})]
    other: Providers = [("CUDAExecutionProvider", {"device_id": "0"})]
    parallel = SessionSettings(parallel=True)
    keys = {
        onnx_trial(path, cpu, SessionSettings()).key,
        onnx_trial(path, other, SessionSettings()).key,
        onnx_trial(path, cpu, parallel).key,
        onnx_trial(save_picky(tmp_path / "n.onnx"), cpu, SessionSettings()).key,
    }
    assert len(keys) == 4
    second_device: Providers = [("CUDAExecutionProvider", {"device_id": "1"})]
    assert onnx_trial(path, second_device, SessionSettings()).key in keys, "a copy on each device is one trial"
    copied = tmp_path / "copy.onnx"
    copied.write_bytes(path.read_bytes())
    assert onnx_trial(copied, cpu, parallel).key in keys
