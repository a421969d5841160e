"""An ensemble for a caller that may use it, but not every model of its steps: the names of these stay secret."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.errors import InferenceError, reworded
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors

NAMED = re.compile(r"model '([^']+)'")  # how texts name a model
STEPS = "halfserve.steps"
MaySee = Callable[[str], bool]


def hides_steps(model: Model, may_see: MaySee) -> bool:
    """Whether one of the models that a model is made of, at any depth, may not be seen."""
    return model.composition is not None and not all(map(may_see, model.composition.models))


def without_steps(config: ModelConfig) -> ModelConfig:
    """An ensemble's configuration as that of a model of unknown make: clients such as perf_analyzer ask about every step."""
    shown = ModelConfig()
    shown.CopyFrom(config)
    shown.ClearField("ensemble_scheduling")
    shown.parameters.pop(STEPS, None)
    return shown


def without_names(text: str, may_see: MaySee) -> str:
    """A text without the names of models that may not be seen."""
    return NAMED.sub(lambda found: found[0] if may_see(found[1]) else "a model", text)


@contextmanager
def names_hidden(may_see: MaySee) -> Iterator[None]:
    """Raise errors without these names."""
    try:
        yield
    except InferenceError as error:
        raise _told(error, may_see) from None


def hide_names(request: InferRequest, may_see: MaySee) -> None:
    """Give a request its error without these names."""
    done = request.done

    def told(result: Tensors | InferenceError) -> None:
        done(_told(result, may_see) if isinstance(result, InferenceError) else result)

    request.done = told


def _told(error: InferenceError, may_see: MaySee) -> InferenceError:
    return reworded(error, without_names(str(error), may_see))
