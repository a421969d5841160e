"""The server whose settings are tuned: one of its own as a child process, or one that runs, by configurations that it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from google.protobuf import json_format

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.benchmark import BenchmarkArgumentError, BenchmarkError
from halfserve.serve.benchmark.level import Load, ServerTotals
from halfserve.serve.benchmark.load.load_generator import undisturbed
from halfserve.serve.benchmark.load.spec import INTERRUPTED
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.benchmark.tables import ProgressBar
from halfserve.serve.client.client import Client
from halfserve.serve.client.errors import ClientError, InvalidRequest
from halfserve.serve.engine.backend import ONNX
from halfserve.serve.engine.ensembles.graph import is_ensemble, step_models
from halfserve.serve.fleet.member.handover import end_with
from halfserve.serve.tuning.search import RefusedSettingsError, TuningPoint
from halfserve.serve.tuning.settings import Choice, SearchSpace, TunedAxis, TunedSettings, axes_of, configured, settings_of

LOAD_S = 600.0  # time limit of a load request
STOP_S = 30.0
WARM_UP_SHARE, LONGEST_WARM_UP_S = 0.5, 0.3
HALVES = ("float32", "bfloat16", "float16")


@contextmanager
def own_server(repository: Path, model: str, options: Sequence[str]) -> Iterator[str]:
    """Start a server of a repository that loads configurations by request; yields the address of gRPC.

    It is in a session of its own, so that Ctrl-C reaches only this process, which ends it after its last call. On Linux it ends
    with this process, however that ends.

    Raises:
        BenchmarkError: it does not start; the text has its last line.
    """
    command = [sys.executable, "-m", "halfserve", "serve", str(repository), "--json", "--model-control", "explicit"]
    command += ["--load-model", model, "--processes", "1", "--grpc-port", "0", "--http-port", "-1", "--metrics-port", "-1"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=partial(end_with, os.getpid()) if os.name == "posix" else None,  # noqa: PLW1509  (no thread runs yet)
        )
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
                raise BenchmarkError(f"the server to measure did not start: {said[-1]}")
            yield f"127.0.0.1:{json.loads(line)['grpc_port']}"
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


class TunedServer:
    """A server that loads a model, or the steps of an ensemble, with other settings, and is measured.

    Attributes:
        models: the models that are tuned: the model itself, or the steps of an ensemble.
        completed: the configuration in force at the start, of each of them.
        start: their settings.
        target: the load target.
    """

    def __init__(self, address: str, model: str, requests: RequestSettings, *, percent: float, bar: ProgressBar) -> None:
        """Connect, and try the requests; each measurement is shown on `bar`.

        Raises:
            ClientError: the server does not answer, has no such model, or refuses the requests.
            BenchmarkArgumentError: the model cannot be tuned, or the requests do not fit it.
        """
        self._address, self._requests, self._percent, self._bar = address, requests, percent, bar
        # Settings of each model whose load was asked for; None while it is not known which ones are in force.
        self._loaded: dict[str, TunedSettings | None] = {}
        with ExitStack() as stack:
            self._client = stack.enter_context(
                Client(address, timeout_s=LOAD_S, tls=requests.tls, token=requests.token, metadata=requests.metadata)
            )
            config = self._client.model_config(model, "")
            self.models = tuple(step_models(config)) or (model,)
            self.completed: tuple[ModelConfig, ...] = tuple(self._client.model_config(name, "") for name in self.models)
            for name, one in zip(self.models, self.completed, strict=True):
                _require_tunable(name, one)
            self.start: Choice = tuple(map(settings_of, self.completed))
            self.target = stack.enter_context(LoadTarget(address, [model], requests))
            # Each batch must be able to hold the rows of each request, and of an ensemble's batch.
            shapes = [tensor.shape for request in self.target.plain_requests for tensor in request.inputs if tensor.shape]
            self._rows = config.max_batch_size if is_ensemble(config) else max((shape[0] for shape in shapes), default=1)
            self._stack = stack.pop_all()

    def answer(self) -> bytes:
        """Return the outputs of a request, which differ where the model on a server does."""
        return b"".join(self._client.infer_message(self.target.plain_requests[0]).raw_output_contents)

    def space(self, cores: int, limit_ms: float) -> SearchSpace:
        """Return the settings to try with this number of cores and this latency limit."""
        axes: list[TunedAxis] = []
        for index, config in enumerate(self.completed):
            axes += axes_of(index, config, cores=cores, limit_ms=limit_ms, rows=self._rows)
            if len(precisions := self._precisions(index)) > 1:
                axes.append(TunedAxis(model=index, name="precision", values=precisions))
        return SearchSpace(models=self.models, axes=tuple(axes), start=self.start, cores=cores)

    def measure(self, choice: Choice, concurrency: int, seconds: float) -> TuningPoint:
        """Load the settings, and measure. Raises RefusedSettingsError: the server refuses them, or no request succeeds."""
        for index, settings in enumerate(choice):
            self._load(index, settings)
        how = Measurement(
            seconds=seconds,
            warmup_s=min(LONGEST_WARM_UP_S, seconds * WARM_UP_SHARE),
            timeout_s=self._requests.timeout_s,
            connections=self._requests.processes,
        )
        load = Load(concurrency=concurrency)
        try:
            level = measure(self.target.bench, load, how, lambda tally: self._bar.window(load, tally))
        except BenchmarkError as error:
            if not self._client.is_live():
                raise BenchmarkError(f"the server at {self._address} ended during a measurement: {error}") from None
            raise RefusedSettingsError(str(error)) from None
        if level.ended_early == INTERRUPTED:
            raise KeyboardInterrupt
        self._bar.done(level)
        server = level.server or ServerTotals()
        return TuningPoint(
            choice=choice,
            concurrency=concurrency,
            requests_per_second=level.requests_per_second,
            latency_ms=level.percentile_ms(self._percent),
            failed=level.failed,
            mean_batch_size=server.mean_batch_size,
            compute_ms=server.compute_ms,
        )

    def restore(self) -> None:
        """Load the configurations of the start again; show which models keep other settings."""
        with undisturbed():
            for name, config in zip(self.models, self.completed, strict=True):
                if name in self._loaded:
                    try:
                        self._ask_to_load(name, config)
                    except ClientError as error:
                        self._bar.note(f"model {name!r} keeps the settings that were measured last; load it again: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _load(self, index: int, settings: TunedSettings) -> None:
        """Load a model with settings. Raises RefusedSettingsError: the server refuses them, and serves as before."""
        name, config = self.models[index], self.completed[index]
        if self._loaded.get(name) == settings:
            return
        self._loaded[name] = None
        try:
            self._ask_to_load(name, configured(config, self.start[index], settings, config.backend))
        except InvalidRequest as error:
            raise RefusedSettingsError(str(error)) from None
        self._loaded[name] = settings

    def _ask_to_load(self, name: str, config: ModelConfig) -> None:
        fields = json_format.MessageToDict(config, preserving_proto_field_name=True)
        # JSON leaves a 0 out, which would mean the server's default.
        self._client.load_model(name, config={**fields, "max_batch_size": config.max_batch_size})

    def _precisions(self, index: int) -> tuple[str, ...]:
        """Return values of the precision that differ here in what is computed, of which a passed verdict allows each."""
        config, now = self.completed[index], self.start[index]
        if config.backend != ONNX.backend or _reported(config, "certificate") != "passed":
            return ()
        found = {_computed(config): now.precision}
        for precision in HALVES:
            try:
                self._load(index, replace(now, precision=precision))
            except RefusedSettingsError:
                continue
            found.setdefault(_computed(self._client.model_config(self.models[index], "")), precision)
        return tuple(sorted(found.values()))


def _require_tunable(name: str, config: ModelConfig) -> None:
    if config.HasField("sequence_batching"):
        raise BenchmarkArgumentError(
            f"model {name!r} keeps sequences, whose requests depend on each other; expected a model without sequence_batching"
        )
    if is_ensemble(config):
        raise BenchmarkArgumentError(f"model {name!r} is an ensemble among the steps of another; tune the two one by one")


def _reported(config: ModelConfig, key: str) -> str:
    """Return a parameter that the server reports of a loaded model; "" if it reports none, as Triton."""
    name = f"halfserve.{key}"
    return config.parameters[name].string_value if name in config.parameters else ""


def _computed(config: ModelConfig) -> tuple[str, str]:
    return _reported(config, "provider"), _reported(config, "precision")
