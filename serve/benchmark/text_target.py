"""A REST endpoint for texts under test, such as /embed, with the requests and the processes that load it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

import numpy as np

from halfserve.serve.benchmark import BenchmarkArgumentError, BenchmarkError
from halfserve.serve.benchmark.level import ServerTotals
from halfserve.serve.benchmark.load.load_generator import LoadGenerator
from halfserve.serve.benchmark.load.spec import LoadEndpoint, LoadSpec, TlsPaths
from halfserve.serve.benchmark.load_target import RequestSettings, host_and_port, tls_paths
from halfserve.serve.benchmark.measurement import Bench
from halfserve.serve.client.channel_settings import bearer, check_encrypted, parse_address
from halfserve.serve.client.cli.display import provider_of
from halfserve.serve.client.cli.inputs import InputArgumentError
from halfserve.serve.client.client import Client
from halfserve.serve.client.errors import ClientError

Body = Callable[[str, Sequence[str]], dict[str, Any]]
QUERY = "when does the train to the coast leave?"
# The body of a request with these texts to a model, by path. Texts that are too long are cut, so that any file can be sent.
BODIES: Mapping[str, Body] = {
    "/embed": lambda _, texts: {"inputs": texts, "truncate": True},
    "/embed_all": lambda _, texts: {"inputs": texts, "truncate": True},
    "/embed_sparse": lambda _, texts: {"inputs": texts, "truncate": True},
    "/predict": lambda _, texts: {"inputs": [[text] for text in texts], "truncate": True},
    "/rerank": lambda _, texts: {"query": QUERY, "texts": texts, "truncate": True},
    "/similarity": lambda _, texts: {"inputs": {"source_sentence": QUERY, "sentences": texts}},
    "/v1/embeddings": lambda model, texts: {"model": model, "input": texts},
    "/v1/rerank": lambda model, texts: {"model": model, "query": QUERY, "documents": texts},
    "/v2/rerank": lambda model, texts: {"model": model, "query": QUERY, "documents": texts},
}
DEFAULT_PORTS = {"http": 80, "https": 443}
REST_PORT, GRPC_PORT = 8000, 8001
SEED = 2024
REQUESTS = 256  # distinct requests of made-up texts
MAX_TEXTS = 65_536  # lines that are read of a file
WORDS = (
    "a the this every train cat city letter river engine model morning window library garden street winter story question"
    " leaves finds reads opens carries keeps answers follows waits sleeps old small bright quiet late early at in near"
    " without before seven again slowly together"
)
MEDIAN_WORDS, SPREAD, LONGEST_WORDS = 12, 0.8, 100


@dataclass(frozen=True, kw_only=True)
class TextEndpoint:
    """A path that takes texts, and the texts to send."""

    url: str  # URL without the path
    path: str  # path, one of BODIES at its end
    texts: Sequence[str]

    @property
    def body(self) -> Body:
        return BODIES[next(name for name in sorted(BODIES, key=len, reverse=True) if self.path.endswith(name))]

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]

    @property
    def is_encrypted(self) -> bool:
        return self.url.startswith("https:")


def parse_endpoint(text: str, address: str, texts: Path | None) -> TextEndpoint:
    """Read `--endpoint`: a path such as /embed, on port 8000 of the host of `address`, or a whole URL; and the file of texts.

    Raises:
        BenchmarkArgumentError: it is neither, or no path that takes texts.
        InputArgumentError: the file cannot be read, or has no text.
    """
    parts = urlsplit(text)
    if parts.scheme:
        try:
            known = parts.scheme in DEFAULT_PORTS and parts.hostname and parts.port != 0
        except ValueError:  # the port is no number
            known = False
        url = f"{parts.scheme}://{parts.netloc}"
    else:
        host = host_and_port(address)[0]
        known, url = not parts.netloc, f"http://{f'[{host}]' if ':' in host else host}:{REST_PORT}"
    if not known or parts.query or not parts.path.endswith(tuple(BODIES)):
        raise BenchmarkArgumentError(
            f"--endpoint {text}: expected one of {', '.join(BODIES)}, or http://HOST:PORT and one of them"
        )
    return TextEndpoint(url=url, path=parts.path, texts=made_up_texts() if texts is None else _lines(texts))


def grpc_address(endpoint: TextEndpoint, given: str, *, default: str) -> str:
    """Return the address of the endpoint's gRPC port: the one given, or port 8001 of its host."""
    host, _ = endpoint.place
    return given if given != default else f"{f'[{host}]' if ':' in host else host}:{GRPC_PORT}"


