"""Options for loading and unloading models while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path

from halfserve.serve.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

ALL = "*"
ALL_OR_NOTHING = "The server starts with all its models or not at all; --keep-going starts it with the others"


class ControlMode(StrEnum):
    """Selects the models that are served.

    NONE: the repository's models at the start. POLL: the repository's present models. EXPLICIT: clients, by RepositoryModelLoad
        and
    RepositoryModelUnload.
    """

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Selection and loading of models, and the shutdown of the server.

    Attributes:
        mode: see `ControlMode`.
        load_at_start: models to load at the start in the mode EXPLICIT, and with `on_demand`; `ALL` stands for all.
        poll_interval_s: seconds between two scans of the repository in the mode POLL; with `on_demand`, for new models.
        settle_s: seconds for which changed files must stay the same before they are loaded.
        keep_going: whether to start although some models cannot be served.
        uploads: whether load requests may bring model files.
        warm_up_budget_s: seconds for trying out all batch sizes of one model version; the check of batch invariance may take
            the same time again, and so may the proof that the version may be padded.
        load_limit_s: seconds for loading one model version, and again for trying it out.
        load_threads: number of models that load at once; 0 for the number of processors, and half of it beside requests.
        certificate_key: PEM file of the Ed25519 public key that must have signed the models' certificates; None requires no
            signature.
        lame_duck_s: seconds after SIGTERM in which the server is not ready but still takes requests, so that load balancers
            stop sending requests before it refuses any.
        needs_config: whether a model whose configuration lacks platform, inputs or outputs is refused.
        on_demand: whether a request loads its model; not in the mode POLL. The server then starts with `load_at_start` and
            pinned models alone.
        idle_unload_s: seconds after which a model without requests is unloaded, with `on_demand`; 0 for never.
        max_loaded_bytes: most bytes of all loaded models, with `on_demand`; 0 for no bound.
        config_name: name of the configurations to prefer: configs/<config_name>.pbtxt in a model's folder.
    """

    mode: ControlMode = ControlMode.NONE
    load_at_start: tuple[str, ...] = ()
    poll_interval_s: float = 5.0
    settle_s: float = 1.0
    keep_going: bool = False
    uploads: bool = False
    warm_up_budget_s: float = 5.0
    load_limit_s: float = 1800.0
    load_threads: int = 0
    certificate_key: Path | None = None
    lame_duck_s: float = 0.0
    needs_config: bool = False
    config_name: str = ""
    on_demand: bool = False
    idle_unload_s: float = 0.0
    max_loaded_bytes: int = 0

    @property
    def loads_some(self) -> bool:
        """Whether the server starts with some of the repository's models, and loads others by request or on demand."""
        return self.on_demand or self.mode is ControlMode.EXPLICIT


def start_error(refused: Mapping[str, Sequence[ModelLoadError]], *, has_others: bool) -> ModelLoadError:
    """Return the error that ends the start of a server without `keep_going`. Several reasons are logged.

    Args:
        refused: reasons by the name of the model that cannot be served; steps of ensembles come before the ensembles.
        has_others: whether other models can be served.
    """
    reasons = list(dict.fromkeys(map(str, chain.from_iterable(refused.values()))))  # an ensemble may repeat that of its step
    if len(reasons) == 1:
        end = "" if reasons[0].endswith(("?", ".")) else "."
        return ModelLoadError(f"{reasons[0]}{end} {ALL_OR_NOTHING}" if has_others else reasons[0])
    for reason in reasons:
        logger.error("%s", reason)
    count = f"{len(refused)} models" if len(refused) > 1 else f"the model {next(iter(refused))!r}"
    summary = f"{count} cannot be served, for the reasons above"
    return ModelLoadError(f"{summary}. {ALL_OR_NOTHING}" if has_others else summary)
