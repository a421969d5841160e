from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from export import export_module, export_onnx, find_dtype_leaks, to_half
from export.errors import ExportError

X = torch.rand(2, 4)
CALLS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "export_module": lambda module, folder: export_module(module, X, folder / "models", "m"),
    "export_onnx": lambda module, folder: export_onnx(module, [X], folder / "m.onnx"),
    "find_dtype_leaks": lambda module, _: find_dtype_leaks(module, X),
    "to_half": lambda module, _: to_half(module),
}


def scripted(kind: str) -> Any:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of TorchScript
        if kind == "traced":
            return torch.jit.trace(module, X)  # type: ignore[no-untyped-call]  # (torch's)
        return torch.jit.script(module)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_a_torchscript_module_is_refused_with_a_way_out(call: str, kind: str, tmp_path: Path) -> None:
    for module, name in ((scripted(kind), "the model"), (nn.Sequential(nn.ReLU(), scripted(kind)).eval(), "the part '1'")):
        expected = rf"^{name} is a TorchScript module, whose Python code is gone; pass the module that .*load_state_dict\("
        with pytest.raises(ExportError, match=expected) as raised:
            CALLS[call](module, tmp_path)
        assert "\n" not in str(raised.value)
        assert not list(tmp_path.iterdir())
