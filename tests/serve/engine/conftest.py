from __future__ import annotations

import pytest

from halfserve.serve.engine.inference_core import InferenceCore
from tests.serve.engine.fragile_copies import Copies
from tests.serve.engine.scene import Answers


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def core() -> InferenceCore:
    return InferenceCore([])
