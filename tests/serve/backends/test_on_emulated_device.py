"""The CUDA paths through ONNX Runtime's own CUDA provider, over an emulated device: see cuda_emulator/runtime.c."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

from tests.serve.cuda_emulator import conversion_scenes, cudnn_scenes, memory_scenes, placement_scenes, scenes
from tests.serve.cuda_emulator.library import make_device

pytestmark = pytest.mark.long
# Modules whose scenes run in one process, in turn.
GROUPS = ((scenes, memory_scenes, cudnn_scenes, placement_scenes), (conversion_scenes,))
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
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        return done.stdout + done.stderr

    return ran


@pytest.mark.parametrize(("group", "scene"), SCENES, ids=[name for _, name in SCENES])
def test_on_the_emulated_device(outcomes: Callable[[int], str], group: int, scene: str) -> None:
    text = outcomes(group)
    lines = [line for line in text.splitlines() if f"::{scene}" in line]
    assert lines, text
    assert all(line.startswith("PASSED") for line in lines), text
