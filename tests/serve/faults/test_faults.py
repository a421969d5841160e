"""Faults injected into a real server process under load: its models, its disk, its clients, itself."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.server_process import server_process
from halfserve import Client, ClientError, DeadlineExceeded, InvalidRequest, ModelNotFound, RetryPolicy, ServerUnavailable
from halfserve.serve.transports.grpc_framing import frame
from tests.models import FLOAT32, save_mlp, save_text
from tests.serve.faults.conftest import ROW_MB, SPAN_S
from tests.serve.faults.server_process import WAIT_S, Load, ServerProcess, under_load
from tests.serve.transports.nghttp2.http2_peer import Http2Peer, call_headers

FAR = 100_000_000  # about a microsecond a step
MB = 2**20


def count_to(client: Client, n: int) -> list[int]:
    return [int(value) for value in client.infer("counter", {"n": np.array([n])})["y"]]


def answers_again(client: Client) -> bool:
    try:
        return count_to(client, 5) == [5]
    except ServerUnavailable:
        return False


def test_a_model_that_hangs_is_given_up_and_comes_back(faulty_server: ServerProcess, load: Load, client: Client) -> None:
    assert count_to(client, 7) == [7]
    with pytest.raises(ServerUnavailable, match=f"did not answer within its {SPAN_S:g} s and is being restarted"):
        count_to(client, FAR)
    faulty_server.until(lambda: answers_again(client), client.is_live)
    assert "counter/1 instance 0: is up again" in faulty_server.error_text()


@pytest.mark.long
def test_a_hung_model_without_its_file_comes_back_with_the_file(
    faulty_server: ServerProcess, load: Load, client: Client
) -> None:
    file = faulty_server.repository / "counter" / "1" / "model.onnx"
    elsewhere = file.with_name("elsewhere")
    file.rename(elsewhere)
    try:
        with pytest.raises(ServerUnavailable, match="did not answer"):
            count_to(client, FAR)
        for _ in range(2):  # one that comes before the first try to load it, and one that comes after
            with pytest.raises(ServerUnavailable, match="cannot be loaded just now .*; try again later, or on another replica"):
                count_to(client, 5)
    finally:
        elsewhere.rename(file)
    faulty_server.until(lambda: answers_again(client), client.is_live)


def test_only_the_poisoned_requests_of_a_batch_fail(load: Load, client: Client) -> None:
    def pick(index: int) -> float | str:
        try:
            return float(client.infer("picky", {"i": np.array([[index]])})["y"][0, 0])
        except ClientError as error:
            return error.code

    indices = [0, 1, 9, 1, 0, 9, 0, 1] * 5
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pick, indices)) == [{0: 10.0, 1: 20.0}.get(index, "INTERNAL") for index in indices]


@pytest.mark.long
def test_a_copy_with_a_lost_device_is_reloaded_and_costs_others_nothing(
    faulty_server: ServerProcess, load: Load, client: Client
) -> None:
    assert client.infer("fragile", {"i": np.array([[1]])})["y"].tolist() == [[20]]
    with pytest.raises(ServerUnavailable, match="the device failed while it computed this request"):
        client.infer("fragile", {"i": np.array([[-1]])})
    assert client.infer("fragile", {"i": np.array([[0]])})["y"].tolist() == [[10]]
    assert "fragile/1 instance 0: is up again" in faulty_server.error_text()


def test_a_batch_beyond_the_memory_is_computed_in_pieces(faulty_server: ServerProcess, load: Load, client: Client) -> None:
    pid = faulty_server.process.pid
    x = np.arange(16, dtype=np.float32).reshape(16, 1)
    load.wait_for_more()
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    try:
        limit(pid, 10 * ROW_MB * MB, before[1])
        assert client.infer("hungry", {"x": x})["y"].tolist() == x.tolist()
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)
    assert "hungry/1 instance 0: out of memory with 16 rows at once; it computes at most 8 now" in faulty_server.error_text()
    assert client.infer("hungry", {"x": x})["y"].tolist() == x.tolist()


def limit(pid: int, spare_bytes: int, hard: int) -> None:
    """Let a process have so much more address space than it has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + spare_bytes, hard))


SIDE = 2048  # 8 MiB of weights


