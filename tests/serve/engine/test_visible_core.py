"""A core as one sees it who may use some models only."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType

import pytest

from serve.engine.errors import InferenceError, InvalidArgumentError, NotFoundError
from serve.engine.inference_core import InferenceCore
from serve.engine.repository.version_states import State
from serve.engine.visible_core import VisibleCore
from tests.serve.engine.test_inference_core import on_loop, version

OURS, THEIRS = ("ours", "ours_too", "ours_broken", "ours_loadable"), ("theirs", "theirs_broken", "theirs_loadable")
# What a view does as a core without models does it: it finds models by what is handed on, or changes nothing but itself.
AS_WITHOUT_MODELS = {"model", "replace", "notify", "retire", "drain", "on_change", "off_change", "changed"}


class Loads:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        self.asked.append(f"load {name} {config} {sorted(files)}")

    async def unload(self, name: str) -> None:
        self.asked.append(f"unload {name}")

    async def refresh(self) -> None:
        self.asked.append("refresh")


def cores() -> tuple[InferenceCore, VisibleCore, InferenceCore]:
    """A core, what is seen of it, and one that has no more than that."""
    core, without = (
        InferenceCore([version(n, name) for name in names for n in (1, 2)])
        for names in (("ours", "ours_too", "theirs"), ("ours", "ours_too"))
    )
    for each, names in ((core, ("ours", "theirs")), (without, ("ours",))):
        for name in names:
            each.states.set(f"{name}_broken", 1, State.LOADING)
        each.loadable = frozenset(f"{name}_loadable" for name in names)
    return core, VisibleCore(core, lambda name: name.startswith("ours")), without


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
    with pytest.raises(NotFoundError, match="model 'theirs' is not served here; RepositoryIndex lists what is"):
        view.model("theirs")
    with pytest.raises(InvalidArgumentError, match="is not a number"):
        view.model("theirs", "x")
    assert core.model("theirs") is not core.model("theirs", "1")
    assert view.model("ours") is core.model("ours")


@on_loop
async def test_only_visible_models_are_loaded_and_unloaded() -> None:
    core, view, _ = cores()
    core.control = control = Loads()
    await view.load("ours_loadable", "{}", {"1/model.onnx": b""})
    await view.unload("ours")
    await view.refresh()
    for name in ("theirs", "absent"):
        with pytest.raises(NotFoundError, match=f"the repository has no model '{name}'; RepositoryIndex lists what it has"):
            await view.load(name)
        with pytest.raises(NotFoundError, match=f"model '{name}' is not loaded; RepositoryIndex lists what is"):
            await view.unload(name)
    assert control.asked == ["load ours_loadable {} ['1/model.onnx']", "unload ours", "refresh"]


@on_loop
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


def test_what_a_core_learns_to_do_is_thought_of_here() -> None:
    def public(kind: type) -> set[str]:
        found = vars(kind).items()
        return {name for name, value in found if isinstance(value, FunctionType | property) and not name.startswith("_")}

    assert public(InferenceCore) - public(VisibleCore) == AS_WITHOUT_MODELS
