"""The text generator: requests join a running batch, clients that go end theirs, and slow readers delay none."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from halfserve import Client
from tests.examples.running import run_example
from tests.serve.running_server import WAIT_S
from tests.serve.test_server import serving

pytestmark = pytest.mark.long
pytest.importorskip("openvino_genai", reason="needs openvino-genai, which `make dev` installs")

from halfserve.examples.generation.tiny_model import save_tiny_model  # noqa: E402  (needs openvino-tokenizers)

MIB = 2**20
WIDE = 65_536  # characters of a word
LONG = 100_000  # tokens, which no test waits for


@dataclass(frozen=True)
class Served:
    url: str
    metrics_url: str
    grpc_address: str
    process: int

    def generate(self, model: str, text: str, **fields: Any) -> httpx.Response:
        body = {"text_input": text, **fields}
        return httpx.post(f"{self.url}/v2/models/{model}/generate", json=body, timeout=WAIT_S)

    def text(self, model: str, text: str, **fields: Any) -> str:
        answer = self.generate(model, text, **fields)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["text_output"]
        return found

    @contextmanager
    def stream(self, model: str, text: str, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of generate_stream, each read from the connection when it is asked for."""
        body = {"text_input": text, "stream": True, **fields}
        url = f"{self.url}/v2/models/{model}/generate_stream"
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as answer:
            yield (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)

    def metric(self, name: str, model: str) -> float:
        text = httpx.get(self.metrics_url, timeout=WAIT_S).text
        found = re.search(rf'^{name}{{[^}}]*model="{model}"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def wait_for_requests(self, model: str, number: int) -> None:
        """Wait until the engine has so many requests."""
        end_s = time.monotonic() + WAIT_S
        while (found := self.metric("generation_requests", model)) != number:
            assert time.monotonic() < end_s, f"the engine of {model} has {found} requests, expected {number}"


def counted(first: int, number: int, width: int = 1) -> str:
    return " ".join(f"{first + i:0{width}}" for i in range(number))


def memory(process: int) -> int:
    """Bytes of memory of a process and those below it, without files."""
    text = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", text, re.MULTILINE)
    children = [int(child) for task in Path(f"/proc/{process}/task").glob("*/children") for child in task.read_text().split()]
    return (int(found[1]) * 1024 if found else 0) + sum(map(memory, children))


def add_model(repository: Path, name: str, settings: dict[str, int], **tiny: Any) -> None:
    """Another model like "writer", with settings of its own and a language model of its own."""
    folder = repository / name
    shutil.copytree(repository / "writer", folder)
    save_tiny_model(folder / "1", **tiny)
    config = (folder / "config.pbtxt").read_text()
    for key, value in settings.items():
        config = re.sub(rf'parameters {{ key: "{key}".*\n', "", config)
        config += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    (folder / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generation")
    done = run_example("generation", "models", folder=folder)
    assert done.returncode == 0, done.stderr
    models = folder / "models"
    add_model(models, "two_places", {"max_num_seqs": 2})
    add_model(models, "endless", {}, endless=True)
    add_model(models, "small_cache", {"cache_size": 0, "num_kv_blocks": 4}, endless=True)
    add_model(models, "wide", {}, numbers=100, endless=True, width=WIDE)
    return models


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Served]:
    with serving(repository, "--trust-python-models", "--http-port", "0", "--metrics-port", "0") as (process, ready):
        yield Served(
            url=f"http://127.0.0.1:{ready['http_port']}",
            metrics_url=f"http://127.0.0.1:{ready['metrics_port']}/metrics",
            grpc_address=f"127.0.0.1:{ready['grpc_port']}",
            process=process.pid,
        )


@pytest.mark.parametrize("model", ["writer", "two_places"])
def test_clients_at_once_get_their_own_texts_whole_and_streamed(server: Served, model: str) -> None:
    def streamed(first: int) -> str:
        with server.stream(model, f"3 {first}") as events:
            return "".join(event["text_output"] for event in events)

    def by_grpc(first: int) -> str:
        inputs = {"text_input": np.array([str(first)], object), "stream": np.array([True])}
        with Client(server.grpc_address) as client:
            return "".join(answer.outputs["text_output"][0].decode() for answer in client.stream_infer(model, [inputs]))

    with ThreadPoolExecutor(12) as pool:
        texts = [list(pool.map(ask, range(40, 46))) for ask in (lambda n: server.text(model, f"{n}"), streamed, by_grpc)]
    assert texts == [[counted(first + 1, 99 - first) for first in range(40, 46)]] * 3


def test_an_answer_says_why_it_ends(server: Served) -> None:
    assert server.generate("writer", "97").json()["finish_reason"] == "stop"
    cut = server.generate("writer", "7", max_tokens=3).json()
    assert (cut["text_output"], cut["finish_reason"]) == ("8 9 10", "length")


def test_a_request_joins_the_batch_of_one_that_is_being_generated(server: Served) -> None:
    with server.stream("endless", "0", max_tokens=LONG) as events:
        assert next(events)["text_output"].startswith("1")
        assert server.text("endless", "7", max_tokens=3) == "8 9 10"
        assert server.metric("generation_requests", "endless") == 1
        assert next(events)["text_output"]


@pytest.mark.parametrize("way", ["generate", "generate_stream", "gRPC"])
def test_a_client_that_goes_ends_its_generation(server: Served, way: str) -> None:
    if way == "generate_stream":
        with server.stream("endless", "0", max_tokens=LONG) as events:
            next(events)
    elif way == "generate":
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v2/models/endless/generate", json={"text_input": "0", "max_tokens": LONG}, timeout=2)
    else:
        inputs = {"text_input": np.array(["0"], object), "stream": np.array([True]), "max_tokens": np.array([LONG], np.int32)}
        with Client(server.grpc_address) as client:
            answers = client.stream_infer("endless", [inputs])
            next(iter(answers))
    server.wait_for_requests("endless", 0)


def test_a_slow_reader_delays_none_and_takes_no_memory(server: Served) -> None:
    assert server.text("wide", f"{0:0{WIDE}}", max_tokens=2) == counted(1, 2, WIDE)
    before = memory(server.process)
    with server.stream("wide", f"{0:0{WIDE}}", max_tokens=8000) as events:  # 500 MiB of text
        server.wait_for_requests("wide", 1)
        assert server.text("wide", f"{3:0{WIDE}}", max_tokens=2) == counted(4, 2, WIDE)
        server.wait_for_requests("wide", 0)  # the engine has finished, and the client has read nothing
        assert memory(server.process) - before < 250 * MIB
        text = "".join(next(events)["text_output"] for _ in range(4))
    assert text.split()[:20] == counted(1, 20, WIDE).split()


def test_a_request_that_the_cache_cannot_hold_fails_alone(server: Served) -> None:
    with server.stream("small_cache", "0", max_tokens=60) as events:
        refused = server.generate("small_cache", "0", max_tokens=1000)
        assert "larger cache_size" in refused.json()["error"]
        assert "".join(event["text_output"] for event in events) == counted(1, 60)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text_input": ""}, "Prompt length cannot be 0"),
        ({"text_input": "1", "max_tokens": -1}, "max_tokens must be at least 1"),
        ({"text_input": "1", "temperature": 1e9, "max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_bad_requests_are_refused_and_the_next_is_answered(server: Served, fields: dict[str, Any], reason: str) -> None:
    answer = httpx.post(f"{server.url}/v2/models/writer/generate", json=fields, timeout=WAIT_S)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]
    assert server.text("writer", "97") == "98 99"
