"""The server whose settings are tuned: one of its own as a child process, or one that runs, by configurations that it loads."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from google.protobuf import json_format

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.benchmark.level import Level, Load
from halfserve.serve.benchmark.load.load_generator import undisturbed
from halfserve.serve.benchmark.load.spec import INTERRUPTED
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.benchmark.tables import ProgressBar
from halfserve.serve.client.client import Client
from halfserve.serve.client.errors import ClientError, InvalidRequest
from halfserve.serve.engine.backend import ONNX
from halfserve.serve.engine.ensembles.graph import is_ensemble, step_models
from halfserve.serve.tuning import TuningArgumentError, TuningError
from halfserve.serve.tuning.search import RefusedSettingsError, TuningPoint
from halfserve.serve.tuning.settings import Choice, SearchSpace, TunedAxis, TunedSettings, axes_of, configured, settings_of

LOAD_S = 600.0  # time limit of a load request
STOP_S = 30.0
WARM_UP_SHARE, LONGEST_WARM_UP_S = 0.5, 0.3
HALVES = ("float32", "bfloat16", "float16")


@contextmanager
def own_server(repository: Path, model: str, options: Sequence[str]) -> Iterator[str]:
    """Start a server of a repository that loads configurations by request; yields the address of gRPC.

    It is in a session of its own, so that Ctrl-C reaches only this process, which ends it after its last call.

    Raises:
        TuningError: it does not start; the text has its last line.
    """
    command = [sys.executable, "-m", "halfserve", "serve", str(repository), "--json", "--model-control", "explicit"]
    command += ["--load-model", model, "--processes", "1", "--grpc-port", "0", "--http-port", "-1", "--metrics-port", "-1"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
                raise TuningError(f"the server to measure did not start: {said[-1]}")
            yield f"127.0.0.1:{json.loads(line)['grpc_port']}"
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


class TunedServer:
    """A server that loads a model, or the steps of an ensemble, with other settings, and is measured.

    Attributes:
        models: the models that are tuned: the model itself, or the steps of an ensemble.
        completed: the configuration in force at the start, of each of them.
        start: the tuned settings in it.
        bases: configurations that settings are put into: the completed ones, or what files declare.
        processes: load processes, each with a connection.
        progress: shows each load; nothing is on the screen until it begins.
    """

    def __init__(self, address: str, model: str, requests: RequestSettings, *, percent: float, processes: int) -> None:
        """Connect.

        Raises:
            ClientError: the server does not answer, or has no such model.
            TuningArgumentError: the model cannot be tuned.
        """
        self._address, self._model, self._requests = address, model, requests
        self._percent, self.processes = percent, processes
        self._target: LoadTarget | None = None
        self._client = Client(address, timeout_s=LOAD_S, tls=requests.tls, token=requests.token, metadata=requests.metadata)
        try:
            config = self._client.model_config(model, "")
            self.models = tuple(step_models(config)) or (model,)
            self._is_batched = config.max_batch_size > 0
            self._fewest_rows = config.max_batch_size if is_ensemble(config) else 1
            self.completed: tuple[ModelConfig, ...] = tuple(self._client.model_config(name, "") for name in self.models)
            for name, one in zip(self.models, self.completed, strict=True):
                _require_tunable(name, one)
        except BaseException:
            self._client.close()
            raise
        self.start: Choice = tuple(map(settings_of, self.completed))
        self.bases: tuple[ModelConfig, ...] = self.completed
        self.progress = ProgressBar()
        self._loaded: dict[str, TunedSettings] = {}  # settings of each model that was loaded with some
        self._touched: set[str] = set()  # models whose loads were asked for, completed or not

    @property
    def target(self) -> LoadTarget:
        """The load target. Raises BenchmarkArgumentError or ClientError: the requests do not fit the model."""
        if self._target is None:
            self._target = LoadTarget(self._address, [self._model], self._requests)
        return self._target

    def answer(self) -> bytes:
        """Return the outputs of a request, which differ where the model on a server does."""
        outputs = self.target.client.infer_message(self.target.plain_requests[0]).raw_output_contents
        return b"".join(outputs)

    def space(self, cores: int, limit_ms: float) -> SearchSpace:
        """Return what may be tried with so many cores and this latency limit.

        Each batch must be able to hold the rows of each request, and of an ensemble's batch.
        """
        shapes = [tensor.shape for request in self.target.plain_requests for tensor in request.inputs]
        rows = max(self._fewest_rows, *(int(shape[0]) for shape in shapes if shape and self._is_batched), 1)
        axes: list[TunedAxis] = []
        for index, config in enumerate(self.completed):
            found = self._precisions(index)
            axes += axes_of(index, config, cores=cores, limit_ms=limit_ms, rows=rows, precisions=found)
        return SearchSpace(models=self.models, axes=tuple(axes), start=self.start, cores=cores)

    def load(self, index: int, settings: TunedSettings) -> None:
        """Load a model with settings. Raises RefusedSettingsError: the server refuses them, and serves as before."""
        name = self.models[index]
        if self._loaded.get(name) == settings:
            return
        config = configured(self.bases[index], self.start[index], settings, self.completed[index].backend)
        self._touched.add(name)
        try:
            self._client.load_model(name, config=_as_json(config, settings.max_batch_size))
        except InvalidRequest as error:
            raise RefusedSettingsError(str(error)) from None
        self._loaded[name] = settings

    def measure(self, choice: Choice, load: Load, seconds: float) -> TuningPoint:
        """Load the settings, and measure. Raises RefusedSettingsError: the server refuses them, or no request succeeds."""
        for index, settings in enumerate(choice):
            self.load(index, settings)
        how = Measurement(
            seconds=seconds,
            warmup_s=min(LONGEST_WARM_UP_S, seconds * WARM_UP_SHARE),
            timeout_s=self._requests.timeout_s,
            percent=self._percent,
            connections=self.processes,
        )
        try:
            level = measure(self.target.bench, load, how, lambda tally: self.progress.window(load, tally))
        except BenchmarkError as error:
            if not self._client.is_live():
                raise TuningError(f"the server at {self._address} ended during a measurement: {error}") from None
            raise RefusedSettingsError(str(error)) from None
        if level.ended_early == INTERRUPTED:
            raise KeyboardInterrupt
        self.progress.done(level)
        return _point(choice, level, self._percent)

    def restore(self) -> list[str]:
        """Load the configurations of the start again; returns a line for each model that has kept other settings."""
        trouble = []
        with undisturbed():
            for name, config in zip(self.models, self.completed, strict=True):
                if name not in self._touched:
                    continue
                try:
                    self._client.load_model(name, config=_as_json(config, config.max_batch_size))
                except ClientError as error:
                    trouble.append(f"model {name!r} keeps the settings that were measured last; load it again: {error}")
        self._loaded.clear()
        self._touched.clear()
        return trouble

    def close(self) -> None:
        if self._target is not None:
            self._target.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _precisions(self, index: int) -> list[str]:
        """Return values of the precision that differ here in what is computed, of which a passed verdict allows each."""
        config, now = self.completed[index], self.start[index]
        if config.backend != ONNX.backend or _reported(config, "certificate") != "passed":
            return []
        found = {_computed(config): now.precision}
        for precision in HALVES:
            try:
                self.load(index, replace(now, precision=precision))
            except RefusedSettingsError:
                continue
            found.setdefault(_computed(self._client.model_config(self.models[index], "")), precision)
        return list(found.values())


def _require_tunable(name: str, config: ModelConfig) -> None:
    if config.HasField("sequence_batching"):
        raise TuningArgumentError(
            f"model {name!r} keeps sequences, whose requests depend on each other; expected a model without sequence_batching"
        )
    if is_ensemble(config):
        raise TuningArgumentError(f"model {name!r} is an ensemble among the steps of another; tune the two one by one")


def _reported(config: ModelConfig, key: str) -> str:
    """Return a parameter that the server reports of a loaded model; "" if it reports none, as Triton."""
    name = f"halfserve.{key}"
    return config.parameters[name].string_value if name in config.parameters else ""


def _computed(config: ModelConfig) -> tuple[str, str]:
    return _reported(config, "provider"), _reported(config, "precision")


def _as_json(config: ModelConfig, max_batch_size: int) -> Mapping[str, Any]:
    """Return the JSON of a configuration, with the batch size in it where it is 0 too."""
    return {**json_format.MessageToDict(config, preserving_proto_field_name=True), "max_batch_size": max_batch_size}


def _point(choice: Choice, level: Level, percent: float) -> TuningPoint:
    server = level.server
    return TuningPoint(
        choice=choice,
        load=level.load,
        rate=level.requests_per_second,
        latency_ms=level.percentile_ms(percent),
        failed=level.failed,
        batch_rows=server.mean_batch_size if server else None,
        compute_ms=server.compute_ms if server else None,
    )
