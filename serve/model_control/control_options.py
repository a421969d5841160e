"""Options for loading and unloading models while the server runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ALL = "*"


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
        load_at_start: models to load at the start in the mode EXPLICIT; `ALL` stands for all.
        poll_interval_s: seconds between two scans of the repository in the mode POLL.
        settle_s: seconds for which changed files must stay the same before they are loaded.
        keep_going: whether to start although some models cannot be served.
        uploads: whether load requests may bring model files.
        warm_up_budget_s: seconds for trying out all batch sizes of one model version; the check of batch invariance may take
            the same time again, and so may the proof that the version may be padded.
        load_limit_s: seconds for loading one model version and trying it out.
        certificate_key: PEM file of the Ed25519 public key that must have signed the models' certificates; None requires no
            signature.
        lame_duck_s: seconds after SIGTERM in which the server is not ready but still takes requests, so that load balancers
            stop sending requests before it refuses any.
    """

    mode: ControlMode = ControlMode.NONE
    load_at_start: tuple[str, ...] = ()
    poll_interval_s: float = 5.0
    settle_s: float = 1.0
    keep_going: bool = False
    uploads: bool = False
    warm_up_budget_s: float = 5.0
    load_limit_s: float = 1800.0
    certificate_key: Path | None = None
    lame_duck_s: float = 0.0
