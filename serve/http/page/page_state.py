"""The state that the page shows, as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model, VersionStatus
from halfserve.serve.engine.model_statistics import EDGES_NS
from halfserve.serve.engine.tensors import TensorSpec
from halfserve.serve.http.page.certificates import Certificates, summary
from halfserve.serve.http.page.model_history import INTERVAL_S, SAMPLES, ModelHistory, ModelSample
from halfserve.serve.http.responses import dump_list, dump_up_to
from halfserve.serve.http.tasks.picture_routes import IMAGE_CLASSIFICATION
from halfserve.serve.http.tasks.tokenized_models import task_of

EVENTS = 50


class PageState:
    def __init__(self, core: InferenceCore, history: ModelHistory, certificates: Certificates) -> None:
        self._core = core
        self._history = history
        self._certificates = certificates
        self._started = time.monotonic()

    async def read(self, since_s: float, holder: str = "") -> str:
        """Return the state now, as JSON.

        Args:
            since_s: time before which samples are left out, in seconds since the epoch.
            holder: name of the token's holder; "" without a token.
        """
        now_s, models = time.time(), self._core.models()
        certificates = {model: await self._certificates.of(model) for model in models}
        served = {(model.name, str(model.version)): model for model in self._core.models()}

        def entry(status: VersionStatus) -> dict[str, Any]:
            content: dict[str, Any] = {"name": status.name, "version": status.version}
            content |= {"state": str(status.state), "reason": status.reason}
            model = served.get((status.name, status.version))
            if model is not None:
                certificate = certificates.get(model)
                content |= _model(model)
                if self._core.hides_steps(model):
                    content["steps"] = []
                content["certificate"] = None if certificate is None else summary(certificate)
                # All models end at the same time: later samples are for the next call.
                content["latencies"] = self._history.latencies(model)
                content["samples"] = [s for s in self._history.of(model, since_s) if s.time_s <= now_s]
            return content

        entries = await dump_list(map(entry, self._core.index()))
        content = {
            "ready": self._core.is_ready,
            "time_s": now_s,
            "uptime_s": time.monotonic() - self._started,
            "interval_s": INTERVAL_S,
            "kept_samples": SAMPLES,
            "series": ModelSample._fields,
            "latency_edges_ms": [edge / 1e6 for edge in EDGES_NS],
            "holder": holder,
            "events": guard_events(models),
        }
        return f"{dump_up_to(content, 'models')}{entries}}}"


def _model(model: Model) -> dict[str, Any]:
    s = model.statistics.totals
    return {
        "answers": model.is_ready,
        "provider": model.provider,
        "precision": model.precision,
        "measured": model.measured,
        "max_batch_size": model.max_batch_size,
        "steps": [] if model.composition is None else list(model.composition.parts),
        "copies": [
            {"up": one.is_up, "restarts": one.restarts, "fault": one.fault, "most_rows": one.most_rows}
            for one in model.instances
        ],
        "inputs": [_tensor(spec) for spec in model.interface.inputs],
        "outputs": [{**_tensor(spec), "labelled": bool(model.labels_of(spec.name))} for spec in model.interface.outputs],
        "task": task_of(model),
        "classifies_pictures": bool(model.pictures) and task_of(model) == IMAGE_CLASSIFICATION,
        "requests": s.success.count,
        "failed": s.fail.count,
        "failures": dict(s.failures),
        "rows": s.rows,
        "batches": s.batches,
        "waiting": model.waiting,
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


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype.wire, "shape": list(spec.shape)}


def guard_state(model: Model) -> dict[str, Any] | None:
    """Return the precision guard's counters of one model version; None without a guard."""
    if model.guard is None:
        return None
    counters = model.guard.counters()
    outputs = counters.outputs.values()
    drift = [output.drift for output in outputs if output.drift is not None]
    rows = sum(output.rows_compared for output in outputs)
    return {
        "policy": counters.policy,
        "degraded": counters.degraded,
        "non_finite_requests": sum(output.non_finite_requests for output in outputs),
        "from_inputs": sum(output.from_inputs for output in outputs),
        "rejected": counters.rejected,
        "fallbacks": counters.fallbacks,
        "shadow_runs": counters.shadow_runs,
        "threshold": _finite(counters.drift_threshold),
        "agreement": sum(output.rows_agreeing for output in outputs) / rows if rows else None,
        "drift": [{"bounds": [_finite(bound) for bound in entry.bounds], "counts": list(entry.counts)} for entry in drift],
    }


def guard_events(models: Iterable[Model]) -> list[dict[str, Any]]:
    """Return the latest events of all models, newest first."""
    events = [event for model in models if model.guard is not None for event in model.guard.recent_events()]
    events.sort(key=lambda event: event.time, reverse=True)
    return [{"time_s": e.time, "model": e.model, "kind": str(e.kind), "text": e.text} for e in events[:EVENTS]]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
