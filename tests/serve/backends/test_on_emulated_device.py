"""The CUDA paths through ONNX Runtime's own CUDA provider, over emulated devices: see cuda_emulator/device.c."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.serve.cuda_emulator import cudnn_scenes, device_scenes, fault_scenes, memory_scenes, placement_scenes, scenes
from tests.serve.cuda_emulator.conftest import DEVICES
from tests.serve.cuda_emulator.library import NUMBER_OF_DEVICES, make_device

pytestmark = pytest.mark.long
MODULES = (scenes, memory_scenes, cudnn_scenes, placement_scenes, fault_scenes, device_scenes)
FILES = [str(module.__file__) for module in MODULES]
SCENES = [name for module in MODULES for name in vars(module) if name.startswith("test_")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What each scene came to, from a process of its own that has the devices."""
    folder = tmp_path_factory.mktemp("device")
    make_device(folder)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-rA", *FILES]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), NUMBER_OF_DEVICES: str(DEVICES)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("scene", SCENES)
def test_on_the_emulated_device(outcomes: str, scene: str) -> None:
    lines = [line for line in outcomes.splitlines() if f"::{scene}" in line]
    assert lines, outcomes
    assert all(line.startswith("PASSED") for line in lines), outcomes
