"""What the page shows, as JSON."""

from __future__ import annotations

import time
from dataclasses import astuple, fields
from typing import Any

from serve.engine.execution.instance import Instance
from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model, VersionStatus
from serve.engine.tensors import TensorSpec
from serve.http.answers import with_written, written_one_by_one
from serve.http.page.certificates import Certificates, summary
from serve.http.page.guard_state import guard_events, guard_state
from serve.http.page.history import INTERVAL_S, SAMPLES, History, Sample

SERIES = [field.name for field in fields(Sample)]


class State:
    """Puts together what the engine knows."""

    def __init__(self, core: InferenceCore, history: History, certificates: Certificates) -> None:
        self._core = core
        self._history = history
        self._certificates = certificates
        self._started = time.monotonic()

    async def read(self, since_s: float) -> str:
        """Everything as of now, as JSON, with the samples that end after `since_s`, in seconds since the epoch."""
        now_s, models = time.time(), self._core.models()
        certificates = {model: await self._certificates.of(model) for model in models}
        served = {(model.name, str(model.version)): model for model in self._core.models()}

        def entry(status: VersionStatus) -> dict[str, Any]:
            told: dict[str, Any] = {"name": status.name, "version": status.version}
            told |= {"state": str(status.state), "reason": status.reason}
            model = served.get((status.name, status.version))
            if model is not None:
                certificate = certificates.get(model)
                told |= _model(model)
                told["certificate"] = None if certificate is None else summary(certificate)
                # Of all models up to the same time: samples that come meanwhile are for who asks next.
                told["samples"] = [astuple(s) for s in self._history.of(model, since_s) if s.time_s <= now_s]
            return told

        entries = await written_one_by_one(map(entry, self._core.index()))
        content = {
            "ready": self._core.is_ready,
            "time_s": now_s,
            "uptime_s": time.monotonic() - self._started,
            "interval_s": INTERVAL_S,
            "kept_samples": SAMPLES,
            "series": SERIES,
            "events": guard_events(models),
        }
        return with_written(content, "models", entries)


def _model(model: Model) -> dict[str, Any]:
    s = model.statistics.totals
    return {
        "answers": model.is_ready,
        "provider": model.provider,
        "precision": model.precision,
        "max_batch_size": model.max_batch_size,
        "copies": [_copy(instance) for instance in model.batcher.instances],
        "inputs": [_tensor(spec) for spec in model.interface.inputs],
        "outputs": [_tensor(spec) for spec in model.interface.outputs],
        "requests": s.success.count,
        "failed": s.fail.count,
        "failures": dict(s.failures),
        "rows": s.rows,
        "batches": s.batches,
        "waiting": model.batcher.waiting,
        "batch_sizes": [[size, per_size.compute_infer.count] for size, per_size in sorted(s.by_batch_size.items())],
        "stages_ns": {
            "queue": s.queue.ns,
            "input": s.compute_input.ns,
            "compute": s.compute_infer.ns,
            "output": s.compute_output.ns,
        },
        "last_inference_ms": s.last_inference_ms,
        "guard": guard_state(model),
    }


def _copy(instance: Instance) -> dict[str, Any]:
    rows = instance.memory.rows
    return {"up": instance.is_up, "restarts": instance.restarts, "fault": instance.fault, "most_rows": rows}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype.wire, "shape": list(spec.shape)}
