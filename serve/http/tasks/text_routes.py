"""Routes of the text endpoints, and of the list of models that they have."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from halfserve.serve.engine.errors import NotFoundError
from halfserve.serve.engine.model import Model
from halfserve.serve.http.guards import client_of
from halfserve.serve.http.responses import json_in_pieces, json_response
from halfserve.serve.http.routing.error_forms import ErrorForm
from halfserve.serve.http.routing.operations import BodyContent, Component, Count, DescribedAnswer, RestOperation, Tag
from halfserve.serve.http.routing.route_table import serves
from halfserve.serve.http.tasks.described_tokens import TOGETHER, json_pieces
from halfserve.serve.http.tasks.text_bodies import MAX_INPUTS, flag_field, one_or_more, refuse_fields
from halfserve.serve.http.tasks.text_endpoint import CHOICE, TextEndpoint, serves_tei
from halfserve.serve.http.tasks.tokenized_models import (
    EMBEDDINGS,
    RERANK,
    SPARSE_EMBEDDINGS,
    TEXT_TASKS,
    TOKEN_VECTORS,
    labels_of,
    task_of,
)
from halfserve.serve.protocol.rpc import METADATA

OWNER = "halfserve"
POOLINGS = (
    dict.fromkeys(EMBEDDINGS, "model") | dict.fromkeys(SPARSE_EMBEDDINGS, "splade") | dict.fromkeys(TOKEN_VECTORS, "none")
)


class ModelCardJson(TypedDict):
    id: str
    object: str
    created: Count
    owned_by: str


class ModelCardsJson(TypedDict):
    object: str
    data: list[ModelCardJson]


class TeiInfoJson(TypedDict):
    model_id: str
    model_sha: NotRequired[str | None]
    model_dtype: str
    model_type: dict[str, Any]
    max_input_length: Count
    max_client_batch_size: Count
    max_batch_requests: NotRequired[int | None]
    auto_truncate: NotRequired[bool]
    version: str


class TeiTokenizeBody(TypedDict):
    inputs: Annotated[str | list[str | int | list[Any]], "A text or texts; at most 2048, of at most 65536 tokens together."]
    add_special_tokens: NotRequired[bool | None]


class TokenJson(TypedDict):
    id: Count
    text: str
    special: bool
    start: int | None
    stop: int | None


TeiTokens = Annotated[list[list[TokenJson]], Component("TeiTokens")]


class TextRoutes:
    """The routes about the models that take text, and of their tokens."""

    def __init__(self, endpoint: TextEndpoint) -> None:
        self._endpoint = endpoint

    @serves(
        "GET",
        "/v1/models",
        METADATA,
        RestOperation(
            "listModels",
            Tag.TEXT,
            "The models that take text, as OpenAI lists its own",
            DescribedAnswer("The models.", BodyContent(ModelCardsJson)),
        ),
        form=ErrorForm.OPENAI,
    )
    async def models(self, _: Request) -> Response:
        """Return the models that take text."""
        return json_response({"object": "list", "data": [_card(name) for name in self._endpoint.names(TEXT_TASKS)]})

    @serves(
        "GET",
        "/v1/models/{model}",
        METADATA,
        RestOperation(
            "retrieveModel",
            Tag.TEXT,
            "One model that takes text",
            DescribedAnswer("The model.", BodyContent(ModelCardJson)),
            errors={404},
        ),
        form=ErrorForm.OPENAI,
    )
    async def model(self, request: Request) -> Response:
        """Return one of them."""
        name = request.path_params["model"]
        if name not in self._endpoint.names(TEXT_TASKS):
            raise NotFoundError(f"no model {name!r} that takes text is served here; /v1/models lists those that do")
        return json_response(_card(name))

    @serves(
        "GET",
        "/info",
        METADATA,
        RestOperation(
            "info",
            Tag.TEXT,
            f"The model that takes text, as text-embeddings-inference describes its own. {CHOICE}",
            DescribedAnswer("The model.", BodyContent(TeiInfoJson)),
            errors={404, 409, 422, 501},
        ),
        form=ErrorForm.TEI,
    )
    async def info(self, request: Request) -> Response:
        """Return the only model that takes text, as text-embeddings-inference describes its own."""
        model = await self._endpoint.only(request, TEXT_TASKS)
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

    @serves_tei(
        "/tokenize",
        "tokenize",
        "The tokens of texts",
        BodyContent(TeiTokenizeBody, {"inputs": ["the train leaves at seven"]}),
        DescribedAnswer("The tokens of each text.", BodyContent(TeiTokens)),
    )
    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of each text, with their places in it."""
        endpoint = self._endpoint
        content = await endpoint.content(request)
        model = await endpoint.only(request, TEXT_TASKS)
        with endpoint.recorded(request, model.name):
            refuse_fields(content, {"prompt_name": "write the prompt in front of each text"})
            texts = one_or_more(content.get("inputs"), "inputs")
            with_special = flag_field(content, "add_special_tokens", default=True)
        _, tokens = await endpoint.tokenized(
            request, model, lambda loaded: loaded.described(texts, "inputs", with_special=with_special)
        )
        written = json_pieces(tokens)
        if sum(len(one.ids) for one in tokens) <= TOGETHER:
            return await endpoint.answer(request, 0, lambda: b"".join(written))
        return json_in_pieces(written, client_of(request.scope))


def _kind(model: Model) -> dict[str, Any]:
    if task_of(model) in POOLINGS:
        return {"embedding": {"pooling": POOLINGS[task_of(model)]}}
    count = next(iter(model.outputs.values())).shape[-1]
    labels = labels_of(model, count)
    names = {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    return {"reranker" if task_of(model) in RERANK else "classifier": names}


def _card(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER}
