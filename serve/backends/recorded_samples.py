"""The samples that accompany a certificate: a few inputs with the answers that the model gave in float32."""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfserve.protos.certificates import RECORDED_INPUT, RECORDED_OUTPUT, SAMPLES
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.disk_files import open_regular
from halfserve.serve.engine.tensors import Array

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 24  # most bytes of the file; the converter writes at most a fourth of this


@dataclass(frozen=True)
class RecordedSamples:
    """Inputs and answers by name, in the types of the float32 model, batch dimension first if it has one."""

    inputs: Mapping[str, Array]
    answers: Mapping[str, Array]


def read_samples(model: Path, certificate: Mapping[str, Any], interface: ModelInterface) -> RecordedSamples | None:
    """Read the samples beside a model file; None if `certificate`, the one that the model names, vouches for none.

    A warning is logged if they cannot be used. They must have all inputs of the interface; answers of further outputs are left
    out.
    """
    files = certificate.get("files")
    digest = files.get(SAMPLES) if isinstance(files, Mapping) else None
    if digest is None:
        return None
    path = model.parent / SAMPLES
    try:
        arrays = _arrays(path, digest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, MemoryError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        logger.warning("%s: cannot be used to check what this machine computes: %s", path, error)
        return None
    inputs, answers = (
        {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        for prefix in (RECORDED_INPUT, RECORDED_OUTPUT)
    )
    outputs = [spec.name for spec in interface.outputs]
    if inputs.keys() != {spec.name for spec in interface.inputs} or not answers.keys() >= set(outputs):
        logger.warning("%s: has other inputs or outputs than the model, and is not used", path)
        return None
    return RecordedSamples(inputs, {name: answers[name] for name in outputs})


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
