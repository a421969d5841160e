"""How models come and go while the server runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ALL = "*"


class ControlMode(StrEnum):
    """Who says which models are served.

    NONE: what the repository holds at the start, until the end. POLL: what it holds at any time. EXPLICIT: who asks for it, by
    RepositoryModelLoad and RepositoryModelUnload.
    """

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Which models are served, how they are made ready, and how the server takes its leave.

    Attributes:
        mode: see `ControlMode`.
        load_at_start: models to load at the start in the mode EXPLICIT; `ALL` stands for all.
        poll_interval_s: seconds between two looks at the repository in the mode POLL.
        settle_s: seconds for which a change must have stayed as it is before it is acted on.
        keep_going: start with what can be served where a model cannot.
        uploads: whether a load request may bring model files along, in place of the repository's.
        warm_up_budget_s: seconds that trying out all batch sizes of one model version may take in all; looking whether its rows
            depend on each other may take as many again.
        load_limit_s: seconds that loading one model version and trying it out may take in all.
        lame_duck_s: seconds after SIGTERM in which the server says that it is not ready and still takes requests, so that load
            balancers find out before clients do.
    """

    mode: ControlMode = ControlMode.NONE
    load_at_start: tuple[str, ...] = ()
    poll_interval_s: float = 5.0
    settle_s: float = 1.0
    keep_going: bool = False
    uploads: bool = False
    warm_up_budget_s: float = 5.0
    load_limit_s: float = 1800.0
    lame_duck_s: float = 0.0
