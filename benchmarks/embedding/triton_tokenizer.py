"""Text to tokens, as a Python model of Triton; it imports nothing of ours."""

from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # (Triton brings it)

MOST_TOKENS = 256


class TritonPythonModel:
    """Tokens of texts, int64 (texts, length), padded to the longest text of the batch."""

    def initialize(self, args: dict[str, str]) -> None:
        del args
        self._tokenizer = tokenizers.Tokenizer.from_file(str(Path(__file__).parent / "tokenizer.json"))
        self._tokenizer.enable_truncation(MOST_TOKENS)
        self._tokenizer.enable_padding()

    def execute(self, requests: list[Any]) -> list[Any]:
        given = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy() for request in requests]
        encoded = self._tokenizer.encode_batch([text.decode() for texts in given for text in texts.ravel()])
        fields = {
            "input_ids": np.array([text.ids for text in encoded], np.int64),
            "attention_mask": np.array([text.attention_mask for text in encoded], np.int64),
            "token_type_ids": np.array([text.type_ids for text in encoded], np.int64),
        }
        ends = np.cumsum([texts.size for texts in given])
        parts = {name: np.split(values, ends[:-1]) for name, values in fields.items()}
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(name, part[at]) for name, part in parts.items()])
            for at in range(len(requests))
        ]
