from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from onnx import TensorProto

from tests.serve.conftest import load_repository
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_text_models import save_text_model, setting
from tests.serve.running_server import RunningServer, running_server


@pytest.fixture(scope="session")
def text_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models "embedder", which takes ids of its own vocabulary too, "ranker", whose scores are FP16, and "classifier"."""
    repository = tmp_path_factory.mktemp("text-models")
    save_text_model(repository, "embedder", setting("halfserve.token_ids", "own"))
    save_text_model(repository, "ranker", output=TensorProto.FLOAT16)
    save_text_model(repository, "classifier")
    return repository


@pytest.fixture(scope="session")
def text_server(text_repository: Path) -> Iterator[RunningServer]:
    """A server on `text_repository`."""
    with running_server(lambda: load_repository(text_repository)) as running:
        yield running


@pytest.fixture(scope="session")
def texts(text_server: RunningServer) -> Iterator[httpx.Client]:
    """A client of HTTP on `text_server`."""
    with running_http(text_server) as rest, httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as client:
        yield client


@pytest.fixture
def openai_client(texts: httpx.Client) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the same server."""
    base_url = str(texts.base_url).rstrip("/")
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client