def _lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = [line.strip() for line, _ in zip(file, range(MAX_TEXTS), strict=False)]
    except (OSError, UnicodeDecodeError) as error:
        raise InputArgumentError(f"--texts {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None
    texts = [line for line in lines if line]
    if not texts:
        raise InputArgumentError(f"--texts {path}: it has no text, expected one in each line")
    return texts


def made_up_texts() -> list[str]:
    """Return texts of mixed lengths, most of 5 to 27 words, the same at every call."""
    generator = np.random.default_rng(SEED)
    lengths = np.clip(generator.lognormal(np.log(MEDIAN_WORDS), SPREAD, REQUESTS), 1, LONGEST_WORDS).astype(int)
    return [" ".join(generator.choice(WORDS.split(), length)) for length in lengths]


class TextTarget:
    """A REST endpoint that is ready to be loaded: it has answered one request for each model.

    The server's own counters come from its gRPC port, where it has one.

    Raises:
        BenchmarkError: the endpoint does not answer, or refuses the request; the text has its message.
        ClientError: a token would go unencrypted.
    """

    def __init__(self, address: str, models: Sequence[str], options: RequestSettings, endpoint: TextEndpoint) -> None:
        self.models = tuple(models)
        self.versions = dict.fromkeys(models, options.version)
        self.provider: str | None = None
        self.notes: list[str] = []
        self._options = options
        host, port = endpoint.place
        tls = options.tls is not None or endpoint.is_encrypted
        if options.token is not None and not tls:
            check_encrypted(parse_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), None)
        self._stack = ExitStack()
        try:
            timeout_s = options.timeout_s
            self._client = self._stack.enter_context(
                Client(address, timeout_s=timeout_s, tls=options.tls, token=options.token, metadata=options.metadata)
            )
            headers = tuple((name.lower(), value) for name, value in options.metadata.items())
            target = LoadEndpoint(
                host=host,
                port=port,
                path=endpoint.path,
                is_rest=True,
                tls=(TlsPaths() if options.tls is None else tls_paths(options.tls)) if tls else None,
                headers=headers + (() if options.token is None else bearer(options.token)),
            )
            # Paths whose body names no model take it from the query; a server of one model ignores it.
            if "model" not in endpoint.body("", []):
                target = replace(target, path=f"{endpoint.path}?model={quote(self.models[0], safe='')}")
            bodies = [json.dumps(body).encode() for body in _bodies(endpoint, self.models[0], options.batch_size)]
            self.generator = self._stack.enter_context(LoadGenerator(target, bodies, processes=options.processes))
            self._try(f"{endpoint.url}{endpoint.path}")
            self._read_facts()
        except BaseException:
            self._stack.close()
            raise

    @property
    def bench(self) -> Bench:
        return Bench(generator=self.generator, read_totals=self.totals, batch_size=self._options.batch_size, models=self.models)

    def totals(self) -> ServerTotals | None:
        """Return the server's counters, where a request counts once for all its texts; None without counters."""
        try:
            found = ServerTotals.of(self._client.statistics(self.models[0], self._options.version))
        except ClientError:
            return None
        return replace(found, requests=found.requests // self._options.batch_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _try(self, url: str) -> None:
        result = self.generator.run(LoadSpec(concurrency=1, requests=1, timeout_s=self._options.timeout_s))
        if result.ended_early is not None:
            raise BenchmarkError(f"no server answers at {url} ({result.ended_early})")
        for status, message in result.tally.messages.items():
            raise BenchmarkError(f"{url} refused the first request: {status}: {message}")

    def _read_facts(self) -> None:
        try:
            config = self._client.model_config(self.models[0], self._options.version)
            metadata = self._client.model_metadata(self.models[0], self._options.version)
        except ClientError as error:
            self.notes.append(f"without the server's counters, as its gRPC port does not give them: {error}")
            return
        self.provider = provider_of(config)
        self.versions[self.models[0]] = self._options.version or "".join(metadata.versions[-1:])


def _bodies(endpoint: TextEndpoint, model: str, count: int) -> list[dict[str, Any]]:
    """Return a body for each `count` texts in order; the last is filled up from the beginning."""
    texts = endpoint.texts
    starts = range(0, max(len(texts), 1), count)
    return [endpoint.body(model, [texts[(start + i) % len(texts)] for i in range(count)]) for start in starts]
