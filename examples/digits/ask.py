"""Ask a served model for every held-out image and count the right answers: the accuracy that users get."""

from __future__ import annotations

import numpy as np

from amp_core.factory import call_factory
from serve.client import InferenceClient

ROWS = 16


def ask_held_out(address: str, model: str, data: str) -> float:
    """Accuracy of the served model on the held-out images, asked over gRPC in requests of a few rows.

    Args:
        address: "host:port" of the server.
        model: the served model's name; one input [batch, 1, 8, 8], one output [batch, 10].
        data: MODULE:FACTORY of the images.
    """
    _, held_out = call_factory(data)
    images = np.stack([np.asarray(image) for image, _ in held_out])
    labels = np.array([int(label) for _, label in held_out])
    with InferenceClient(address) as client:
        (taken,) = client.model_metadata(model).inputs
        answers = [
            next(iter(client.infer(model, {taken.name: images[start : start + ROWS].astype(np.float16)}).values()))
            for start in range(0, len(images), ROWS)
        ]
    return float((np.concatenate(answers).argmax(axis=1) == labels).mean())
