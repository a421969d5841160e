"""Run NVIDIA's example clients, which lie beside this file: a method for each call, which passes with exit status 0."""

from __future__ import annotations

import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
SECONDS = 120
GRPC = ("-i", "grpc", "-u", "localhost:8001")
IMAGES = ("-m", "inception_graphdef", "-s", "INCEPTION", "-c", "1", "-b", "1")
COMPRESSIONS = ("", "gzip", "deflate")
# Calls of a program beside the one without arguments, by the end of the method's name.
CALLS: dict[str, dict[str, tuple[str, ...]]] = {
    "simple_grpc_infer_client": {"": (), "gzip": ("-C", "gzip")},
    "simple_grpc_sequence_stream_infer_client": {"": (), "dyna": ("-d",)},
    "simple_grpc_aio_sequence_stream_infer_client": {"": (), "dyna": ("-d",)},
    "simple_grpc_sequence_sync_infer_client": {"": (), "dyna": ("-d",)},
    "simple_http_sequence_sync_infer_client": {"": (), "dyna": ("-d",)},
    "reuse_infer_objects_client": {"": (), "grpc": GRPC},
    "memory_growth_test": {"": ("-r", "20"), "grpc": ("-r", "20", "-i", "grpc")},
    "ensemble_image_client": {"": ("-c", "1", "picture.jpg"), "grpc": ("-c", "1", *GRPC, "picture.jpg")},
    "grpc_image_client": {
        name: (*IMAGES, *flags, "picture.jpg")
        for name, flags in {"": (), "async": ("-a",), "streaming": ("-a", "--streaming")}.items()
    },
    "image_client": {
        name: (*IMAGES, *flags, "picture.jpg")
        for name, flags in {
            "": (),
            "async": ("-a",),
            "grpc": GRPC,
            "grpc_async": ("-a", *GRPC),
            "streaming": ("-a", "--streaming", *GRPC),
            "densenet": ("-m", "densenet_onnx"),
        }.items()
    },
    **{
        program: {
            "_".join((sent or "plain", got or "plain")) if sent or got else "": (
                *(("--request-compression-algorithm", sent) if sent else ()),
                *(("--response-compression-algorithm", got) if got else ()),
            )
            for sent in COMPRESSIONS
            for got in COMPRESSIONS
            if sent != got or not sent
        }
        for program in ("simple_http_infer_client", "simple_http_aio_infer_client")
    },
}


def _method(program: Path, arguments: tuple[str, ...]) -> Callable[[unittest.TestCase], None]:
    def run(_test: unittest.TestCase) -> None:
        done = subprocess.run(
            [sys.executable, program.name, *arguments], cwd=HERE, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        print(f"== {program.stem} {' '.join(arguments)}\n{done.stdout}{done.stderr}", flush=True)
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        assert done.returncode == 0, f"exit status {done.returncode}: {' | '.join(last)}"

    return run


def _methods() -> Iterator[tuple[str, Callable[[unittest.TestCase], None]]]:
    for program in sorted(HERE.glob("*.py")):
        if program.name != Path(__file__).name:
            for end, arguments in CALLS.get(program.stem, {"": ()}).items():
                yield "_".join(part for part in ("test", program.stem, end) if part), _method(program, arguments)


ExampleClients = type("ExampleClients", (unittest.TestCase,), {**dict(_methods()), "__module__": __name__})
