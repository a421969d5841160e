from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from serve.engine.errors import FailedPreconditionError
from serve.engine.inference_core import InferenceCore
from serve.observability.observability import Observability
from serve.observability.options import AccessLog, ObserveOptions


async def observe(options: ObserveOptions) -> Observability:
    return Observability(options, InferenceCore([]), str)


@pytest.mark.parametrize("log", AccessLog, ids=str)
def test_requests_see_an_observer_only_while_something_is_on(log: AccessLog, tmp_path: Path) -> None:
    async def run() -> None:
        observability = await observe(ObserveOptions(access_log=log, access_log_file=tmp_path / "access.log"))
        seen = [observability.observer]
        for mode in ("off", "errors"):
            observability.update_logs({"access_log": mode})
            seen.append(observability.observer)
        observability.close()
        seen.append(observability.observer)
        assert [observer is None for observer in seen] == [log is AccessLog.OFF, True, False, True]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            ObserveOptions(access_log_file=Path("/no/such/access.log")),
            "the access log cannot be written to /no/such/access.log",
        ),
        (ObserveOptions(trace_to="/no/such/traces.json"), "traces cannot be written to /no/such/traces.json"),
    ],
    ids=["access-log", "traces"],
)
def test_a_place_that_cannot_be_written_is_told_at_the_start(options: ObserveOptions, what: str) -> None:
    with pytest.raises(FailedPreconditionError) as refused:
        asyncio.run(observe(options))
    assert str(refused.value) == f"{what}: /no/such is no folder; choose another file"


def test_what_is_not_asked_for_is_not_imported() -> None:
    program = (
        "import sys, serve.server; print([m for m in ('prometheus_client', 'opentelemetry', 'pynvml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
