"""Cost of a repository in object storage: copying a model, restarting, and polling without changes.

    python -m benchmarks.object_storage

The store is moto's S3 server in a separate process on this machine, which answers from memory: the times are those of this
side and of that server's Python, without a network.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from halfserve.files.object_storage import ObjectStore
from halfserve.serve.storage.repository_copy import RepositoryCopy
from halfserve.serve.storage.storage_options import ObjectStorage

MIB = 2**20


def _serve(port: Any, requests: Any) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415  (in the child)
    from werkzeug.serving import make_server  # noqa: PLC0415  (in the child)

    application = DomainDispatcherApplication(create_backend_app)

    def counted(environ: Any, start_response: Any) -> Any:
        requests.value += 1
        return application(environ, start_response)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, counted, threaded=True)
    port.value = server.port
    server.serve_forever()


@contextmanager
def _store() -> Iterator[Any]:
    """Run a store and set AWS_ENDPOINT_URL; yields the number of its requests."""
    context = multiprocessing.get_context("spawn")
    port, requests = context.Value("i", 0), context.Value("i", 0)
    child = context.Process(target=_serve, args=(port, requests), daemon=True)
    child.start()
    while not port.value:
        child.join(0.05)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port.value}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        yield requests
    finally:
        child.terminate()
        child.join()


def _fill(url: str, models: int, size: int) -> None:
    store = ObjectStore(url)
    with tempfile.TemporaryDirectory() as folder:
        content, small = Path(folder) / "model.onnx", Path(folder) / "small"
        content.write_bytes(os.urandom(size))
        small.write_bytes(b"max_batch_size: 32\n")
        for number in range(models):
            for source, path in ((small, "config.pbtxt"), (small, "1/certificate.json"), (content, "1/model.onnx")):
                store.put(source, f"model_{number:03}/{path}")


def _timed(copy: RepositoryCopy) -> tuple[float, float]:
    """Wall seconds of one update, and processor seconds of this process."""
    began, computed = time.perf_counter(), time.process_time()
    copy.update()
    return time.perf_counter() - began, time.process_time() - computed


def main(mib: int = 100, models: int = 100, rounds: int = 7) -> None:
    """Measure a model of `mib` MiB, and a repository of `models` small models."""
    with _store() as requests, tempfile.TemporaryDirectory() as folder:
        import s3fs  # noqa: PLC0415  (reads the environment)

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        _fill("s3://bucket/large", 1, mib * MIB)
        times = []
        for number in range(rounds):
            storage = ObjectStorage(url="s3://bucket/large", folder=Path(folder) / str(number))
            copy = RepositoryCopy(storage)
            times.append(_timed(copy))
            copy.close()
        seconds = statistics.median(wall for wall, _ in times)
        computed = statistics.median(own for _, own in times)
        typer.echo(f"copy {mib} MiB: {seconds:.2f} s, {mib / seconds:.0f} MiB/s, of it {computed:.2f} s of our processor time")
        copy = RepositoryCopy(storage)
        typer.echo(f"start again with it copied: {_timed(copy)[0]:.2f} s")
        copy.close()
        _fill("s3://bucket/many", models, 1000)
        copy = RepositoryCopy(ObjectStorage(url="s3://bucket/many", folder=Path(folder) / "many"))
        before = requests.value
        seconds = _timed(copy)[0]
        typer.echo(f"copy {models} small models: {requests.value - before} requests, {seconds:.2f} s")
        before = requests.value
        polls = [_timed(copy) for _ in range(rounds)]
        typer.echo(
            f"poll of {models} unchanged models: {(requests.value - before) / rounds:.0f} request, "
            f"{1000 * statistics.median(wall for wall, _ in polls):.0f} ms, of it "
            f"{1000 * statistics.median(own for _, own in polls):.0f} ms of our processor time"
        )
        copy.close()


if __name__ == "__main__":
    typer.run(main)
