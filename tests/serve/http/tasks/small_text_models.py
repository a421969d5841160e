"""A repository of small text models, as `halfserve export` lays them out, whose answers numpy computes too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.models import save_model

Text: TypeAlias = str | tuple[str, str]
UNKNOWN = "[UNK]"
SPECIAL = ["[PAD]", UNKNOWN, "[CLS]", "[SEP]"]
WORDS = [*SPECIAL, *["the", "train", "leaves", "at", "seven", "a", "cat", "sleeps", "on", "warm", "wall"]]
LONGEST = 16  # tokens that the models take
LABELS = ("good", "bad", "neither")
SIZES = {"embedder": 8, "ranker": 1, "classifier": len(LABELS), "sparse": 30}
TASKS = {"embedder": "embeddings", "ranker": "rerank", "classifier": "text-classification", "sparse": "sparse-embeddings"}


def table(name: str) -> NDArray[np.float32]:
    """A row for each word: (words, size); every second weight of a sparse model is 0."""
    rows = np.random.default_rng(len(name)).standard_normal((len(WORDS), SIZES[name])).astype(np.float32)
    if name == "sparse":
        rows[:, ::2] = 0
    return rows


def tokenizer() -> Tokenizer:
    """Words, between [CLS] and [SEP], with [SEP] between the texts of a pair."""
    own = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=UNKNOWN))
    own.normalizer, own.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    own.add_special_tokens(SPECIAL)
    own.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return own


def save_text_model(repository: Path, name: str, settings: str = "", *, output: int = TensorProto.FLOAT) -> Path:
    """A model whose answer is the mean of its words' rows; in the second text of a pair they count twice."""
    shape: list[int | str] = ["batch", "length"]
    nodes = [
        helper.make_node("Add", ["attention_mask", "token_type_ids"], ["weights_i"]),
        helper.make_node("Cast", ["weights_i"], ["weights_f"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["weights_f", "last"], ["weights"]),
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Mul", ["rows", "weights"], ["counted"]),
        helper.make_node("ReduceSum", ["counted", "middle"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["weights", "middle"], ["count"], keepdims=0),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("Cast", ["mean"], ["answer"], to=output),
    ]
    save_model(
        repository / name / "1" / "model.onnx",
        nodes,
        [(input_name, TensorProto.INT64, shape) for input_name in ("input_ids", "attention_mask", "token_type_ids")],
        [("answer", output, ["batch", SIZES[name]])],
        {"table": table(name), "last": np.array([2]), "middle": np.array([1])},
    )
    own = tokenizer()
    own.enable_truncation(LONGEST)
    own.save(str(repository / name / "1" / "tokenizer.json"))
    kind = "TYPE_FP16" if output == TensorProto.FLOAT16 else "TYPE_FP32"
    labels = ' label_filename: "labels.txt"' if name == "classifier" else ""
    (repository / name / "labels.txt").write_text("\n".join(LABELS))
    (repository / name / "config.pbtxt").write_text(
        f'max_batch_size: 8 output {{ name: "answer" data_type: {kind} dims: {SIZES[name]}{labels} }}'
        f'parameters {{ key: "halfserve.task" value {{ string_value: "{TASKS[name]}" }} }} {settings}'
    )
    return repository / name


def setting(key: str, value: str) -> str:
    """A parameter of config.pbtxt."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def expected(name: str, texts: Sequence[Text]) -> NDArray[Any]:
    """The model's answers in float64: (texts, size); long texts are cut."""
    own = tokenizer()
    own.enable_truncation(LONGEST)
    answers = []
    for encoding in own.encode_batch(list(texts)):
        weights = 1.0 + np.array(encoding.type_ids)
        answers.append(weights @ table(name)[encoding.ids].astype(np.float64) / weights.sum())
    return np.array(answers)


def unit(vectors: NDArray[Any]) -> NDArray[Any]:
    """Vectors of length 1."""
    result: NDArray[Any] = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return result


def sigmoid(values: NDArray[Any]) -> NDArray[Any]:
    result: NDArray[Any] = 1 / (1 + np.exp(-values))
    return result
