"""Samples that `export` has recorded beside a certificate, and made-up ones, to compare answers with."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfserve.protos.certificates import RECORDED_INPUT, RECORDED_OUTPUT, SAMPLES
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.disk_files import find_certificate, open_regular
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.tensors import ANY_SIZE, Array, TensorSpec

logger = logging.getLogger(__name__)

VERDICT_KEY = "halfserve.certificate"  # the parameter that shows clients the verdict of a certificate that has been checked
SHAPES_KEY = "halfserve.sample_shapes"  # the parameter that shows clients the row shapes of the samples, as JSON
FREE_SIZES = (16, 1)  # sizes to try in place of the model's open sizes; the first that it can compute is used
RUNS = 5  # most runs of each way to compute a model
BUDGET_S = 2.0  # seconds for the runs of one model; each way is run at least twice
MAX_BYTES = 1 << 24  # most bytes of the file; the converter writes at most a fourth of this


@dataclass(frozen=True)
class RecordedSamples:
    """The samples beside a certificate: inputs and answers by name, in the float32 model's types, batch dimension first."""

    inputs: Mapping[str, Array]
    answers: Mapping[str, Array]


def read_samples(model: Path, certificate: Mapping[str, Any], interface: ModelInterface) -> RecordedSamples | None:
    """Read the samples beside a model file; None if `certificate`, the one that the model names, vouches for none.

    A warning is logged if they cannot be used. They must have all inputs of the interface; answers of further outputs are left
    out.
    """
    arrays = _vouched_arrays(model, certificate)
    if arrays is None:
        return None
    inputs, answers = (
        {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        for prefix in (RECORDED_INPUT, RECORDED_OUTPUT)
    )
    outputs = [spec.name for spec in interface.outputs]
    if inputs.keys() != {spec.name for spec in interface.inputs} or not answers.keys() >= set(outputs):
        logger.warning("%s: has other inputs or outputs than the model, and is not used", model.parent / SAMPLES)
        return None
    return RecordedSamples(inputs, {name: answers[name] for name in outputs})


def _vouched_arrays(model: Path, certificate: Mapping[str, Any]) -> dict[str, Array] | None:
    files = certificate.get("files")
    digest = files.get(SAMPLES) if isinstance(files, Mapping) else None
    if digest is None:
        return None
    path = model.parent / SAMPLES
    try:
        return _arrays(path, digest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, MemoryError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        logger.warning("%s: cannot be used to check what this machine computes: %s", path, error)
        return None


def _arrays(path: Path, digest: str) -> dict[str, Array]:
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("it is not the file that the certificate names")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("its arrays are compressed")  # compressed arrays may be of any size
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def vouched_samples(model: Model) -> RecordedSamples | None:
    """Return the samples beside a version whose certificate has been checked; None if the certificate vouches for none.

    Raises:
        ModelLoadError: the certificate can no longer be read.
    """
    if model.path is None or VERDICT_KEY not in model.config.parameters:
        return None
    found = find_certificate(model.path)
    return None if found is None else read_samples(model.path, found.parsed(), model.interface)


def report_sample_shapes(model: Model) -> None:
    """Write the shapes of the samples' rows into the configuration of a model with rows of any size, for clients to read.

    Raises:
        ModelLoadError: the certificate can no longer be read.
    """
    rows = 1 if model.config.max_batch_size else 0
    specs = {spec.name: spec.shape[rows:] for spec in model.interface.inputs}
    if model.path is None or not any(ANY_SIZE in shape for shape in specs.values()):
        return
    found = find_certificate(model.path)
    arrays = None if found is None else _vouched_arrays(model.path, found.parsed())
    shapes = {
        name: list(arrays[RECORDED_INPUT + name].shape[rows:]) for name in specs if arrays and RECORDED_INPUT + name in arrays
    }
    if shapes:
        model.config.parameters[SHAPES_KEY].string_value = json.dumps(shapes)


def made_up(spec: TensorSpec, rows: int, size: int) -> Array:
    """Make an input up: integers are ones (valid indices, lengths and masks), other numbers are normally distributed."""
    own = spec.shape[1:] if rows else spec.shape
    shape = (*((rows,) if rows else ()), *(size if n == ANY_SIZE else n for n in own))
    if spec.datatype.array_dtype.kind in "iub":
        return np.ones(shape, spec.datatype.array_dtype)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def largest_error(answers: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """Return the largest difference, divided by the output's largest value; infinite if not both are finite."""
    worst = 0.0
    for name, wanted in expected.items():
        given: Array = answers[name]
        if given.shape != wanted.shape:
            return math.inf
        if wanted.dtype.kind in "iub":  # among nearly equal classes, another one may win
            continue
        far, near = given.astype(np.float64), wanted.astype(np.float64)
        if not np.array_equal(np.isfinite(far), np.isfinite(near)):
            return math.inf
        finite = np.isfinite(near)
        scale = float(np.abs(near[finite]).max(initial=0.0))
        worst = max(worst, float(np.abs(far[finite] - near[finite]).max(initial=0.0)) / (scale or 1.0))
    return worst
