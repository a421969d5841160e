"""A configuration in a load request may be megabytes long: it is read beside the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from serve.control.options import ControlMode
from serve.engine.configuration.config_override import config_from_json
from serve.engine.inference_core import InferenceCore
from tests.models import save_mlp
from tests.serve.control.controlled import control


async def longest_turn_s(folder: Path, config: str) -> float:
    """How much of the processor a turn of the loop takes at most while a model is loaded with a configuration."""
    core = InferenceCore([])
    controlling = control(core, folder, ControlMode.EXPLICIT)
    await controlling.start()
    loading = asyncio.create_task(core.load("mlp", config))
    longest_s, last_s = 0.0, time.thread_time()
    while not loading.done():
        await asyncio.sleep(0)
        longest_s, last_s = max(longest_s, time.thread_time() - last_s), time.thread_time()
    await loading
    await core.drain()
    controlling.close()
    return longest_s


def test_a_large_configuration_does_not_keep_the_loop(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    config = json.dumps({"parameters": {f"key{number}": {"string_value": "value"} for number in range(20_000)}})
    started_s = time.thread_time()
    config_from_json(config, tmp_path)
    taken_s = time.thread_time() - started_s
    assert asyncio.run(longest_turn_s(tmp_path, config)) < taken_s / 2
