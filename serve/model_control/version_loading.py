"""Makes model versions ready to serve: checks, loads, tries out and starts each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from halfserve.protos.certificate_signature import VerifyingKey
from halfserve.serve.engine.backend import CPU_PROVIDERS, ENSEMBLE, Backend, DevicePlacement, ModelKind, Runtime
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.config.model_config import DeclaredConfig, Defaults
from halfserve.serve.engine.config.parameters import ignored_settings
from halfserve.serve.engine.ensembles.graph import is_ensemble
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_ensemble, load_version, started
from halfserve.serve.engine.repository.model_repository import ModelFiles
from halfserve.serve.model_control.certificate_check import check_certificate
from halfserve.serve.model_control.loader_thread import GIVEN_UP
from halfserve.serve.trials.at_load import try_out
from halfserve.serve.trials.recorded_samples import VERDICT_KEY, report_sample_shapes
from halfserve.serve.trials.tried_version import TriedVersion
from halfserve.serve.trials.warm_up import settle

logger = logging.getLogger(__name__)


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
        return self._tried_out(self.loaded(files))

    def loaded(self, files: ModelFiles) -> Model:
        """Check and load one version; an ensemble is not yet connected to its steps. May be called on any thread.

        Raises:
            ModelLoadError: the version cannot be loaded; the message gives the reason.
        """
        if is_ensemble(files.config.message):
            _warn_of_ignored(files.config, ENSEMBLE, on_device=False)
            return load_ensemble(files, self.defaults)
        try:
            verdict = check_certificate(files.model, files.config, self.certificate_key)
            pause()
            model = load_version(files, self.runtime, self.placement, self.defaults)
        except MemoryError:
            raise _short_of_memory(files.model) from None
        _report_ignored(model)
        _report_certificate(model, verdict)
        return model

    def ready(self, loaded: Model) -> Model:
        """Try out and start a version that `loaded` has returned. May be called on any thread.

        Copies on a device run every batch size on their own threads first, because devices keep recordings by thread.

        Raises:
            ModelLoadError: the version cannot be served; the message gives the reason.
        """
        if loaded.interface.kind is ENSEMBLE:
            return loaded
        self._tried_out(loaded)
        again = None if loaded.reload is None else partial(self._reloaded, loaded, loaded.reload)
        model = started(replace(loaded, reload=again))  # a copy: `again` must not refer to the model that has it
        tried = TriedVersion(loaded, self.warm_up_budget_s)
        try:
            for instance, backend in zip(model.instances, model.backends, strict=True):
                instance.settle(partial(settle, tried, backend))
        except BaseException:
            for instance in model.instances:
                instance.stop()
            raise
        return model

    def _tried_out(self, model: Model) -> Model:
        if (given_up := GIVEN_UP.get()) is not None:
            for backend in model.backends:
                given_up.when_set(backend.give_up)
        pause()
        try:
            try_out(TriedVersion(model, self.warm_up_budget_s))
        except MemoryError:
            raise _short_of_memory(model.path) from None
        return model

    def _reloaded(self, model: Model, again: Callable[[int], Backend], number: int) -> Backend:
        backend = again(number)
        settle(TriedVersion(model, self.warm_up_budget_s), backend)
        return backend


def _short_of_memory(path: Path | None) -> ModelLoadError:
    return ModelLoadError(f"{path}: not enough memory to load it; unload another model first")


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
    report_sample_shapes(model)
    if verdict == "failed":
        logger.warning("%s: its certificate says that it is less accurate than its budget allows", model.path)
