"""Hides the steps of an ensemble from a caller who may use the ensemble, but not every model of its steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.errors import InferenceError, reworded
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors

# A model's name in texts, alone or as the proposal of `near_name`.
NAMED = re.compile(r"(?P<proposal> \(did you mean )?model '(?P<name>[^']+)'(?(proposal)\?\))")
STEPS = "halfserve.steps"
MaySee = Callable[[str], bool]


def hides_steps(model: Model, may_see: MaySee) -> bool:
    """Return whether one of the models of which a model consists, at any depth, must stay hidden."""
    return model.composition is not None and not all(map(may_see, model.composition.models))


def without_steps(config: ModelConfig) -> ModelConfig:
    """Return an ensemble's configuration without its steps: clients such as perf_analyzer ask about every step."""
    shown = ModelConfig()
    shown.CopyFrom(config)
    shown.ClearField("ensemble_scheduling")
    shown.parameters.pop(STEPS, None)
    return shown


def without_names(text: str, may_see: MaySee) -> str:
    """Return a text without the names of models that must stay hidden."""
    return NAMED.sub(lambda found: found[0] if may_see(found["name"]) else "" if found["proposal"] else "a model", text)


@contextmanager
def names_hidden(may_see: MaySee) -> Iterator[None]:
    """Remove these names from errors raised in this context."""
    try:
        yield
    except InferenceError as error:
        raise without_names_in(error, may_see) from None


def hide_names(request: InferRequest, may_see: MaySee) -> None:
    """Remove these names from a request's error."""
    done = request.done

    def answer(result: Tensors | InferenceError) -> None:
        done(without_names_in(result, may_see) if isinstance(result, InferenceError) else result)

    request.done = answer


def without_names_in(error: InferenceError, may_see: MaySee) -> InferenceError:
    """Return an error without these names."""
    found = reworded(error, without_names(str(error), may_see))
    model = error.facts.get("model")
    if model is not None and not may_see(str(model)):
        found.phrase = None
    return found
