"""Is this fp16 model still the model it was made from? Run both on the same samples and judge the difference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from export.certificate.certificate import Accuracy, BudgetExceeded, Certificate, OutputVerdict
from export.errors import ExportError
from export.model_file import ModelSource, load_model
from export.to_onnx.export_onnx import serialize
from export.verification.budget import Budget, violations
from export.verification.metrics import Array, compare
from export.verification.runners import Runner, onnx_runner, torch_runner
from export.verification.sessions import probe
from export.verification.simulate import round_every_node

if TYPE_CHECKING:
    from export.halving.report import HalfReport

# Folds constants, and fuses nothing across nodes: a fused node would round once where a GPU rounds twice.
ROUNDED_LEVEL = "ORT_ENABLE_BASIC"


def verify(
    reference: nn.Module | ModelSource,
    candidate: ModelSource,
    inputs: Tensor | Array | Sequence[Tensor | Array],
    *,
    budget: Budget | None = None,
    labels: Tensor | Array | None = None,
    batch_size: int = 32,
    name: str = "model",
    reference_bytes: int | None = None,
    conversion: HalfReport | None = None,
) -> Certificate:
    """Compare an fp16 ONNX model with its float32 reference, output by output.

    The candidate runs twice: rounded to float16 after every node, as a GPU computes it (see `simulate`), and as ONNX Runtime's
    CPU provider takes it. Both must be within the budget. It is opened in a child process first, because some fp16 models crash
    the runtime; the certificate says at which optimisation level it opens.

    Args:
        reference: The float32 torch module in evaluation mode, or a float32 ONNX model.
        candidate: The fp16 ONNX model.
        inputs: Samples, one array per model input, in the reference's dtypes; the first dimension counts the samples.
        budget: The limits; `Budget()` by default.
        labels: The true classes, integers, shaped like the first output without its class axis.
        batch_size: How many samples run at once. A model with a fixed batch runs in that size, and a remainder is left out.
        name: The model's name, for the certificate.
        reference_bytes: Size of the float32 model, for the certificate.
        conversion: What `to_half` did, for the certificate.

    Raises:
        BudgetExceeded: With the worst offence and what to do; the certificate is in it.
        ExportError: A model cannot be read, opened or run on the samples, or the two do not answer alike.
    """
    budget = budget or Budget()
    model, content = load_model(candidate)
    opened = probe(content)
    arrays = [_array(tensor) for tensor in ([inputs] if isinstance(inputs, Tensor | np.ndarray) else inputs)]
    batches = _batches(model, arrays, batch_size)
    rounded = round_every_node(model)
    expected = _run(_reference_runner(reference), batches)
    runs = {
        "rounded": _run(onnx_runner(rounded, serialize(rounded), ROUNDED_LEVEL), batches),
        "runtime": _run(onnx_runner(model, content, opened.level), batches),
    }
    samples = sum(len(batch[0]) for batch in batches)
    certificate = Certificate(
        model=name,
        onnx_sha256=hashlib.sha256(content).hexdigest(),
        onnx_bytes=len(content),
        reference_bytes=reference_bytes,
        samples=samples,
        budget=budget,
        outputs=tuple(v for execution, run in runs.items() for v in _verdicts(model, execution, expected, run, budget)),
        accuracy=None if labels is None else _accuracies(expected, runs, _array(labels)[:samples]),
        probe=opened,
        versions=_versions(),
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        conversion=None if conversion is None else conversion.to_json(),
    )
    if not certificate.passed:
        raise BudgetExceeded(_advice(certificate), certificate)
    return certificate


def _reference_runner(reference: nn.Module | ModelSource) -> Runner:
    if isinstance(reference, nn.Module):
        return torch_runner(reference)
    model, content = load_model(reference)
    return onnx_runner(model, content, probe(content).level)


def _batches(model: onnx.ModelProto, arrays: list[Array], batch_size: int) -> list[list[Array]]:
    counts = {len(array) for array in arrays if array.ndim}
    if not arrays or len(counts) != 1 or 0 in counts or any(array.ndim == 0 for array in arrays):
        shapes = ", ".join(str(list(array.shape)) for array in arrays) or "nothing"
        raise ExportError(f"inputs: expected arrays with the same number of samples first, at least 1; got {shapes}")
    count = counts.pop()
    first = model.graph.input[0].type.tensor_type.shape.dim if model.graph.input else ()
    fixed = first[0].dim_value if first else 0
    size = fixed or min(batch_size, count)
    if count < size:
        raise ExportError(f"the model takes batches of exactly {size}, only {count} samples were given")
    last = count - count % size if fixed else count
    return [[array[start : min(start + size, last)] for array in arrays] for start in range(0, last, size)]


def _run(runner: Runner, batches: list[list[Array]]) -> list[Array]:
    results = [runner(batch) for batch in batches]
    return [np.concatenate([np.atleast_1d(part) for part in parts]) for parts in zip(*results, strict=True)]


def _verdicts(
    model: onnx.ModelProto, execution: str, expected: list[Array], actual: list[Array], budget: Budget
) -> list[OutputVerdict]:
    names = [output.name for output in model.graph.output]
    if len(expected) != len(actual):
        raise ExportError(f"the reference has {len(expected)} outputs, the fp16 model {len(actual)}: {', '.join(names)}")
    verdicts = []
    for name, wanted, got in zip(names, expected, actual, strict=True):
        try:
            figures = compare(wanted, got)
        except ValueError as error:
            raise ExportError(f"output {name!r}: {error}; is this the model that was converted?") from error
        broken = tuple(violations(figures, budget))
        verdicts.append(OutputVerdict(name=name, execution=execution, figures=figures, violations=broken))
    return verdicts


def _accuracies(expected: list[Array], runs: dict[str, list[Array]], labels: Array) -> Accuracy:
    return Accuracy(
        reference=_accuracy(expected[0], labels),
        rounded=_accuracy(runs["rounded"][0], labels),
        runtime=_accuracy(runs["runtime"][0], labels),
    )


def _accuracy(output: Array, labels: Array) -> float:
    if output.ndim < 2:
        raise ExportError(f"labels need an output with a class axis; the first output has shape {list(output.shape)}")
    chosen = output.argmax(1 if output.ndim > 3 else -1)
    if chosen.shape != labels.shape:
        raise ExportError(f"labels have shape {list(labels.shape)}, the first output's classes {list(chosen.shape)}")
    return float((chosen == labels).mean())


def _advice(certificate: Certificate) -> str:
    offences = certificate.violations
    more = f" (and {len(offences) - 1} more over budget)" if len(offences) > 1 else ""
    non_finite = any(verdict.figures.non_finite > certificate.budget.max_non_finite for verdict in certificate.outputs)
    layers = "the layers that overflow" if non_finite else "sensitive layers"
    return f"{offences[0]}{more}; keep {layers} in float32 (keep_fp32, --keep-fp32) or allow a larger difference"


def _array(values: Tensor | Array) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _versions() -> dict[str, str]:
    libraries = {"torch": torch.__version__, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
    return {"halfserve": version("halfserve"), **libraries, "numpy": np.__version__}
