"""The CUDA paths through ONNX Runtime's own CUDA provider, over emulated devices: see cuda_emulator/device.c."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.serve.cuda_emulator import (
    conversion_scenes,
    cudnn_scenes,
    fault_scenes,
    memory_scenes,
    placement_scenes,
    scenes,
    trial_scenes,
)
from tests.serve.cuda_emulator.conftest import DEVICES
from tests.serve.cuda_emulator.library import NUMBER_OF_DEVICES, make_device

pytestmark = pytest.mark.long
# Modules whose scenes run in one process, in turn.
GROUPS = ((scenes, memory_scenes, cudnn_scenes, placement_scenes, trial_scenes, fault_scenes), (conversion_scenes,))
SCENES = [
    (at, name) for at, group in enumerate(GROUPS) for module in group for name in vars(module) if name.startswith("test_")
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """What each scene of a group came to, from a process of its own that has the device."""
    folder = tmp_path_factory.mktemp("device")
    make_device(folder)

    @cache
    def ran(group: int) -> str:
        files = [str(module.__file__) for module in GROUPS[group]]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-rA", *files]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), NUMBER_OF_DEVICES: str(DEVICES)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        return done.stdout + done.stderr

    return ran


@pytest.mark.parametrize(("group", "scene"), SCENES, ids=[name for _, name in SCENES])
def test_on_the_emulated_device(outcomes: Callable[[int], str], group: int, scene: str) -> None:
    text = outcomes(group)
    lines = [line for line in text.splitlines() if f"::{scene}" in line]
    assert lines, text
    assert all(line.startswith("PASSED") for line in lines), text


def opened_layers(folder: Path, site: Path) -> dict[str, str]:
    """The provider of each layer of `cudnn_scenes`, or why it is refused, with packages in `site`."""
    program = (
        f"import sys, pathlib; sys.path.append({str(site)!r}); from tests.serve.cuda_emulator import cudnn_scenes; "
        f"cudnn_scenes.report(pathlib.Path({str(folder)!r}))"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=500, check=True
    )
    found: dict[str, str] = json.loads(ran.stdout)
    return found


def test_libraries_are_found_along_the_path_and_cudnn_is_missed_at_load(tmp_path: Path) -> None:
    device, site = tmp_path / "device", tmp_path / "site"
    device.mkdir()
    make_device(device)
    for package, pattern in (("cu13", "libcu[br]*.so.*"), ("cudnn", "libcudnn.so.9")):
        library = site / "nvidia" / package / "lib"
        library.mkdir(parents=True)
        for path in device.glob(pattern):
            shutil.move(path, library)
    assert set(opened_layers(device, site).values()) == {"CUDAExecutionProvider"}
    (site / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9").unlink()
    for layer, reason in opened_layers(device, site).items():
        assert f"and {layer} of this model cannot be computed without it" in reason or layer in {"LSTM", "GRU"}
        assert "libcudnn.so.9: cannot open shared object file" in reason
        assert "the package nvidia-cudnn-cu13 brings it" in reason
        assert "make install EXTRAS=cuda" in reason
