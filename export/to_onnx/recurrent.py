"""LSTM and GRU layers as one operation in the captured graph, so that the length of the sequence may vary.

To find out the shapes of a recurrent layer's results, `torch.export` runs it step by step, which fixes the number of steps. The
two operations here compute the same and know the shapes of their results; ONNX has operators for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops.core import aten_gru, aten_lstm
from torch import Tensor
from torch.overrides import TorchFunctionMode

from export.errors import ExportError

_REST = "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"

_library: Any = torch.library.Library("halfserve", "DEF")  # type: ignore[no-untyped-call]  # (torch annotates it nowhere)
_library.define(f"lstm(Tensor input, Tensor[] hx, {_REST}) -> (Tensor, Tensor, Tensor)")
_library.define(f"gru(Tensor input, Tensor hx, {_REST}) -> (Tensor, Tensor)")


class WholeRecurrentLayers(TorchFunctionMode):
    """Inside, torch's LSTM and GRU layers are recorded as `halfserve::lstm` and `halfserve::gru`.

    Raises:
        ExportError: A layer does what ONNX's operator does not: a packed sequence, a projection.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Put our operation in the place of torch's."""
        del types
        if func is torch._pack_padded_sequence:  # noqa: SLF001  (what the public function calls)
            raise ExportError("packed sequences have no form in ONNX; give the layer the padded sequence")
        if func is torch.lstm:
            hidden, cell = args[1]
            if hidden.shape[-1] != cell.shape[-1]:
                raise ExportError("an LSTM with proj_size has no form in ONNX; use LSTMCell or a Linear after the layer")
            return torch.ops.halfserve.lstm(args[0], [hidden, cell], list(args[2]), *args[3:])
        if func is torch.gru:
            return torch.ops.halfserve.gru(args[0], args[1], list(args[2]), *args[3:])
        return func(*args, **(kwargs or {}))


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """How the two operations are said in ONNX, for `torch.onnx.export`."""
    return {torch.ops.halfserve.lstm.default: aten_lstm, torch.ops.halfserve.gru.default: aten_gru}


@torch.library.impl(_library, "lstm", "CompositeExplicitAutograd")
def _lstm(sequence: Tensor, hx: list[Tensor], params: list[Tensor], *rest: Any) -> Any:
    return torch.lstm(sequence, hx, params, *rest)


@torch.library.impl(_library, "gru", "CompositeExplicitAutograd")
def _gru(sequence: Tensor, hx: Tensor, params: list[Tensor], *rest: Any) -> Any:
    return torch.gru(sequence, hx, params, *rest)


def _lstm_shapes(sequence: Tensor, hx: list[Tensor], params: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    del params
    hidden, cell = hx
    return _steps(sequence, hidden, bidirectional=rest[4]), torch.empty_like(hidden), torch.empty_like(cell)


def _gru_shapes(sequence: Tensor, hx: Tensor, params: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    del params
    return _steps(sequence, hx, bidirectional=rest[4]), torch.empty_like(hx)


def _steps(sequence: Tensor, hidden: Tensor, *, bidirectional: bool) -> Tensor:
    """One result per step: (batch, length, directions * hidden), or the first two the other way round, as the input."""
    return sequence.new_empty((*sequence.shape[:2], hidden.shape[-1] * (2 if bidirectional else 1)))


torch.library.register_fake("halfserve::lstm", _lstm_shapes, lib=_library)
torch.library.register_fake("halfserve::gru", _gru_shapes, lib=_library)
