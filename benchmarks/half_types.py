"""Accuracy of float16 and bfloat16: common architectures converted to both, simulated and judged.

    python -m benchmarks.half_types [--only PART_OF_NAME] [--openvino] [--json]

The models are those of `tests/export/architectures.py`, small and with random weights of the size that training gives, and two
of full size: BERT with 6 layers of 384, as MiniLM-L6, and ResNet-50. An error is the largest difference from float32, as a
share of the output's largest number (or of its kind of columns), with every node rounded; the worst output counts. The search
for nodes that need float32 is off, and so is every limit, so that all errors are shown. The float16 file is also judged as if
it were computed in bfloat16 (`verify --precisions`). With `--openvino` (`pip install
openvino`; a processor with AVX512-BF16 or AMX), OpenVINO computes the bfloat16 model as it is typed, which shows whether the
simulation is right.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import onnx
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from halfserve.export.certificate.budget import MAX_SCALED_ERROR, Budget, Figures
from halfserve.export.certificate.certificate import BudgetExceeded, PrecisionVerdict
from halfserve.export.errors import ExportError
from halfserve.export.half_types import HALF_TYPES
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.to_onnx.export_onnx import export_onnx
from halfserve.export.verification.metrics import compare
from halfserve.export.verification.verify import verify
from halfserve.serve.engine.backend import CpuPrecision
from tests.export.architectures import ARCHITECTURES, Architecture, images, natural_weights, sentences

Arrays = dict[str, np.ndarray[Any, Any]]
NO_LIMIT = Budget(max_scaled_error=1e30, min_agreement=0.0, max_non_finite=10**9)


class FirstOutput(nn.Module):
    """Wraps a Hugging Face model that takes keywords; returns only its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        result: Tensor = self.model(pixel_values=pixel_values)[0]
        return result


def _minilm() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=1000
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def _resnet50() -> nn.Module:
    return FirstOutput(transformers.ResNetForImageClassification(transformers.ResNetConfig()))


MODELS: dict[str, Architecture] = {
    "MiniLM-L6 (random)": Architecture(make=_minilm, inputs=sentences, length=50),
    "ResNet-50 (random)": Architecture(make=_resnet50, inputs=lambda _: images(224)),
    **ARCHITECTURES,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The largest error and the least cosine of one model in one type, and its error in OpenVINO; or the problem.

    Attributes:
        in_bfloat16: The error of a float16 file that is computed in bfloat16.
    """

    error: float = float("nan")
    cosine: float = float("nan")
    problem: str = ""
    on_hardware: float = float("nan")
    in_bfloat16: float = float("nan")


def main(
    only: Annotated[str, typer.Option(help="Only models whose name holds this.")] = "",
    openvino: Annotated[bool, typer.Option("--openvino", help="Compute the bfloat16 models in OpenVINO too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert every model to both types and show the errors."""
    warnings.simplefilter("ignore")  # warnings of the architectures
    found: dict[str, dict[str, Cost]] = {}
    for name, model in MODELS.items():
        if only in name:
            found[name] = dict(_costs(model, openvino=openvino))
            told = ", ".join(f"{half} {cost.problem or _told(cost)}" for half, cost in found[name].items())
            Console(stderr=True).print(f"{name}: {told}", markup=False, soft_wrap=True)
    if as_json:
        plain = {name: {half: dataclasses.asdict(cost) for half, cost in costs.items()} for name, costs in found.items()}
        print(json.dumps(plain, indent=1))
    else:
        Console().print(_table(found))


def _told(cost: Cost) -> str:
    further = {"OpenVINO": cost.on_hardware, "computed in bfloat16": cost.in_bfloat16}
    told = ", ".join(f"{name} {error:.4f}" for name, error in further.items() if not math.isnan(error))
    return f"{cost.error:.4f} ({told})" if told else f"{cost.error:.4f}"


def exported(architecture: Architecture) -> tuple[onnx.ModelProto, Arrays]:
    """The architecture in float32, with weights of the size that training gives, and its samples.

    Raises:
        ExportError: It cannot be exported.
        ImportError: A package that it needs is missing.
        RuntimeError: torch refuses it.
    """
    torch.manual_seed(0)
    samples = architecture.inputs(architecture.length)
    module = natural_weights(architecture.make().eval(), samples)
    model = export_onnx(module, {name: tensor[:2] for name, tensor in samples.items()})
    return model, {name: tensor.numpy() for name, tensor in samples.items()}


def _costs(architecture: Architecture, *, openvino: bool) -> Iterator[tuple[str, Cost]]:
    try:
        wide, arrays = exported(architecture)
    except (ExportError, ImportError, RuntimeError) as error:
        yield from ((half, Cost(problem=str(error).splitlines()[0])) for half in HALF_TYPES)
        return
    yield from ((half, _cost(wide, half, arrays, openvino=openvino and half == "bfloat16")) for half in HALF_TYPES)


def _cost(wide: onnx.ModelProto, half: Any, arrays: Arrays, *, openvino: bool) -> Cost:
    try:
        narrow = convert_float_to_float16(wide, dtype=half, upgrade_opset=True)
        precisions = dict.fromkeys((half, "bfloat16"))
        certificate = verify(wide, narrow, arrays, budget=NO_LIMIT, adversarial=False, cuda=False, precisions=list(precisions))
    except BudgetExceeded as error:
        certificate = error.certificate
    except ExportError as error:
        return Cost(problem=str(error).splitlines()[0])
    figures = _figures(certificate)
    return Cost(
        error=max(each.max_scaled_error for each in figures),
        cosine=min(each.cosine for each in figures),
        in_bfloat16=max(
            (each.max_scaled_error for other in certificate.precisions.values() for each in _figures(other)),
            default=float("nan"),
        ),
        on_hardware=_error_in_openvino(wide, narrow, arrays) if openvino else float("nan"),
    )


def _figures(verdict: PrecisionVerdict) -> list[Figures]:
    """The figures of every floating output where each node rounds."""
    return [each.figures for each in verdict.outputs if each.execution == "rounded" and each.figures.floating]


def _error_in_openvino(wide: onnx.ModelProto, narrow: onnx.ModelProto, arrays: Arrays) -> float:
    from benchmarks.half_device.openvino_model import OpenVinoModel  # noqa: PLC0415  (an extra)

    expected = OpenVinoModel(wide.SerializeToString(), CpuPrecision.FLOAT32).run(arrays)
    found = OpenVinoModel(narrow.SerializeToString(), CpuPrecision.BFLOAT16).run(arrays)
    pairs = zip(expected, found, strict=True)
    return max(compare(one, other).max_scaled_error for one, other in pairs if one.dtype == np.float32)


def _table(found: dict[str, dict[str, Cost]]) -> Table:
    table = Table(
        "model",
        *(f"{half} error" for half in HALF_TYPES),
        *(f"{half} cosine" for half in HALF_TYPES),
        "in OpenVINO",
        "float16 file in bfloat16",
        "problem",
    )
    for name, costs in found.items():
        errors = [f"{cost.error:.4f}{' !' if cost.error > MAX_SCALED_ERROR[half] else ''}" for half, cost in costs.items()]  # type: ignore[index]
        cosines = [f"{cost.cosine:.6f}" for cost in costs.values()]
        others = (f"{costs['bfloat16'].on_hardware:.4f}", f"{costs['float16'].in_bfloat16:.4f}")
        table.add_row(name, *errors, *cosines, *others, next((cost.problem for cost in costs.values() if cost.problem), ""))
    return table


if __name__ == "__main__":
    typer.run(main)
