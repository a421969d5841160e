"""Steps of all text endpoints: from a request to its content and model, from texts to vectors, and the answer's JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halfserve.serve.engine.errors import BackendError, InferenceError, NotFoundError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.http.http_options import HttpLimits
from halfserve.serve.http.infer_route import inference_entry, record_refusal
from halfserve.serve.http.request_body import BodyReader, memory_held
from halfserve.serve.http.routing.error_forms import ErrorForm, InputError
from halfserve.serve.http.routing.operations import JSON_TYPE, OF_INFERENCE, BodyContent, DescribedAnswer, RestOperation, Tag
from halfserve.serve.http.routing.route_table import Handler, serves
from halfserve.serve.http.tasks.row_requests import (
    LEAST_AT_ONCE,
    ROW_TIMES,
    Matrix,
    RowRequests,
    Vector,
    matrix_of,
    time_left_s,
    vector_of,
)
from halfserve.serve.http.tasks.text_bodies import PARSER_TIMES, Content, Text, memory_of_values, read_content, text_field
from halfserve.serve.http.tasks.tokenized_models import TokenizedModel, TokenizedModels, TokenRow, task_of
from halfserve.serve.http.tasks.tokenizing import R, TokenizerWork
from halfserve.serve.protocol.large_bytes import join_unlocked
from halfserve.serve.protocol.rpc import INFERENCE
from halfserve.serve.protocol.service import Service

T = TypeVar("T")
MakeWork = Callable[[TokenizedModel], TokenizerWork[TokenRow]]
# What the routes' descriptions have in common.
OF_TEXTS: Final = OF_INFERENCE | {409}
CHOICE: Final = "The query ?model=NAME names the model where several have the task."


class TextEndpoint:
    """Answers text requests from the models of one service."""

    def __init__(self, service: Service, bodies: BodyReader, limits: HttpLimits, models: TokenizedModels) -> None:
        self.core: InferenceCore = service.core
        self.server_version = service.server_version
        self.models = models
        self._service = service
        self._bodies = bodies
        self._limits = limits

    async def content(self, request: Request) -> Content:
        """Return the JSON object of a request.
        Raises InferenceError: the body is too large, too slow or not such an object, or there is no memory; it is recorded.
        """
        with self.recorded(request):
            body = await self._bodies.read_texts(request)
            size, memory = await self._bodies.understand(body, memory_of_values), memory_held(request)
            if len(body) <= self._limits.inline_bytes:
                memory.grow(size - memory.share.size)
                return read_content(body)
            memory.grow(size)
            content = await self.models.threads.done(request, PARSER_TIMES * len(body), lambda: read_content(body))
        memory.share.resize(size)
        return content

    async def named(self, request: Request, content: Content, tasks: AbstractSet[str]) -> Model:
        """Return the model that the field `model` names, in its latest version; without the field, the only one with these
        tasks. Raises InferenceError: there is none, it is for another task, or there are several; it is recorded.
        """
        with self.recorded(request):
            name = "" if content.get("model") is None else text_field(content, "model")
        return await self._model(request, name, tasks, "name one of them in the field 'model', which is missing")

    async def only(self, request: Request, tasks: AbstractSet[str]) -> Model:
        """Return the only model with one of these tasks, in its latest version, or the one that the query names: ?model=NAME.
        Raises InferenceError: there is none, or there are several; it is recorded.
        """
        name = request.query_params.get("model", "")
        return await self._model(request, name, tasks, f"say which: {request.url.path}?model=NAME")

    def names(self, tasks: AbstractSet[str]) -> list[str]:
        """Return the served models with one of these tasks, by their latest version."""
        latest = {model.name: model for model in self.core.models()}
        return [name for name, model in latest.items() if task_of(model) in tasks]

    async def vectors(self, request: Request, model: Model, make_work: MakeWork) -> tuple[list[Vector], list[int], Model]:
        """Compute a vector for each text; see `_computed`.

        Returns:
            The vectors, float32, with the number of tokens of each row, and the version that answered.
        """
        messages, rows, loaded = await self._computed(request, model, make_work)
        model, size = loaded.model, sum(map(len, messages))
        vectors = await self._apart(request, size, lambda: [vector_of(message, model.name) for message in messages])
        if len({len(vector) for vector in vectors}) > 1:
            raise BackendError(f"model {model.name!r} answers with vectors of different sizes, expected one for each text")
        return vectors, [len(row.ids) for row in rows], model

    async def token_vectors(self, request: Request, model: Model, make_work: MakeWork) -> list[Matrix]:
        """Compute a vector for each token of each text, special ones included; see `_computed`.

        Returns:
            A matrix (tokens, size) of float32 for each text.
        """
        messages, rows, loaded = await self._computed(request, model, make_work)

        def matrices() -> list[Matrix]:
            return [
                loaded.without_padding(matrix_of(message, loaded.model.name), row)
                for message, row in zip(messages, rows, strict=True)
            ]

        return await self._apart(request, sum(map(len, messages)), matrices)

    async def _computed(
        self, request: Request, model: Model, make_work: MakeWork
    ) -> tuple[list[bytes], list[TokenRow], TokenizedModel]:
        """Compute a row for each text.

        Args:
            request: request to answer.
            model: model that computes all rows; if its version is replaced meanwhile, the rows are computed by the new one.
            make_work: says how a version tokenizes the texts.

        Returns:
            The serialized ModelInferResponse of each row, the rows, and the version that answered.

        Raises:
            InferenceError: a text is wrong, or a row was refused or failed.
            ClientDisconnect: the client has gone.
        """
        memory = memory_held(request)
        of_texts = memory.share.size
        for is_last in (False, True):
            try:
                loaded, rows = await self.tokenized(request, model, make_work)
                at_once = max(LEAST_AT_ONCE, 4 * model.max_batch_size)
                entry = inference_entry(self._service, request)
                requests = RowRequests(entry, loaded, rows, at_once, memory, time_left_s(request))
                messages = await requests.gather(request)
                break
            except NotFoundError:
                now = self.core.model(model.name)
                if is_last or now is model:
                    raise
                model = now
                memory.share.resize(of_texts)
        return messages, rows, loaded

    async def of_texts(
        self, request: Request, model: Model, texts: Sequence[Text], param: str, *, truncate: bool
    ) -> tuple[list[Vector], list[int], Model]:
        """`vectors` of texts, or of pairs of texts."""
        return await self.vectors(request, model, lambda loaded: loaded.of_texts(texts, param, truncate=truncate))

    async def tokenized(
        self, request: Request, model: Model, make_work: Callable[[TokenizedModel], TokenizerWork[R]]
    ) -> tuple[TokenizedModel, list[R]]:
        """Return a model's tokenizer, and the tokens of a request's texts. Raises InferenceError: a text is wrong, the model
        takes none, or there is no memory; it is recorded; ClientDisconnect: the client has gone; it is recorded.
        """
        try:
            with self.recorded(request, model.name):
                loaded = await self.models.of(model)
                return loaded, await self.models.threads.tokens(request, make_work(loaded))
        except ClientDisconnect:
            record_refusal(self._service, request, None, model.name)
            raise

    async def answer(self, request: Request, size: int, write: Callable[[], bytes]) -> Response:
        """Return a response of JSON, written on a thread if it is large.

        Args:
            request: request to answer.
            size: bytes of the response, about.
            write: makes the JSON.

        Raises:
            UnavailableError: the memory budget is spent.
        """
        body = await self._apart(request, size, write)
        self._bodies.hold_answer(request, len(body))
        return Response(body, 200, {"cache-control": "no-store", **request.scope.get(ROW_TIMES, {})}, JSON_TYPE)

    async def _apart(self, request: Request, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which is counted and done on a thread if it is about many bytes."""
        if size <= self._limits.inline_bytes:
            return work()
        memory_held(request).grow(2 * size)  # the parts, and the whole that they are joined to
        return await asyncio.to_thread(work)

    @contextmanager
    def recorded(self, request: Request, name: str = "") -> Iterator[None]:
        """Record a request to a model that the block refuses, before any row is queued."""
        try:
            yield
        except InferenceError as error:
            record_refusal(self._service, request, error, name)
            raise

    async def _model(self, request: Request, name: str, tasks: AbstractSet[str], advice: str) -> Model:
        with self.recorded(request, name):
            return await self._for(name, tasks) if name else self._only(request, tasks, advice)

    def _only(self, request: Request, tasks: AbstractSet[str], advice: str) -> Model:
        names = self.names(tasks)
        if len(names) > 1:
            raise InputError(
                f"several models are for {_either(tasks)}: {', '.join(names)}; {advice}",
                param="model",
            )
        if not names:
            text = f"no model for {_either(tasks)} is served here; {request.url.path} needs one"
            raise NotFoundError(f"{text}: {advice}, to load it on demand" if self.core.loads_on_demand else text)
        return self.core.model(names[0])

    async def _for(self, name: str, tasks: AbstractSet[str]) -> Model:
        expected = f"expected one for {_either(tasks)}: {', '.join(self.names(tasks)) or 'none here'}"
        if not self.core.knows(name):
            raise NotFoundError(f"model {name!r} is not served here, {expected}")
        model = await self.core.arrival(name)
        if task_of(model) not in tasks:
            task = f"is for {task_of(model)}" if task_of(model) else "names no task in its configuration (halfserve.task)"
            tensors = f"; /v2/models/{name}/infer takes its tensors"
            raise InputError(f"model {name!r} {task}, {expected}{tensors}", param="model")
        return model


