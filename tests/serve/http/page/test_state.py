"""What the page shows, of many models: others get the event loop while it is put together."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from serve.engine.inference_core import InferenceCore
from serve.http.page.certificates import Certificates
from serve.http.page.history import History
from serve.http.page.state import State
from tests.serve.engine.fakes import HeldBackend, held_model

MODELS = 20


async def read_amid_looks() -> tuple[list[dict[str, Any]], int, list[dict[str, Any]]]:
    """The models of a state during which samples came, how often these did, and the models of the state after it."""
    core = InferenceCore([held_model(HeldBackend(), name=f"m{number:02}") for number in range(MODELS)])
    history = History(core)
    state = State(core, history, Certificates())
    history.look()
    reading = asyncio.create_task(state.read(0))
    looks = 0
    while not reading.done():
        await asyncio.sleep(0)
        history.look()
        looks += 1
    before = json.loads(await reading)
    latest = max(model["samples"][-1][0] for model in before["models"])
    after = json.loads(await state.read(latest))
    await core.drain()
    return before["models"], looks, after["models"]


def test_others_get_the_loop_and_all_models_end_at_the_same_sample() -> None:
    before, looks, after = asyncio.run(read_amid_looks())
    assert looks >= MODELS
    counts = {len(first["samples"]) + len(second["samples"]) for first, second in zip(before, after, strict=True)}
    assert counts == {1 + looks}
    assert [model["name"] for model in before] == [f"m{number:02}" for number in range(MODELS)]
