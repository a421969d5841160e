"""Makes model versions ready to serve: checks, loads, tries out and starts each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from halfserve.protos.certificate_signature import VerifyingKey
from halfserve.serve.backends.onnx_runtime.onnx_file import data_bytes, open_onnx
from halfserve.serve.engine.backend import CPU_PROVIDERS, ENSEMBLE, Backend, DevicePlacement, ModelKind, Runtime
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.config.model_config import DeclaredConfig, Defaults
from halfserve.serve.engine.config.parameters import ignored_settings
from halfserve.serve.engine.ensembles.graph import is_ensemble
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_ensemble, load_version, started
from halfserve.serve.engine.repository.model_repository import ModelFiles
from halfserve.serve.engine.resource_limits import available_bytes
from halfserve.serve.model_control.certificate_check import check_certificate
from halfserve.serve.model_control.loader_thread import GIVEN_UP
from halfserve.serve.trials.at_load import try_out
from halfserve.serve.trials.recorded_samples import VERDICT_KEY
from halfserve.serve.trials.tried_version import TriedVersion
from halfserve.serve.trials.warm_up import settle

logger = logging.getLogger(__name__)


MB = 1e6


@dataclass(frozen=True, kw_only=True)
class VersionLoader:
    """Makes model versions ready to serve.

    Attributes:
        runtime: reads and loads the model files.
        placement: device and precision for models.
        defaults: settings that a model's configuration leaves open.
        warm_up_budget_s: see `ControlOptions`.
        certificate_key: public key that must have signed the models' certificates; None requires no signature.
    """

    runtime: Runtime
    placement: DevicePlacement
    defaults: Defaults
    warm_up_budget_s: float
    certificate_key: VerifyingKey | None = None

    def load(self, files: ModelFiles) -> Model:
        """Check, load and try out one version, which is not started yet. May be called on any thread.

        Raises:
            ModelLoadError: the version cannot be served; the message gives the reason.
        """
        try:
            verdict = check_certificate(files.model, files.config, self.certificate_key)
            require_memory(files.model, sum(max(1, group.count) for group in files.config.message.instance_group))
            pause()
            model = load_version(files, self.runtime, self.placement, self.defaults)
            if (given_up := GIVEN_UP.get()) is not None:
                for backend in model.backends:
                    given_up.when_set(backend.give_up)
            _report_ignored(model)
            _report_certificate(model, verdict)
            pause()
            try_out(TriedVersion(model, self.warm_up_budget_s))
        except MemoryError:
            raise ModelLoadError(f"{files.model}: not enough memory to load it; unload another model first") from None
        return model

    def model(self, files: ModelFiles) -> Model:
        """Load and start one version; an ensemble is not yet connected to its steps. May be called on any thread.

        Copies on a device run every batch size on their own threads first, because devices keep recordings by thread.

        Raises:
            ModelLoadError: the version cannot be served; the message gives the reason.
        """
        if is_ensemble(files.config.message):
            _warn_of_ignored(files.config, ENSEMBLE, on_device=False)
            return load_ensemble(files, self.defaults)
        loaded = self.load(files)
        again = None if loaded.reload is None else partial(self._reloaded, loaded, loaded.reload)
        model = started(replace(loaded, reload=again))  # a copy: `again` must not refer to the model that has it
        tried = TriedVersion(loaded, self.warm_up_budget_s)
        try:
            for instance, backend in zip(model.batcher.instances, model.backends, strict=True):
                instance.settle(partial(settle, tried, backend))
        except BaseException:
            for instance in model.batcher.instances:
                instance.stop()
            raise
        return model

    def _reloaded(self, model: Model, again: Callable[[int], Backend], number: int) -> Backend:
        backend = again(number)
        settle(TriedVersion(model, self.warm_up_budget_s), backend)
        return backend


def _report_ignored(model: Model) -> None:
    on_device = any(backend.provider not in CPU_PROVIDERS for backend in model.backends)
    _warn_of_ignored(model.declared, model.interface.kind, on_device=on_device)


def _warn_of_ignored(declared: DeclaredConfig, kind: ModelKind, *, on_device: bool) -> None:
    ignored = ignored_settings(declared.message, kind, on_device=on_device)
    if ignored:
        logger.warning("%s: no effect here: %s", declared.source, ", ".join(ignored))


def _report_certificate(model: Model, verdict: str | None) -> None:
    if verdict is None:
        return
    model.config.parameters[VERDICT_KEY].string_value = verdict
    if verdict == "failed":
        logger.warning("%s: its certificate says that it is less accurate than its budget allows", model.path)


def require_memory(model: Path, copies: int) -> None:
    """Check that memory suffices for a model file and its data files, once per copy, which is the least that the model takes.

    Raises:
        ModelLoadError: memory does not suffice.
    """
    available = available_bytes()
    if available is None:
        return
    needed = _weights_bytes(model) * max(1, copies)
    if needed > available:
        raise ModelLoadError(
            f"{model}: not enough memory: it takes at least {needed / MB:.0f} MB, {available / MB:.0f} MB are available; "
            "unload another model, or ask for fewer copies (instance_group)"
        )


def _weights_bytes(model: Path) -> int:
    """Return the size of the model file, its data files, and files beside it that begin with its name (model.onnx.data)."""
    beside = {path for path in model.parent.iterdir() if path.name.startswith(model.name)}
    if model.suffix == ".xml":  # OpenVINO's weights
        beside.add(model.with_suffix(".bin"))
    locations, read = _data(model)
    named = {model.parent / name for name in locations}
    return _size(beside - named) + max(_size(named), read)


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _data(model: Path) -> tuple[frozenset[str], int]:
    """Return the data files, and the bytes that tensors read from them: more than the files' size if several read the same
    bytes.
    """
    try:
        with open_onnx(model) as opened:
            return opened.data_files, data_bytes(opened.model, model)
    except ModelLoadError:  # or it is another kind of model; loading it reports the error
        return frozenset(), 0
