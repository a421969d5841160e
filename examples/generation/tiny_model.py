"""A language model of 40 KB in OpenVINO's format, whose answer is known: it counts on from the last number of its prompt.

It is a transformer with attention and a cache of keys and values, as openvino-genai's continuous batching expects it: inputs
input_ids, attention_mask, position_ids [batch, tokens] int64 and beam_idx [batch] int32; output logits [batch, tokens, words];
the cache in variables. The attention computes, but its output has the weight 0, so that the next word follows from the last
word alone. After the last number comes the end of the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo
from openvino_tokenizers import convert_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LAYERS, HEADS, HEAD_SIZE = 2, 2, 16
HIDDEN = HEADS * HEAD_SIZE
UNKNOWN, PADDING, END = SPECIAL = ["<unk>", "<pad>", "<eos>"]
BLOCKED = np.float32(-1e9)


def save_tiny_model(folder: Path, *, numbers: int = 100, endless: bool = False, width: int = 1) -> None:
    """Write model, tokenizer and configurations into an existing folder.

    The words are 0 to `numbers` - 1, each of `width` characters at least, with zeros in front. In an endless model, 0 follows
    the last number, and not the end of the text.
    """
    words = [*SPECIAL, *(f"{number:0{width}}" for number in range(numbers))]
    successors = np.arange(1, len(words) + 1)
    end = words.index(END)
    successors[-1] = len(SPECIAL) if endless else end
    ov.save_model(_model(successors), folder / "openvino_model.xml", compress_to_fp16=False)
    converted: Any = convert_tokenizer(_tokenizer(words), with_detokenizer=True)
    tokenizer, detokenizer = converted
    ov.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    ov.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(words), "eos_token_id": end}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))


def _tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    names = {"unk_token": UNKNOWN, "pad_token": PADDING, "eos_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)  # type: ignore[no-untyped-call]


def _model(successors: Any) -> Any:
    """`successors`: the number of the word that follows each word."""
    names = ("input_ids", "attention_mask", "position_ids")
    ids, mask, positions = parameters = [_parameter(name, [-1, -1], np.int64) for name in names]
    beams = _parameter("beam_idx", [-1], np.int32)
    generator, caches = np.random.default_rng(0), []

    def weights(scale: float = 1.0) -> Any:
        return ops.constant(np.float32(scale) * generator.standard_normal((HIDDEN, HIDDEN)).astype(np.float32))

    def heads(x: Any) -> Any:  # [batch, tokens, hidden] -> [batch, heads, tokens, size]
        projected = ops.matmul(x, weights(), False, False)
        return ops.transpose(ops.reshape(projected, _sizes(0, 0, HEADS, HEAD_SIZE), True), _sizes(0, 2, 1, 3))

    def cached(name: str, x: Any) -> Any:
        batch = ops.gather(ops.shape_of(ids, "i64"), _sizes(0), _size(0))
        empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, _sizes(HEADS, 0, HEAD_SIZE)], 0))
        variable = _variable(name, [-1, HEADS, -1, HEAD_SIZE])
        past = ops.gather(ops.read_value(empty, variable), beams, _size(0))
        whole = ops.concat([past, x], 2)
        caches.append(ops.assign(whole, variable))
        return whole

    total = ops.gather(ops.shape_of(mask, "i64"), _size(1), _size(0))
    places = ops.unsqueeze(ops.range(_size(0), total, _size(1), "i64"), _sizes(0, 1))
    seen = ops.less_equal(places, ops.unsqueeze(positions, _sizes(2)))
    bias = ops.unsqueeze(ops.select(seen, ops.constant(np.float32(0)), ops.constant(BLOCKED)), _sizes(1))
    embedding = generator.standard_normal((len(successors), HIDDEN)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    hidden = ops.gather(ops.constant(embedding), ids, _size(0))
    for layer in range(LAYERS):
        keys = cached(f"past_key_values.{layer}.keypresent.{layer}.key", heads(hidden))
        values = cached(f"past_key_values.{layer}.valuepresent.{layer}.value", heads(hidden))
        attention = ops.transpose(ops.scaled_dot_product_attention(heads(hidden), keys, values, bias), _sizes(0, 2, 1, 3))
        joined = ops.reshape(attention, _sizes(0, 0, HIDDEN), True)
        hidden = ops.add(hidden, ops.matmul(joined, weights(0.0), False, False))
    follows = np.zeros((HIDDEN, len(successors)), np.float32)
    follows[:, successors] = embedding.T
    logits = ops.matmul(hidden, ops.constant(follows), False, False)
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], caches, [*parameters, beams])  # pyright: ignore[reportGeneralTypeIssues]  (its stubs)


def _parameter(name: str, shape: list[int], dtype: type) -> Any:
    parameter = ops.parameter(ov.PartialShape(shape), ov.Type(dtype), name=name)
    parameter.output(0).set_names({name})
    return parameter


def _variable(name: str, shape: list[int]) -> Variable:
    info = VariableInfo()
    info.variable_id, info.data_shape, info.data_type = name, ov.PartialShape(shape), ov.Type.f32
    return Variable(info)


def _size(value: int) -> Any:
    return ops.constant(np.int64(value))


def _sizes(*values: int) -> Any:
    return ops.constant(np.array(values, np.int64))
