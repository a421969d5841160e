"""A small model of pictures, as `halfserve export` lays it out, whose logits are the mean colours of what it gets."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from PIL import Image

from halfserve.protos.pictures import PREPROCESSING, PicturePreparation
from tests.models import save_model

COLOURS = ("red", "green", "blue")
PREPARATION = PicturePreparation(height=8, width=8, resize=10, resample="bilinear")
PHOTO = Image.fromarray(np.kron(np.array([[[200, 40, 20], [90, 120, 60]]]), np.ones((40, 30, 1))).astype(np.uint8))


def save_picture_model(repository: Path, name: str = "net", task: str = "image-classification", settings: str = "") -> Path:
    """Logits are mean colours over 32, in float32."""
    folder = repository / name
    save_model(
        folder / "1" / "model.onnx",
        [
            helper.make_node("Cast", ["image"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["wide", "places"], ["mean"], keepdims=0),
            helper.make_node("Mul", ["mean", "factor"], ["logits"]),
        ],
        [("image", TensorProto.UINT8, ["batch", PREPARATION.height, PREPARATION.width, 3])],
        [("logits", TensorProto.FLOAT, ["batch", 3])],
        {"places": np.array([1, 2]), "factor": np.array(1 / 32, np.float32)},
    )
    (folder / "1" / PREPROCESSING).write_bytes(PREPARATION.to_bytes())
    (folder / "labels.txt").write_text("".join(f"{colour}\n" for colour in COLOURS))
    (folder / "config.pbtxt").write_text(
        f"""max_batch_size: 8
output [{{ name: "logits" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" }}]
parameters {{ key: "halfserve.task" value {{ string_value: "{task}" }} }}
{settings}"""
    )
    return folder


def encoded(form: str, picture: Image.Image = PHOTO, **options: Any) -> bytes:
    """The content of a picture file."""
    file = BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()
