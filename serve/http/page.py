"""The page for people: its files, the state that it shows, and certificates."""

from __future__ import annotations

import asyncio
import json
import math
import time
import weakref
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from halfserve.protos.certificates import SCHEMA
from halfserve.serve.engine.disk_files import read_certificate
from halfserve.serve.engine.errors import InvalidArgumentError, NotFoundError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model, VersionStatus
from halfserve.serve.engine.tensors import TensorSpec
from halfserve.serve.http.model_history import INTERVAL_S, SAMPLES, ModelHistory, ModelSample
from halfserve.serve.http.responses import dump_list, dump_up_to, json_response, json_text_response
from halfserve.serve.http.routing.route_table import serves
from halfserve.serve.http.tasks.tokenized_models import task_of
from halfserve.serve.protocol.rpc import DESCRIPTION, STATISTICS

STATIC_FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "models.js": "text/javascript; charset=utf-8",
    "certificate.js": "text/javascript; charset=utf-8",
    "tensors.js": "text/javascript; charset=utf-8",
    "try.js": "text/javascript; charset=utf-8",
}
# Only this server's own files, and no inline script or style, so that the name of a model cannot inject any.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {"content-security-policy": POLICY, "cache-control": "no-cache", "x-frame-options": "DENY"}
MAX_BYTES = 16 * 2**20
Certificate = dict[str, Any]
EVENTS = 50


class Page:
    def __init__(self, core: InferenceCore, whole: Page | None = None) -> None:
        """Make the page of these models; `whole` is the page of all models, whose history it shares."""
        self._core = core
        self._certificates: Certificates = Certificates() if whole is None else whole._certificates  # noqa: SLF001  (own class)
        self._history: ModelHistory = ModelHistory(core) if whole is None else whole._history  # noqa: SLF001  (as above)
        self._state = PageState(core, self._history, self._certificates)

    def restricted_to(self, core: InferenceCore) -> Page:
        """Return the page of some of the models, for a restricted token."""
        return Page(core, self)

    def start(self) -> None:
        """Start to record the history; on the event loop."""
        self._history.start()

    def stop(self) -> None:
        self._history.stop()

    @serves("GET", "/", DESCRIPTION)
    async def index(self, _: Request) -> Response:
        return _file("index.html")

    @serves("GET", "/ui/{file}", STATISTICS)
    async def file(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in STATIC_FILES:
            raise NotFoundError(f"the page has no file {name[:60]!r}")
        return _file(name)

    @serves("GET", "/ui/state", STATISTICS)
    async def state(self, request: Request) -> Response:
        """Return the state as JSON; ?since=<seconds since the epoch> leaves out older samples."""
        since = request.query_params.get("since", "0")
        try:
            since_s = float(since)
        except ValueError:
            raise InvalidArgumentError(f"since is {since[:40]!r}, expected seconds since the epoch") from None
        return json_text_response(await self._state.read(since_s))

    @serves("GET", "/ui/certificates/{model}/{version}", STATISTICS)
    async def certificate(self, request: Request) -> Response:
        model = self._core.model(request.path_params["model"], request.path_params["version"])
        return json_response(await self._certificates.full(model))


def _file(name: str) -> Response:
    return Response(_content(name), headers={**PAGE_HEADERS, "content-type": STATIC_FILES[name]})


@cache
def _content(name: str) -> bytes:
    return resources.files("halfserve.serve.http").joinpath("static", name).read_bytes()


class PageState:
    def __init__(self, core: InferenceCore, history: ModelHistory, certificates: Certificates) -> None:
        self._core = core
        self._history = history
        self._certificates = certificates
        self._started = time.monotonic()

    async def read(self, since_s: float) -> str:
        """Return the state now, with the samples that end after `since_s`, in seconds since the epoch."""
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


class Certificates:
    """Reads each model's certificate once, on a thread."""

    def __init__(self) -> None:
        self._read: dict[int, Certificate | None] = {}  # by the id() of a model's first copy, while that lives

    async def of(self, model: Model) -> Certificate | None:
        """Return a model version's certificate; None without one that belongs to it, as the load found out."""
        # An ensemble has none: its steps do.
        if not model.backends or "halfserve.certificate" not in model.config.parameters:
            return None
        copy = model.backends[0]  # not the model: a compiled class has no weak references
        if id(copy) not in self._read:
            path = model.path
            certificate = None if path is None else await asyncio.to_thread(certificate_of, path)
            self._read[id(copy)] = certificate
            weakref.finalize(copy, self._read.pop, id(copy), None).atexit = False
        return self._read[id(copy)]

    async def full(self, model: Model) -> Certificate:
        """Return a model version's certificate. Raises NotFoundError: it has none."""
        certificate = await self.of(model)
        if certificate is None:
            raise NotFoundError(
                f"version {model.version} of {model.name!r} has no certificate; `halfserve export` writes one beside the model"
            )
        return certificate


def certificate_of(model: Path) -> Certificate | None:
    """Return the certificate of a model file; None without a valid one. Loading has checked that it is the model's."""
    try:
        found = read_certificate(model)
        if found is None or len(found.content) > MAX_BYTES:
            return None
        content = json.loads(found.content)
        json.dumps(content, allow_nan=False)  # as it will be sent
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA else None


def summary(certificate: Certificate) -> dict[str, Any]:
    """Return the fields of a certificate that the state shows."""
    conversion = certificate.get("conversion")
    known = conversion if isinstance(conversion, dict) else {}
    return {
        "passed": certificate.get("passed") is True,
        "created": certificate.get("created_utc"),
        "samples": certificate.get("samples"),
        "fp16_nodes": known.get("fp16_nodes"),
        "float_nodes": known.get("float_nodes"),
    }


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
