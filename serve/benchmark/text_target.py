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
from halfserve.serve.client.channel_settings import check_encrypted, parse_address
from halfserve.serve.client.cli.display import provider_of
from halfserve.serve.client.cli.inputs import InputArgumentError
from halfserve.serve.client.client import Client
from halfserve.serve.client.errors import ClientError

Body = Callable[[str, Sequence[str]], dict[str, Any]]
QUERY = "when does the train to the coast leave?"
# The body of a request with these texts to a model, by path. TEI's paths cut texts that are too long.
BODIES: Mapping[str, Body] = {
    **dict.fromkeys(("/embed", "/embed_all", "/embed_sparse"), lambda _, texts: {"inputs": texts, "truncate": True}),
    "/predict": lambda _, texts: {"inputs": [[text] for text in texts], "truncate": True},
    "/rerank": lambda _, texts: {"query": QUERY, "texts": texts, "truncate": True},
    "/similarity": lambda _, texts: {
        "inputs": {"source_sentence": QUERY, "sentences": texts},
        "parameters": {"truncate": True},
    },
    "/v1/embeddings": lambda model, texts: {"model": model, "input": texts},
    **dict.fromkeys(("/v1/rerank", "/v2/rerank"), lambda model, texts: {"model": model, "query": QUERY, "documents": texts}),
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
class RestEndpoint:
    """A URL that takes texts, and the texts to send."""

    url: str
    host: str  # host name or address; an IPv6 address has brackets
    port: int
    path: str  # path of the URL, one of BODIES at its end
    texts: Sequence[str]

    @property
    def grpc_address(self) -> str:
        return f"{self.host}:{GRPC_PORT}"


def parse_endpoint(text: str, address: str, texts: Path | None) -> RestEndpoint:
    """Read `--endpoint`: a path such as /embed, on port 8000 of the host of `address`, or a whole URL; and the file of texts.

    Raises:
        BenchmarkArgumentError: it is neither, or no path that takes texts.
        InputArgumentError: the file cannot be read, or has no text.
    """
    url = text if "//" in text else f"http://{_bracketed(host_and_port(address)[0])}:{REST_PORT}{text}"
    wrong = BenchmarkArgumentError(
        f"--endpoint {text}: expected one of {', '.join(BODIES)}, or http://HOST:PORT and one of them"
    )
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORTS[parts.scheme]
    except (ValueError, KeyError):  # the port is no number; another scheme
        raise wrong from None
    if not parts.hostname or parts.query or not parts.path.endswith(tuple(BODIES)):
        raise wrong
    lines = made_up_texts() if texts is None else _lines(texts)
    return RestEndpoint(url=parts.geturl(), host=_bracketed(parts.hostname), port=port, path=parts.path, texts=lines)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


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
    """A REST endpoint that is ready to be loaded: it has answered one request for the model.

    The server's own counters come from its gRPC port, where it has one.

    Raises:
        BenchmarkError: the endpoint does not answer, or refuses the request; the text has its message.
        ClientError: a token would go unencrypted.
    """

    def __init__(self, address: str, model: str, options: RequestSettings, endpoint: RestEndpoint) -> None:
        self.versions = {model: options.version}
        self.provider: str | None = None
        self.notes: list[str] = []
        self._model = model
        self._options = options
        path = max((path for path in BODIES if endpoint.path.endswith(path)), key=len)
        # Rows that the server counts for one request.
        self._rows = options.batch_size + 1 if path == "/similarity" else options.batch_size
        is_encrypted = options.tls is not None or endpoint.url.startswith("https:")
        if options.token is not None and not is_encrypted:
            check_encrypted(parse_address(f"{endpoint.host}:{endpoint.port}"), None)
        # Paths whose body names no model take it from the query; a server of one model ignores it.
        query = "" if "model" in BODIES[path]("", []) else f"?model={quote(model, safe='')}"
        files = TlsPaths() if options.tls is None else tls_paths(options.tls)
        target = LoadEndpoint(
            host=endpoint.host.strip("[]"),
            port=endpoint.port,
            path=endpoint.path + query,
            is_rest=True,
            tls=files if is_encrypted else None,
            headers=options.headers,
        )
        texts, count = endpoint.texts, options.batch_size  # the last body is filled up from the beginning
        parts = [[texts[(start + i) % len(texts)] for i in range(count)] for start in range(0, len(texts), count)]
        bodies = [json.dumps(BODIES[path](model, part)).encode() for part in parts]
        with ExitStack() as stack:
            self._client = stack.enter_context(
                Client(address, timeout_s=options.timeout_s, tls=options.tls, token=options.token, metadata=options.metadata)
            )
            self.generator = stack.enter_context(LoadGenerator(target, bodies, processes=options.processes))
            self._try(endpoint.url)
            self._read_facts()
            self._stack = stack.pop_all()

    @property
    def bench(self) -> Bench:
        rows = self._options.batch_size
        return Bench(generator=self.generator, read_totals=self.totals, batch_size=rows, models=(self._model,))

    def totals(self) -> ServerTotals | None:
        """Return the server's counters, where a request counts once for all its texts; None without counters."""
        try:
            found = ServerTotals.of(self._client.statistics(self._model, self._options.version))
        except ClientError:
            return None
        return replace(found, requests=found.requests // self._rows)

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
            config = self._client.model_config(self._model, self._options.version)
            metadata = self._client.model_metadata(self._model, self._options.version)
        except ClientError as error:
            self.notes.append(f"without the server's counters, as its gRPC port does not give them: {error}")
            return
        self.provider = provider_of(config)
        self.versions[self._model] = self._options.version or "".join(metadata.versions[-1:])
