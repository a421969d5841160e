"""The compared model on LitServe and transformers: batched, padded to the longest text of the batch.

    python litserve_server.py FOLDER PORT float32|bfloat16

Runs in an environment of its own with litserve, torch and transformers, and imports nothing of ours.
"""

import sys
from typing import Any

import litserve  # pyright: ignore[reportMissingImports]  (in an environment of its own)
import torch
import transformers
from starlette.requests import Request  # LitServe looks at the annotation itself, so that it must not be a text

MAX_BATCH_SIZE = 32
BATCH_TIMEOUT_S = 0.002  # time for requests to share a batch; batches fill by themselves while one is computed
MOST_TOKENS = 256


class Embedder(litserve.LitAPI):  # type: ignore[misc]  # (litserve is not in the project's environment)
    """Mean of the tokens' vectors, of length 1."""

    def __init__(self, folder: str, dtype: str) -> None:
        super().__init__(max_batch_size=MAX_BATCH_SIZE, batch_timeout=BATCH_TIMEOUT_S)
        self._folder, self._dtype = folder, getattr(torch, dtype)

    def setup(self, device: str) -> None:
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self._folder)
        self._network: Any = transformers.AutoModel.from_pretrained(self._folder, dtype=self._dtype).eval().to(device)

    def decode_request(self, request: Request, **_: Any) -> str:
        return str(request["input"])  # LitServe hands over the JSON

    def batch(self, inputs: list[str]) -> list[str]:
        return inputs

    @torch.inference_mode()
    def predict(self, x: list[str], **_: Any) -> Any:
        tokens = self._tokenizer(x, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
        vectors = self._network(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((vectors * mask).sum(1) / mask.sum(1), dim=-1)

    def unbatch(self, output: Any) -> Any:
        return output.tolist()

    def encode_response(self, output: Any, **_: Any) -> dict[str, Any]:
        return {"embedding": output}


if __name__ == "__main__":
    server = litserve.LitServer(Embedder(sys.argv[1], sys.argv[3]), accelerator="cpu", devices=1, timeout=60)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="error")
