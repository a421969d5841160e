"""The core without a transport, and its views restricted to permitted models."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from halfserve.serve.engine.errors import InferenceError, InvalidArgumentError, NotFoundError, UnavailableError, near_name
from halfserve.serve.engine.hidden_steps import without_names
from halfserve.serve.engine.inference_core import Arrived, Cancel, InferenceCore, RestrictedCore
from halfserve.serve.engine.model import Model, VersionState
from halfserve.serve.engine.queueing.compute_slots import ComputeSlots
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.scene import Answers


def version(number: int, name: str = "m") -> Model:
    model = held_model(HeldBackend(), name)
    model.version = number
    return model


def index(core: InferenceCore) -> list[tuple[str, str, str, str]]:
    return [(s.name, s.version, s.state.value, s.reason) for s in core.index()]


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


async def test_readiness_follows_each_version() -> None:
    one, two = version(1), version(2)
    core = InferenceCore([one])
    core.states.set("m", 2, VersionState.LOADING)
    assert core.is_model_ready("m")
    assert not core.is_model_ready("m", "2")
    core.replace("m", [one, two])
    assert core.is_model_ready("m", "2")
    core.states.set("m", 2, VersionState.UNAVAILABLE, "a reload was refused")
    assert core.is_model_ready("m", "2")
    assert index(core)[1] == ("m", "2", "READY", "a reload was refused")
    for instance in two.batcher.instances:
        instance.recovery.is_up = False
    assert not core.is_model_ready("m", "2")
    assert core.is_model_ready("m")
    core.retire()
    assert not core.is_model_ready("m")
    assert index(core)[0] == ("m", "1", "UNLOADING", "the server is shutting down")
    await core.drain()


@pytest.mark.parametrize(
    ("number", "reason", "is_ready"), [(2, "wrong file", False), (2, "unloaded", True), ("", "wrong configuration", True)]
)
def test_strict_readiness_counts_versions_that_were_refused(number: int | str, reason: str, is_ready: bool) -> None:
    core = InferenceCore([version(1)])
    core.states.set("other", number, VersionState.UNAVAILABLE, reason)
    assert core.is_ready_for_clients
    core.needs_all_models = True
    assert (core.is_ready, core.is_ready_for_clients) == (True, is_ready)
    assert RestrictedCore(core, lambda _: True).is_ready_for_clients is is_ready


async def test_a_version_may_have_leading_zeros_and_any_number_of_digits() -> None:
    core = InferenceCore([version(1), version(10)])
    assert core.model("m", "0010").version == 10
    for number in ("0", "2", "9" * 5000):
        with pytest.raises(NotFoundError, match=rf"model 'm' has no version {number[:40]}; served: 1, 10"):
            core.model("m", number)


async def test_the_error_for_an_unserved_model_says_its_state() -> None:
    core = InferenceCore([])
    for name in ("loading", "refused"):
        core.states.set(name, 1, VersionState.LOADING)
    core.states.set("refused", 1, VersionState.UNAVAILABLE, "corrupt")
    core.loadable = frozenset({"new", "refused"})
    for name, error, text in (
        ("loading", UnavailableError, "model 'loading' is being loaded; send the request again in a moment"),
        ("refused", NotFoundError, "model 'refused' is not served now; `halfserve models`"),
        ("new", NotFoundError, "model 'new' is not served now; `halfserve models`"),
        ("nope", NotFoundError, "model 'nope' is not served here; `halfserve models`"),
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


async def test_a_version_must_be_a_number() -> None:
    core = InferenceCore([version(1)])
    for ask in (core.model, core.is_model_ready):
        with pytest.raises(InvalidArgumentError, match="model version '²' is not a number; expected one such as '1'"):
            ask("m", "²")
        with pytest.raises(NotFoundError, match="model 'm' has no version 7; served: 1"):
            ask("m", "7")
    await core.drain()


async def test_without_a_control_nothing_is_loaded_by_request() -> None:
    core = InferenceCore([version(1)])
    await core.refresh()
    for work in (core.load("m"), core.unload("m")):
        with pytest.raises(UnavailableError, match="models are not loaded by request here"):
            await work
    await core.drain()


async def test_refusals_while_draining_are_counted() -> None:
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
async def test_a_weight_that_has_no_effect_is_named(
    slots: ComputeSlots | None, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    core = InferenceCore([])
    core.slots = slots
    core.replace("m", [held_model(HeldBackend(), "m", compute_weight=2.0)])
    await core.drain()
    assert caplog.messages == said


OURS, THEIRS = ("ours", "ours_too", "ours_broken", "ours_loadable"), ("theirs", "theirs_broken", "theirs_loadable")
ROOT = Path(__file__).parents[3]
# What a view does as a core without models does it: it finds models by what is handed on, or changes nothing but itself.
AS_WITHOUT_MODELS = {
    *("model", "replace", "notify", "retire", "finish_sequences", "drain", "clean_up"),
    *("says_ready", "arrival", "leaving", "leaving_models", "on_change", "off_change", "changed"),
}


class Loads:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes], *, caller: str | None = None) -> None:
        assert caller is None
        self.asked.append(f"load {name} {config} {sorted(files)}")

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        assert not dependents
        self.asked.append(f"unload {name}")

    def override(self, name: str) -> str | None:
        return f"config of {name}"

    async def refresh(self) -> None:
        self.asked.append("refresh")


def cores() -> tuple[InferenceCore, RestrictedCore, InferenceCore]:
    """A core, what is seen of it, and one that has no more than that."""
    core, without = (
        InferenceCore([version(n, name) for name in names for n in (1, 2)])
        for names in (("ours", "ours_too", "theirs"), ("ours", "ours_too"))
    )
    for each, names in ((core, ("ours", "theirs")), (without, ("ours",))):
        for name in names:
            each.states.set(f"{name}_broken", 1, VersionState.LOADING)
        each.loadable = frozenset(f"{name}_loadable" for name in names)
    return core, RestrictedCore(core, lambda name: name.startswith("ours")), without


def outcome(core: InferenceCore, question: str, *arguments: str) -> object:
    """What a core answers, told by what it shows of models; or how it refuses."""
    try:
        answer = getattr(core, question)(*arguments)
    except InferenceError as error:
        return type(error), str(error)
    if isinstance(answer, bool):
        return answer
    return [(model.name, model.version) for model in (answer if isinstance(answer, list) else [answer])]


def test_a_view_is_a_core_without_the_other_models() -> None:
    _, view, without = cores()
    assert outcome(view, "models") == outcome(without, "models")
    assert outcome(view, "index") == outcome(without, "index")
    for name in (*OURS, *THEIRS, "absent", ""):
        assert outcome(view, "served", name) == outcome(without, "served", name)
        assert outcome(view, "versions", name) == outcome(without, "versions", name)
        assert outcome(view, "knows", name) == outcome(without, "knows", name)
        for number in ("", "1", "2", "7", "x"):
            assert outcome(view, "model", name, number) == outcome(without, "model", name, number)
            assert outcome(view, "is_model_ready", name, number) == outcome(without, "is_model_ready", name, number)


def test_models_that_are_not_visible_are_told_of_as_absent_ones() -> None:
    core, view, _ = cores()
    with pytest.raises(NotFoundError, match="model 'theirs' is not served here; `halfserve models`"):
        view.model("theirs")
    for name, proposal in (("Our", " (did you mean model 'ours'?)"), ("their", ""), ("our" * 99, "")):
        with pytest.raises(NotFoundError, match=re.escape(f"'{name}' is not served here{proposal}; ")):
            view.model(name)
    with pytest.raises(InvalidArgumentError, match="is not a number"):
        view.model("theirs", "x")
    assert core.model("theirs") is not core.model("theirs", "1")
    assert view.model("ours") is core.model("ours")


def test_a_proposal_never_names_a_model_that_is_not_visible() -> None:
    text = f"the repository has no model 'their'{near_name('their', ['theirs'])}; see its list"
    assert "(did you mean model 'theirs'?)" in without_names(text, lambda _: True)
    assert without_names(text, lambda name: name == "their") == "the repository has no model 'their'; see its list"


async def test_only_visible_models_are_loaded_and_unloaded() -> None:
    core, view, _ = cores()
    core.control = control = Loads()
    await view.load("ours_loadable", "{}", {"1/model.onnx": b""})
    await view.unload("ours")
    await view.refresh()
    assert (view.override("ours"), view.override("theirs")) == ("config of ours", None)
    for name in ("theirs", "absent"):
        with pytest.raises(NotFoundError, match=f"the repository has no model '{name}'; `halfserve models`"):
            await view.load(name)
        with pytest.raises(NotFoundError, match=f"model '{name}' is not loaded; `halfserve models`"):
            await view.unload(name)
    assert control.asked == ["load ours_loadable {} ['1/model.onnx']", "unload ours", "refresh"]


class Brings:
    """Loads models of these names, never at an end."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.asked: list[tuple[str, Arrived]] = []

    def brings(self, name: str) -> bool:
        return name in self._names

    def join(self, name: str, time_left_s: float | None, arrived: Arrived) -> Cancel | None:
        assert time_left_s == 5
        self.asked.append((name, arrived))
        return lambda: None

    def close(self) -> None: ...


