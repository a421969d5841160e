"""Settings that make no sense are refused where they are given, alike by both of Lightning's plugins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_core import GradScaler
from amp_core.integrations.lightning import FabricPrecision, TrainerPrecision
from tests.amp_core.integrations.quiet import LIGHTNING

pytestmark = LIGHTNING


@pytest.mark.parametrize("plugin", [TrainerPrecision, FabricPrecision])
@pytest.mark.parametrize(
    ("precision", "settings", "error", "text"),
    [
        ("fp16", {}, ValueError, "precision must be '16-mixed' or 'bf16-mixed', got 'fp16'"),
        ("bf16-mixed", {"scaler": GradScaler("cpu")}, ValueError, "'bf16-mixed' needs no scaler: bfloat16 has float32's range"),
        (
            "16-mixed",
            {"scaler": torch.amp.GradScaler("cpu")},
            TypeError,
            "must be an amp_core.GradScaler, got a torch.amp.grad_scaler",
        ),
        ("16-mixed", {"policy": "cudo"}, ValueError, "unknown policy 'cudo' .did you mean 'cuda'"),
        ("16-mixed", {"policy": 3}, ValueError, "policy must be a Policy or its string form, .* got 3"),
        ("16-mixed", {"device": "cuda:0"}, ValueError, "device_type must be the name of a kind of device"),
    ],
)
def test_wrong_settings_are_refused(plugin: Any, precision: str, settings: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        plugin(precision, **settings)
