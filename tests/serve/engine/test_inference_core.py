"""What the core tells of models that come and go; the models here are never asked anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serve.engine.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, UnavailableError
from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model
from serve.engine.queueing.compute_slots import ComputeSlots
from serve.engine.repository.version_states import State
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.scene import Answers


def version(number: int, name: str = "m") -> Model:
    model = held_model(HeldBackend(), name)
    model.version = number
    return model


def index(core: InferenceCore) -> list[tuple[str, str, str, str]]:
    return [(s.name, s.version, s.state.value, s.reason) for s in core.index()]


def on_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs on an event loop."""

    def run() -> None:
        asyncio.run(work())

    run.__name__ = work.__name__
    return run


@on_loop
async def test_versions_are_replaced_and_listeners_told() -> None:
    one, two, ten = version(1), version(2), version(10)
    core = InferenceCore([one, version(1, "other")])
    told: list[list[int]] = []
    core.on_change(lambda: told.append([m.version for m in core.models() if m.name == "m"]))
    changed = core.changed
    assert core.replace("m", [one, ten, two]) == []
    assert [m.version for m in core.versions("m")] == [1, 2, 10]
    assert core.model("m") is ten
    assert core.model("m", "2") is two
    await asyncio.gather(*core.replace("m", [ten]))
    await asyncio.sleep(0)
    assert (changed.is_set(), core.changed.is_set()) == (True, False)
    assert told[:2] == [[1, 2, 10], [10]]
    assert index(core) == [
        ("m", "1", "UNAVAILABLE", "unloaded"),
        ("m", "2", "UNAVAILABLE", "unloaded"),
        ("m", "10", "READY", ""),
        ("other", "1", "READY", ""),
    ]
    await core.drain()


@on_loop
async def test_readiness_follows_each_version() -> None:
    one, two = version(1), version(2)
    core = InferenceCore([one])
    core.states.set("m", 2, State.LOADING)
    assert core.is_model_ready("m")
    assert not core.is_model_ready("m", "2")
    core.replace("m", [one, two])
    assert core.is_model_ready("m", "2")
    core.states.set("m", 2, State.UNAVAILABLE, "a reload was refused")
    assert core.is_model_ready("m", "2")
    assert index(core)[1] == ("m", "2", "READY", "a reload was refused")
    for instance in two.batcher.instances:
        instance.is_up = False
    assert not core.is_model_ready("m", "2")
    assert core.is_model_ready("m")
    core.retire()
    assert not core.is_model_ready("m")
    assert index(core)[0] == ("m", "1", "UNLOADING", "the server is shutting down")
    await core.drain()


@on_loop
async def test_a_version_may_have_leading_zeros_and_any_number_of_digits() -> None:
    core = InferenceCore([version(1), version(10)])
    assert core.model("m", "0010").version == 10
    for number in ("0", "2", "9" * 5000):
        with pytest.raises(NotFoundError, match=rf"model 'm' has no version {number[:40]}; served: 1, 10"):
            core.model("m", number)


@on_loop
async def test_a_model_that_is_not_served_says_how_it_stands() -> None:
    core = InferenceCore([])
    for name in ("loading", "refused"):
        core.states.set(name, 1, State.LOADING)
    core.states.set("refused", 1, State.UNAVAILABLE, "corrupt")
    core.loadable = frozenset({"new", "refused"})
    for name, error, text in (
        ("loading", UnavailableError, "model 'loading' is being loaded; send the request again in a moment"),
        ("refused", NotFoundError, "model 'refused' is not served now; RepositoryIndex says why"),
        ("new", NotFoundError, "model 'new' is not served now; RepositoryIndex says why"),
        ("nope", NotFoundError, "model 'nope' is not served here; RepositoryIndex lists what is"),
    ):
        with pytest.raises(error, match=text):
            core.model(name)
        assert core.knows(name) == (name != "nope")
    assert not any(core.is_model_ready(name) for name in ("loading", "refused", "new"))
    with pytest.raises(NotFoundError, match="'nope' is not served here"):
        core.is_model_ready("nope")
    assert [line[:3] for line in index(core)] == [
        ("loading", "1", "LOADING"),
        ("new", "", "UNAVAILABLE"),
        ("refused", "1", "UNAVAILABLE"),
    ]


@on_loop
async def test_a_version_must_be_a_number() -> None:
    core = InferenceCore([version(1)])
    for ask in (core.model, core.is_model_ready):
        with pytest.raises(InvalidArgumentError, match="model version '²' is not a number; expected one such as '1'"):
            ask("m", "²")
        with pytest.raises(NotFoundError, match="model 'm' has no version 7; served: 1"):
            ask("m", "7")
    await core.drain()


@on_loop
async def test_without_a_control_nothing_is_loaded_by_request() -> None:
    core = InferenceCore([version(1)])
    await core.refresh()
    for work in (core.load("m"), core.unload("m")):
        with pytest.raises(FailedPreconditionError, match="models are not loaded by request here"):
            await work
    await core.drain()


@on_loop
async def test_what_a_draining_server_refuses_is_counted() -> None:
    model, answers = version(1), Answers()
    core = InferenceCore([model])
    await core.drain()
    with pytest.raises(UnavailableError, match="the server is shutting down"):
        core.submit(model, answers.request(1))
    assert core.figures.refused == {"unavailable": 1}
    assert model.statistics.totals.fail.count == 0


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        (None, ["m/1: halfserve.compute_weight has no effect, as the server has no --compute-slots"]),
        (ComputeSlots(1), ["m/1: halfserve.compute_weight has no effect, as it does not compute on the CPU"]),
    ],
    ids=["no slots", "not for these"],
)
def test_a_weight_that_has_no_effect_is_named(
    slots: ComputeSlots | None, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def replace() -> None:
        core = InferenceCore([])
        core.slots = slots
        core.replace("m", [held_model(HeldBackend(), "m", compute_weight=2.0)])
        await core.drain()

    asyncio.run(replace())
    assert caplog.messages == said