@contextmanager
def full_disk(server: ServerProcess, client: Client, spare_bytes: int) -> Iterator[None]:
    """No file of the server's gets longer than the access log is now, but for some bytes."""
    server.until(server.access_log.exists, client.is_live)
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (server.access_log.stat().st_size + spare_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_log_lines_and_nothing_else(faulty_server: ServerProcess, load: Load, client: Client) -> None:
    with full_disk(faulty_server, client, spare_bytes=100):  # less than a line: one is torn
        faulty_server.until(lambda: "access log" in faulty_server.error_text(), client.is_live)
        load.wait_for_more()
    full = faulty_server.access_log.stat().st_size
    faulty_server.until(lambda: b"}\n" in faulty_server.access_log.read_bytes()[full:], client.is_live)
    assert "access log: " in faulty_server.error_text()
    assert "lost: [Errno 27] File too large" in faulty_server.error_text()
    written = faulty_server.access_log.read_bytes()
    # A line that could not be finished is ended before the next one; there is none if lines came just before the disk was full.
    assert written[:full].endswith(b"\n") or written[full:].startswith(b"\n")
    assert json.loads(written[full:].lstrip(b"\n").split(b"\n")[0])["model"]


def test_a_model_can_be_loaded_while_the_disk_is_full(faulty_server: ServerProcess, load: Load, client: Client) -> None:
    load.wait_for_more()
    second = faulty_server.repository / "picky" / "2"
    shutil.copytree(faulty_server.repository / "picky" / "1", second)
    try:
        with full_disk(faulty_server, client, spare_bytes=100):
            client.load_model("picky")
            assert client.infer_detailed("picky", {"i": np.array([[1]])}).version == "2"
    finally:
        shutil.rmtree(second)
        client.load_model("picky")


def test_a_model_beyond_the_disks_space_is_refused_and_the_old_one_serves(
    faulty_server: ServerProcess, load: Load, client: Client
) -> None:
    load.wait_for_more()
    version = faulty_server.repository / "picky" / "2"
    text = f"(float16[batch, {SIDE}] x) => (float16[batch, {SIDE}] y) {{ y = MatMul(x, w) }}"
    save_text(version / "model.onnx", text, w=np.zeros((SIDE, SIDE), np.float16))
    try:
        with (
            full_disk(faulty_server, client, spare_bytes=100),
            pytest.raises(InvalidRequest, match=r"picky/2/model.onnx: its weights could not be written .*File too large"),
        ):
            client.load_model("picky")
        assert client.infer_detailed("picky", {"i": np.array([[1]])}).version == "1"
    finally:
        shutil.rmtree(version)
        client.load_model("picky")


def test_a_model_folder_that_is_deleted_goes_on_serving(faulty_server: ServerProcess, load: Load, client: Client) -> None:
    folder = faulty_server.repository / "mlp"
    shutil.rmtree(folder)
    try:
        load.wait_for_more()
        with pytest.raises(ModelNotFound, match="the repository has no model 'mlp'"):
            client.load_model("mlp")
        load.wait_for_more()
        (entry,) = [model for model in client.models() if model.name == "mlp"]
        assert entry.state == "READY"
    finally:
        save_mlp(folder / "1" / "model.onnx")
    client.load_model("mlp")


RESET_AT_CLOSE = struct.pack("ii", 1, 0)
CLIENTS = 20


def test_a_stopped_server_continues_where_it_was(faulty_server: ServerProcess, load: Load, client: Client) -> None:
    counter = {"n": np.array([2000])}
    with Client(faulty_server.address, timeout_s=1.5 * SPAN_S, retries=0) as impatient, ThreadPoolExecutor(1) as pool:
        begun = pool.submit(client.infer, "counter", counter)
        faulty_server.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded):  # stopped for longer than a batch of this model may take
                impatient.infer("counter", counter)
        finally:
            faulty_server.process.send_signal(signal.SIGCONT)
        assert begun.result(WAIT_S)["y"].tolist() == [2000]
    load.wait_for_more()


def test_clients_that_die_during_a_message_leak_nothing(faulty_server: ServerProcess, load: Load, client: Client) -> None:
    client.is_live()
    before = faulty_server.open_files()
    for number in range(CLIENTS):
        peer = Http2Peer(faulty_server.address).greet()
        stream = peer.http2.send_request(call_headers())
        peer.http2.send_data(stream, frame(bytes(100_000))[: 1 + 4000 * number])
        peer.push()
        if number % 2:
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        peer.socket.close()
    faulty_server.until(lambda: faulty_server.open_files() <= before, client.is_live)


def test_sigterm_under_load_answers_all_accepted_requests(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    with (
        server_process(tmp_path, *FLOAT32) as server,
        under_load([server.address], askers=6, streams=0, may_refuse=True) as load,
    ):
        server.process.terminate()
        load.wait_for_refusals(6)
        assert (server.process.wait(WAIT_S), server.log_text()) == (0, "")
    assert {type(error) for error in load.refused} == {ServerUnavailable}


@pytest.mark.long
def test_a_restart_after_a_kill_costs_retrying_clients_nothing(tmp_path: Path, free_port: int) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    patient = RetryPolicy(initial_backoff_s=0.05, max_backoff_s=0.2, wait_for_server=True)
    with ExitStack() as servers:
        server = servers.enter_context(server_process(tmp_path, grpc_port=free_port))
        with under_load([server.address], streams=0, retry=patient) as load:
            server.process.kill()
            server.process.wait(WAIT_S)
            servers.enter_context(server_process(tmp_path, grpc_port=free_port))
            load.wait_for_more(200)
