"""Routes of the text endpoints, and of the list of models that they have."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from halfserve.serve.engine.errors import InferenceError, NotFoundError
from halfserve.serve.engine.model import Model
from halfserve.serve.http.guards import GuardedRoute, client_of
from halfserve.serve.http.responses import json_in_pieces, json_response
from halfserve.serve.http.tasks.classification import ClassificationRoutes
from halfserve.serve.http.tasks.described_tokens import TOGETHER, json_pieces
from halfserve.serve.http.tasks.embeddings import EmbeddingRoutes
from halfserve.serve.http.tasks.rerank import RerankRoutes
from halfserve.serve.http.tasks.text_bodies import MAX_INPUTS, flag_field, one_or_more, refuse_fields
from halfserve.serve.http.tasks.text_endpoint import TextEndpoint
from halfserve.serve.http.tasks.tokenized_models import EMBEDDINGS, RERANK, TEXT_TASKS, labels_of, task_of
from halfserve.serve.protocol.rpc import INFERENCE, METADATA

OWNER = "halfserve"


class TextRoutes:
    """The routes of one service."""

    def __init__(self, endpoint: TextEndpoint) -> None:
        self._endpoint = endpoint

    def routes(self) -> list[GuardedRoute]:
        return [
            GuardedRoute("/v1/models", self.models, METADATA),
            GuardedRoute("/v1/models/{model}", self.model, METADATA),
            GuardedRoute("/info", self.info, METADATA),
            GuardedRoute("/tokenize", self.tokenize, INFERENCE, method="POST"),
            *EmbeddingRoutes(self._endpoint).routes(),
            *RerankRoutes(self._endpoint).routes(),
            *ClassificationRoutes(self._endpoint).routes(),
        ]

    async def models(self, _: Request) -> Response:
        """The models that take text."""
        return json_response({"object": "list", "data": [_card(name) for name in self._endpoint.names(TEXT_TASKS)]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["model"]
        if name not in self._endpoint.names(TEXT_TASKS):
            raise NotFoundError(f"no model {name!r} that takes text is served here; /v1/models lists those that do")
        return json_response(_card(name))

    async def info(self, request: Request) -> Response:
        """The only model that takes text, as text-embeddings-inference describes its own."""
        model = self._endpoint.only(request, TEXT_TASKS)
        loaded = await self._endpoint.models.of(model)
        return json_response(
            {
                "model_id": model.name,
                "model_sha": None,
                "model_dtype": model.precision,
                "model_type": _kind(model),
                "max_input_length": loaded.max_tokens,
                "max_client_batch_size": MAX_INPUTS,
                "max_batch_requests": model.max_batch_size or None,
                "auto_truncate": False,
                "version": self._endpoint.server_version,
            }
        )

    async def tokenize(self, request: Request) -> Response:
        """The tokens of each text, with their places in it."""
        endpoint = self._endpoint
        content = await endpoint.content(request)
        model = endpoint.only(request, TEXT_TASKS)
        try:
            refuse_fields(content, {"prompt_name": "write the prompt in front of each text"})
            texts = one_or_more(content.get("inputs"), "inputs")
            with_special = flag_field(content, "add_special_tokens", default=True)
        except InferenceError as error:
            endpoint.refuse(request, model.name, error)
            raise
        _, tokens = await endpoint.tokenized(
            request, model, lambda loaded: loaded.described(texts, "inputs", with_special=with_special)
        )
        written = json_pieces(tokens)
        if sum(len(one.ids) for one in tokens) <= TOGETHER:
            return await endpoint.answer(request, 0, lambda: b"".join(written))
        return json_in_pieces(written, client_of(request.scope))


def _kind(model: Model) -> dict[str, Any]:
    if task_of(model) in EMBEDDINGS:
        return {"embedding": {"pooling": "model"}}
    count = next(iter(model.outputs.values())).shape[-1]
    labels = labels_of(model, count)
    names = {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    return {"reranker" if task_of(model) in RERANK else "classifier": names}


def _card(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER}
