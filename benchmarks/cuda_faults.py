"""Behaviour of a server when a CUDA device runs out of memory, is lost, or is shared by two processes.

    python -m benchmarks.cuda_faults                 # on the first CUDA device
    python -m benchmarks.cuda_faults --device cpu    # the same program anywhere; nothing is lost there

Each fault is one request, while clients use another model of the same server. Prints the answer to the request, the number of
other failed requests, and the time until both models answered right again. Exits with 1 if they did not within a minute, or if
any answer was wrong.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import onnx
import torch
import typer
from onnx import parser
from torch import Tensor, nn

from benchmarks.harness.server_process import ServerProcess, server_process
from halfserve import Client, ClientError
from halfserve.serve.engine.tensors import Array

PATIENCE_S = 60.0
TOO_MANY = 1 << 44  # float32 numbers: 64 TiB
# The request determines the size of its output.
GREEDY = """<ir_version: 9, opset_import: ["": 18]> greedy (int64[1] count) => (float[1] sum) {
    ones = ConstantOfShape <value = float[1] {1.0}> (count)
    axes = Constant <value = int64[1] {0}> ()
    sum = ReduceSum (ones, axes)
}"""
BYSTANDER = """<ir_version: 9, opset_import: ["": 18]> bystander (float[N, 4] x) => (float[N, 4] y) { y = Add (x, x) }"""
FAULTS = {"out of memory": ("greedy", "count", TOO_MANY, 8), "device lost": ("asserting", "count", 0, 8)}


class Asserting(nn.Module):
    """Asserts on the device that no number is 0; CUDA's context is lost with a failed assertion."""

    def forward(self, count: Tensor) -> Tensor:
        """Whole numbers, [1] -> the same as float32."""
        torch._assert_async((count != 0).all())  # noqa: SLF001  (torch has no public name for it)
        return count.float()


@dataclass
class Bystanders:
    """Clients that use another model continuously."""

    address: str
    answers: Counter[str] = field(default_factory=Counter)  # number of answers by status; "OK", "wrong" or the error's status
    _over: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        """Send requests until `end`."""
        x = np.arange(4, dtype=np.float32)[None]
        with Client(self.address) as client:
            while not self._over.is_set():
                self.answers[asked(client, "bystander", {"x": x}, 2 * x)] += 1

    def end(self) -> None:
        """Stop the clients."""
        self._over.set()


def asked(client: Client, model: str, inputs: dict[str, Array], wanted: Array) -> str:
    """Return the result of a request: "OK", "wrong", or the error's status."""
    try:
        (answer,) = client.infer(model, inputs).values()
    except ClientError as error:
        return str(error.code)
    return "OK" if np.array_equal(answer, wanted) else "wrong"


def write_models(repository: Path) -> None:
    """Write the three models, one folder each."""
    for text in (GREEDY, BYSTANDER):
        model = parser.parse_model(text)
        folder = repository / model.graph.name / "1"
        folder.mkdir(parents=True)
        onnx.save(model, folder / "model.onnx")
    (repository / "greedy" / "config.pbtxt").write_text('name: "greedy"\nbackend: "onnxruntime"\nmax_batch_size: 0\n')
    folder = repository / "asserting" / "1"
    folder.mkdir(parents=True)
    torch.export.save(torch.export.export(Asserting(), (torch.ones(1, dtype=torch.int64),)), folder / "model.pt2")
    (repository / "asserting" / "config.pbtxt").write_text('name: "asserting"\nmax_batch_size: 0\n')


def commit(fault: str, server: ServerProcess) -> bool:
    """Cause a fault and print its effects; returns whether the server recovered and gave no wrong answer."""
    model, name, bad, good = FAULTS[fault]
    bystanders = Bystanders(server.address)
    threads = [threading.Thread(target=bystanders.ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    with Client(server.address) as client:
        wanted = np.array([good], np.float32)
        try:
            client.infer(model, {name: np.array([bad])})
            answer = "was answered"
        except ClientError as error:
            answer = f"{error.code}: {error}"
        began = time.monotonic()
        while (right := asked(client, model, {name: np.array([good])}, wanted)) != "OK":
            if time.monotonic() - began > PATIENCE_S:
                break
            time.sleep(0.05)
        took = time.monotonic() - began
        x = np.ones((1, 4), np.float32)
        others = asked(client, "bystander", {"x": x}, 2 * x)
    bystanders.end()
    for thread in threads:
        thread.join()
    seen = ", ".join(f"{count} {status}" for status, count in sorted(bystanders.answers.items()))
    print(f"{fault}: {answer}\n    then the model: {right} after {took:.2f} s; the other model: {others} ({seen})", flush=True)
    return right == others == "OK" and not bystanders.answers["wrong"]


def main(
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Where the models run.")] = "cuda",
) -> None:
    """Commit each fault on a supervised server of one process, and on one of two."""
    placement = "--cpu" if device == "cpu" else "--require-gpu"
    came_back = True
    with tempfile.TemporaryDirectory(prefix="halfserve-faults-") as folder:
        write_models(Path(folder))
        for processes in (1, 2):
            for fault in FAULTS:
                options = ("--supervise", "--processes", str(processes), "--trust-torch-archives")
                print(f"\n{processes} process(es)")
                with server_process(Path(folder), *options, placement=placement) as server:
                    came_back &= commit(fault, server)
                    sys.stderr.write(server.log_text())
    print(f"verdict: {'each server answered again, and never wrong' if came_back else 'a server did not recover, see above'}")
    raise typer.Exit(0 if came_back else 1)


if __name__ == "__main__":
    typer.run(main)