def serves_tei(path: str, name: str, summary: str, body: BodyContent, answer: DescribedAnswer) -> Callable[[Handler], Handler]:
    """Declare a route of text-embeddings-inference that the method below answers."""
    summary = f"{summary}, as text-embeddings-inference's. {CHOICE}"
    operation = RestOperation(name, Tag.TEXT, summary, answer, takes=(body,), errors=OF_TEXTS | {422})
    return serves("POST", path, INFERENCE, operation, form=ErrorForm.TEI)


def json_rows(rows: Iterable[Any], before: bytes = b"", behind: bytes = b"") -> bytes:
    """Return a list as JSON between other bytes; each entry is made and written by itself, as orjson holds the interpreter
    lock.
    """
    pieces = [before, b"["]
    for row in rows:
        pieces += (orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY), b",")
    if len(pieces) > 2:
        pieces.pop()
    return join_unlocked([*pieces, b"]", behind])


def json_with_rows(head: Mapping[str, Any], name: str, rows: Iterable[Any]) -> bytes:
    """Return a non-empty object as JSON, with one more field that is a list."""
    return json_rows(rows, b'%b,"%b":' % (orjson.dumps(head)[:-1], name.encode()), b"}")


def sigmoid(values: Vector) -> Vector:
    """1 / (1 + exp(-x)) of float32, without overflow."""
    wide = values.astype(np.float64)
    result: Vector = (0.5 * (1.0 + np.tanh(0.5 * wide))).astype(np.float32)
    return result


def _either(tasks: AbstractSet[str]) -> str:
    return " or ".join(sorted(tasks))
