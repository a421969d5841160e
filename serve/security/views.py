"""What holders see of a service who may use some models only."""

from __future__ import annotations

from collections.abc import Iterable

from serve.protocol.service import LimitedService, Service
from serve.security.model_rights import ModelRights


class Views:
    """One view for all who may use the same models; made when the first of them comes. On the event loop only."""

    def __init__(self) -> None:
        self._made: dict[tuple[Service, ModelRights], LimitedService] = {}

    def of(self, service: Service, rights: ModelRights) -> Service:
        """What is seen of a service."""
        view = self._made.get((service, rights))
        if view is None:
            view = self._made[service, rights] = LimitedService(service, rights.allow)
        return view

    def keep(self, rights: Iterable[ModelRights | None]) -> None:
        """Let go of the views for all rights but these."""
        kept = set(rights)
        for key in [key for key in self._made if key[1] not in kept]:
            self._made.pop(key).close()

    def __len__(self) -> int:
        return len(self._made)
