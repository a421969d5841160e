"""Effect on clients when a supervised server's worker is killed under load, and the time until it answers again.

    python -m benchmarks.worker_crash
    python -m benchmarks.worker_crash --processes 2

Clients send one request after the other to `halfserve serve --supervise`, and its worker is repeatedly killed by SIGKILL. Half
of the clients retry and wait for the server; they should see no error. The others see each error, which should be UNAVAILABLE.
Every answer is checked. A recovery lasts from the kill to the first right answer to a request that was sent after the worker
had ended, without the supervisor's announced back-off, since no server should crash so often. Exits with 1 if anything else
happened, or if a recovery took two seconds longer than loading the models.

With --processes, one of several processes is killed while the others serve, and the server's own count of answers is compared
with the clients': each right answer counts once, and beyond them only requests whose answer was lost with their process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.soaking.clients import TIMEOUT_S, ask_affine
from benchmarks.soaking.models import save_models
from benchmarks.soaking.server_process import ServerProcess, server_process
from benchmarks.soaking.tally import Tally
from halfserve import Client, ClientError, RetryPolicy

KILLS_PER_SERVER = 5  # with more kills, most of the time would be spent in the supervisor's back-off
ALLOWED_S = 2.0  # allowed time beyond that of loading
PATIENCE_S = 60.0
LOOK_S = 0.05  # interval of checks, which does not affect the measured time
REFUSED_S = 0.05  # delay before a refused client retries
PATIENT = RetryPolicy(retries=5, initial_backoff_s=0.05, max_backoff_s=0.2, wait_for_server=True)
NO_RETRIES = RetryPolicy(retries=0)


@dataclass
class Seen:
    """Results of the clients.

    Attributes:
        tally: right and wrong answers.
        errors: errors of clients that do not retry, by status.
        retried_errors: texts of errors of clients that retry.
        counted: number of answers in the servers' statistics.
    """

    tally: Tally = field(default_factory=Tally)
    errors: Counter[str] = field(default_factory=Counter)
    retried_errors: list[str] = field(default_factory=list)
    counted: int = 0


def main(
    kills: Annotated[int, typer.Option(min=1, help="How often the worker is killed.")] = 20,
    clients: Annotated[
        int, typer.Option(min=2, help="Clients that ask one thing after the other; every other one retries.")
    ] = 4,
    processes: Annotated[int, typer.Option(min=1, help="Of the server; one is killed while the others serve.")] = 1,
    spell_s: Annotated[float, typer.Option("--spell", min=0.05, help="Seconds of service before each kill.")] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Kill the worker of a supervised server under load and measure the time until it answers again."""
    seen, recoveries_s, log = Seen(), list[float](), ""
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        start_s = _plain_start(Path(folder))
        while len(recoveries_s) < kills:
            with server_process(Path(folder), "--supervise", "--processes", str(processes)) as server:
                count = min(KILLS_PER_SERVER, kills - len(recoveries_s))
                recoveries_s += _kills(server, processes, count, clients, spell_s, seen)
                _until_all_serve(server, processes)
                with Client(server.address) as client:
                    seen.counted += sum(one.inference_stats.success.count for one in client.statistics())
                log += server.log_text()
    figures = _figures(seen, recoveries_s, start_s, log, alone=processes == 1)
    if processes > 1:
        lost = seen.counted - len(seen.tally.counted().latencies)
        figures |= {"counted_by_the_server": seen.counted, "of_these_lost_with_a_process": lost}
        figures["is_good"] = figures["is_good"] and 0 <= lost <= kills * clients
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        Console().print("\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in figures.items()), highlight=False)
    raise typer.Exit(0 if figures["is_good"] else 1)


def _plain_start(repository: Path) -> float:
    """Seconds from starting the command without a supervisor until it takes requests."""
    began = time.monotonic()
    with server_process(repository):
        return time.monotonic() - began


def _kills(server: ServerProcess, processes: int, kills: int, clients: int, spell_s: float, seen: Seen) -> list[float]:
    """Kill a server's worker `kills` times under load; returns the seconds until it answered again, for each."""
    stop = threading.Event()
    threads = [threading.Thread(target=_ask, args=(server.address, number, stop, seen)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        return [_kill(server, processes, spell_s, seen.tally) for _ in range(kills)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _ask(address: str, seed: int, stop: threading.Event, seen: Seen) -> None:
    random, retries = np.random.default_rng(seed), bool(seed % 2)
    with Client(address, timeout_s=TIMEOUT_S, retries=PATIENT if retries else NO_RETRIES) as client:
        while not stop.is_set():
            try:
                ask_affine(client, random, seen.tally)
            except ClientError as error:
                if retries:
                    seen.retried_errors.append(f"{error.code}: {error}")
                else:
                    seen.errors[error.code] += 1
                    stop.wait(REFUSED_S)


def _until_all_serve(server: ServerProcess, processes: int) -> None:
    """Wait until all processes serve."""
    while processes > 1:
        with urllib.request.urlopen(f"http://{server.http_address}/metrics", timeout=PATIENCE_S) as answer:
            if f"halfserve_processes {processes}\n" in answer.read().decode():
                return
        time.sleep(LOOK_S)


def _kill(server: ServerProcess, processes: int, spell_s: float, tally: Tally) -> float:
    """Kill the worker; returns the seconds until the next one's first right answer."""
    _until_all_serve(server, processes)
    time.sleep(spell_s)
    worker = _worker(server)
    killed_s = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    while _is_alive(worker):
        time.sleep(0)
    ended_s = time.monotonic()
    while time.monotonic() - killed_s < PATIENCE_S:
        after = [asked_s + seconds for asked_s, seconds in tally.counted().latencies if asked_s > ended_s]
        if after:
            return min(after) - killed_s
        time.sleep(LOOK_S)
    raise SystemExit(f"no right answer within {PATIENCE_S:g} s; the server says:\n{server.log_text()}")


def _worker(server: ServerProcess) -> int:
    """Id of a current worker; of several, the one that has served longest."""
    pid = server.process.pid
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found[0])


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _figures(seen: Seen, recoveries_s: list[float], start_s: float, log: str, *, alone: bool) -> dict[str, Any]:
    counted = seen.tally.counted()
    loads_s = [float(seconds) for seconds in re.findall(r"serving again, ready in ([\d.]+) s", log)]
    waits_s = [float(seconds or 0) for seconds in re.findall(r"the next one starts (?:now|in ([\d.]+) s)", log)]
    if alone:  # with several processes, clients do not wait for the back-off
        recoveries_s = [whole - wait for whole, wait in zip(recoveries_s, waits_s, strict=True)]
    is_late = any(took > load + ALLOWED_S for took, load in zip(recoveries_s, loads_s, strict=True))
    is_good = not (counted.wrongs or seen.retried_errors or set(seen.errors) - {"UNAVAILABLE"} or is_late)
    return {
        "kills": len(recoveries_s),
        "right_answers": len(counted.latencies),
        "wrong_answers": counted.wrongs,
        "errors_of_retrying_clients": len(seen.retried_errors),
        "first_of_them": seen.retried_errors[:3],
        "errors_of_other_clients": dict(seen.errors),
        "plain_start_s": round(start_s, 2),
        "model_load_p50_s": round(float(np.median(loads_s)), 2),
        **{f"recovery_p{q}_s": round(float(np.percentile(recoveries_s, q)), 2) for q in (0, 50, 100)},
        "back_off_s": waits_s,
        "recoveries_s": [round(seconds, 2) for seconds in recoveries_s],
        "is_good": is_good,
    }


if __name__ == "__main__":
    typer.run(main)
