"""A few samples with their float32 answers. They travel with a version, so that a server can check what its device computes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping

import numpy as np

from halfserve.export.onnx_files.model_file import ModelFile
from halfserve.export.verification.samples import Array, Inputs, inputs_of, make_feeds
from halfserve.export.verification.sandbox import Sandbox, at_first_level, on_disk
from halfserve.protos.certificates import RECORDED_INPUT, RECORDED_OUTPUT

ROWS = (4, 1)  # the second where the first are too large
MAX_BYTES = 1 << 22  # size limit of inputs and answers together


def recorded_samples(source: ModelFile, inputs: Inputs) -> bytes:
    """Content of the file `halfserve.protos.certificates.SAMPLES` of a version: inputs and their float32 answers.

    The inputs are some of the samples that verified the converted model. The content is empty where one sample is too large, or
    where inputs or answers are not arrays of numbers.

    Raises:
        ExportError: The float32 model does not open.
    """
    names = [value.name for value in source.outline.graph.output]
    for rows in ROWS:
        feed = make_feeds(inputs_of(source.outline), inputs, rows).batches[0]
        if _bytes(feed.values()) > MAX_BYTES:
            continue
        with Sandbox() as sandbox:
            answers = at_first_level(on_disk(source, sandbox), sandbox, sandbox.stage([feed]), what="the model").batches
        if not answers or isinstance(answers[0], str):
            return b""
        recorded = {RECORDED_INPUT + name: array for name, array in feed.items()}
        for name, answer in zip(names, answers[0], strict=True):
            if not isinstance(answer, np.ndarray):
                return b""
            recorded[RECORDED_OUTPUT + name] = answer
        if any(array.dtype.kind not in "fiub" for array in recorded.values()):
            return b""
        if _bytes(recorded.values()) <= MAX_BYTES:
            return _file(recorded)
    return b""


def _bytes(arrays: Iterable[Array]) -> int:
    return sum(array.nbytes for array in arrays)


def _file(arrays: Mapping[str, Array]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()