async def test_only_visible_models_are_loaded_on_demand() -> None:
    core, view, _ = cores()
    core.on_demand = brings = Brings("ours_loadable", "theirs_loadable")
    came: list[InferenceError | None] = []
    assert view.loads_on_demand
    assert [view.comes_on_demand(name) for name in ("ours", "ours_loadable", "theirs_loadable")] == [False, True, False]
    assert (await view.says_ready("ours_loadable"), view.is_model_ready("ours_loadable")) == (True, True)
    assert view.demand("theirs_loadable", 5, came.append) is None
    assert view.demand("ours_loadable", 5, came.append) is not None
    ((name, arrived),) = brings.asked
    arrived(UnavailableError("it needs model 'theirs_broken'"))
    assert (name, [str(error) for error in came]) == ("ours_loadable", ["it needs a model"])


async def test_changes_are_heard_of_until_the_view_is_closed() -> None:
    core, view, _ = cores()
    told: list[int] = []
    view.on_change(lambda: told.append(len(view.models())))
    changed = view.changed
    core.replace("ours", [])
    assert (told, changed.is_set(), view.changed.is_set()) == ([2], True, False)
    core.retire()
    assert (told, view.is_ready) == ([2, 2], False)
    core.replace("ours", [version(3, "ours")])
    assert told == [2, 2, 3]
    view.close()
    assert told == [2, 2, 3, 0], "a view that is closed shows nothing, and says so"
    assert not view.knows("ours")
    with pytest.raises(NotFoundError, match="model 'ours' is not served here"):
        view.model("ours")
    core.replace("ours_too", [])
    assert told == [2, 2, 3, 0]
    await core.drain()


def test_every_method_of_the_core_is_restricted() -> None:
    # From the source: of a compiled class, properties look like attributes.
    tree = ast.parse((ROOT / "halfserve" / "serve" / "engine" / "inference_core.py").read_text(encoding="utf-8"))

    def public(kind: type) -> set[str]:
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
        functions = (node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        return {name for name in functions if not name.startswith("_")}

    assert public(InferenceCore) - public(RestrictedCore) == AS_WITHOUT_MODELS
