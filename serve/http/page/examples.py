"""What the page offers to try a model with: the sample that export has recorded, and the names of classes."""

from __future__ import annotations

from typing import Any

from halfserve.protos.datatypes import BY_WIRE, Datatype
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.tensors import Array
from halfserve.serve.http.json_tensors import array_to_json
from halfserve.serve.trials.recorded_samples import vouched_samples

MOST_ELEMENTS = 200_000  # a picture of 224 x 224 pixels has 150,528
MOST_LABELS = 10_000  # the page asks the server for the best classes of an output that has more


def examples_of(model: Model) -> dict[str, Any]:
    """Return a model's recorded sample with the answers of float32, or None without one, and the labels by output.

    It reads files, so that it belongs on a thread.
    """
    outputs = model.interface.outputs
    labels = {spec.name: list(found) for spec in outputs if 0 < len(found := model.labels_of(spec.name)) <= MOST_LABELS}
    is_each_alone = own_parameter(model.config, "halfserve.label_scores") == "sigmoid"
    return {"sample": _sample(model), "labels": labels, "scores": "sigmoid" if is_each_alone else "softmax"}


def _sample(model: Model) -> dict[str, Any] | None:
    try:
        recorded = vouched_samples(model)
    except ModelLoadError:  # the certificate was removed after the model was loaded
        return None
    if recorded is None:
        return None
    rows = 1 if model.config.max_batch_size else None
    inputs, outputs = [], []
    for spec in model.interface.inputs:
        array = spec.to_client(recorded.inputs[spec.name])[:rows]
        if spec.mismatch(array.shape) is not None or array.size > MOST_ELEMENTS:
            return None
        inputs.append(_tensor(spec.name, spec.datatype, array.astype(spec.datatype.array_dtype)))
    for spec in model.interface.outputs:
        array = spec.to_client(recorded.answers[spec.name])[:rows]
        if array.size > MOST_ELEMENTS:
            return None
        datatype = spec.datatype if array.dtype.kind in "iub" else BY_WIRE["FP32"]
        outputs.append(_tensor(spec.name, datatype, array.astype(datatype.array_dtype)))
    return {"inputs": inputs, "outputs": outputs}


def _tensor(name: str, datatype: Datatype, array: Array) -> dict[str, Any]:
    return {"name": name, "datatype": datatype.wire, "shape": list(array.shape), "data": array_to_json(array, datatype)}
