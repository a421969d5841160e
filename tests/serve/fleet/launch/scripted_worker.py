"""A worker that does as it is told: python scripted_worker.py DEED DEED ... / DEED ..., one deed for each start in a place.

load is never ready, and ends as signals have it; exit:3 ends with this code and was never ready, nor was die:9, which is killed
by this signal, nor fork:3, which leaves a process behind that holds all its files; served:3 and killed:9 were. serve tells of
each signal and ends at SIGTERM with code 0; leave:3 does so with another code; stubborn does not end. Each start is told on
standard output, with what is known then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # at once, also from within a signal's handler


def stay(told: dict[str, Any], deed: str, code: int) -> None:
    def receive(number: int, frame: object) -> None:
        tell("got", signal.Signals(number).name)
        if number == signal.SIGTERM and deed != "stubborn":
            os._exit(code)

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, receive)
    os.write(told["ready"], b"\n")
    threading.Thread(target=outlive, args=(told["lifeline"],), daemon=True).start()
    tell("ready", os.getpid(), told["place"])
    while True:  # not signal.pause, which misses a signal that comes just before it
        time.sleep(0.05)


def outlive(lifeline: int) -> None:
    os.read(lifeline, 1)
    try:
        tell("orphaned")
    finally:  # also where nobody listens any more
        os._exit(0)


def main(*deeds: str) -> None:
    told = json.loads(os.environ["HALFSERVE_SUPERVISED"])
    of_place = " ".join(deeds).split(" / ")[told["place"] - 1].split()
    deed, _, given = of_place[told["restarts"]].partition(":")
    number = int(given or 0)
    tell("start", told["restarts"], os.getpid(), told["place"])
    if deed in {"serve", "leave", "stubborn"}:
        stay(told, deed, number)
    while deed == "load":
        signal.pause()
    if deed == "fork" and os.fork() == 0:
        outlive(told["lifeline"])
    if deed in {"served", "killed"}:
        os.write(told["ready"], b"\n")
    if deed in {"die", "killed"}:
        os.kill(os.getpid(), number)
    os._exit(number)


if __name__ == "__main__":
    main(*sys.argv[1:])
