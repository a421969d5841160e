"""Make one model version ready to be served: check it, load it, try it out."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from serve.control.certificate_check import check_certificate
from serve.control.memory_check import require_memory
from serve.control.neighbours import look_at_neighbours
from serve.control.short_sizes import short_sizes
from serve.control.warm_up import warm_up
from serve.engine.backend import CPU_PROVIDERS, Placement, Runtime
from serve.engine.configuration.config import Defaults
from serve.engine.configuration.ignored_settings import ignored_settings
from serve.engine.errors import ModelLoadError
from serve.engine.pauses import pause
from serve.engine.repository.loaded_version import LoadedVersion, load_version
from serve.engine.repository.model_repository import ModelFiles

logger = logging.getLogger(__name__)

QUICK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Loader:
    """How model versions are made ready.

    Attributes:
        runtime: reads the files.
        placement: where models run.
        defaults: for what a model's configuration does not say.
        warm_up_budget_s: seconds that trying out all batch sizes of a version may take, and looking at two rows as many again.
    """

    runtime: Runtime
    placement: Placement
    defaults: Defaults
    warm_up_budget_s: float

    def load(self, files: ModelFiles) -> LoadedVersion:
        """Check, load and try out one version. Any thread may do it.

        Raises:
            ModelLoadError: it cannot be served; the text says why.
        """
        try:
            verdict = check_certificate(files.model)
            require_memory(files.model, sum(max(1, group.count) for group in files.config.message.instance_group))
            pause()
            version = load_version(files, self.runtime, self.placement, self.defaults)
            _report_ignored(version)
            _report_certificate(version, verdict)
            pause()
            began = time.monotonic()
            warm_up(version, self.warm_up_budget_s)
            look_at_neighbours(version, self.warm_up_budget_s)
            is_quick = time.monotonic() - began < QUICK_S  # otherwise its batches are not short, and need not be run again
            short_s = short_sizes(version) if is_quick else {}
        except MemoryError:
            raise ModelLoadError(f"{files.model}: not enough memory to load it; unload another model first") from None
        return replace(version, short_s=short_s)


def _report_ignored(version: LoadedVersion) -> None:
    declared = version.files.config
    on_device = any(backend.provider not in CPU_PROVIDERS for backend in version.backends)
    ignored = ignored_settings(declared.message, version.interface.kind, on_device=on_device)
    if ignored:
        logger.warning("%s: no effect here: %s", declared.source, ", ".join(ignored))


def _report_certificate(version: LoadedVersion, verdict: str | None) -> None:
    if verdict is None:
        return
    version.config.parameters["halfserve.certificate"].string_value = verdict
    if verdict == "failed":
        logger.warning("%s: its certificate says that it is less accurate than its budget allows", version.files.model)
