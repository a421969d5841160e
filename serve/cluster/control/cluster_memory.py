"""What a cluster shall serve, as its users have ordered it; kept by all agents for the next controller."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.cluster.control.ended_figures import EndedFigures
from halfserve.serve.cluster.reports import ModelOrder, Settings


class ClusterMemory:
    """What a controller must not forget.

    Attributes:
        number: larger after each change, over all controllers.
        generation: the largest of all orders.
        models: the orders for all members, by model; None until a repository was seen.
        settings: of logs and traces that were changed: number of the change, path and serialized request, by setting.
        settings_number: of the last change of them.
        ended: the figures of members that have ended.
    """

    def __init__(self) -> None:
        self.number = 0
        self.generation = 0
        self.models: dict[str, ModelOrder] | None = None
        self.settings: dict[str, tuple[int, str, bytes]] = {}
        self.settings_number = 0
        self.ended = EndedFigures()
        self._bytes: tuple[int, bytes] | None = None

    @property
    def loaded(self) -> dict[str, ModelOrder]:
        """The orders for all members, by model."""
        return self.models or {}

    def changed(self) -> None:
        """Keep what is here now."""
        self.number += 1

    def order(self, name: str, request: bytes = b"") -> ModelOrder:
        """A new order, which is not yet one for all members.

        Args:
            name: of the model.
            request: serialized RepositoryModelLoadRequest; empty for the model as it is in the repository.
        """
        self.generation += 1
        plain = pb.RepositoryModelLoadRequest(model_name=name)
        return ModelOrder(generation=self.generation, request=request or plain.SerializeToString())

    def set(self, settings: Mapping[str, bytes], path: str) -> None:
        """Change settings of logs or traces, at all members; serialized requests for the method at `path`, by setting."""
        self.settings_number += 1
        self.settings |= {name: (self.settings_number, path, one) for name, one in settings.items()}
        self.changed()

    def settings_since(self, number: int) -> Settings | None:
        """What was changed after the change of this number; None for nothing."""
        if number == self.settings_number:
            return None
        changed = [(path, one) for at, path, one in self.settings.values() if at > number]
        return Settings(number=self.settings_number, changes=changed)

    def begin(self, names: Iterable[str]) -> None:
        """Serve these models."""
        self.models = {name: self.order(name) for name in sorted(names)}
        self.changed()

    def to_bytes(self) -> bytes:
        """Everything, for `adopt`; made once after each change."""
        if self._bytes is None or self._bytes[0] != self.number:
            models = {name: [one.generation, base64.b64encode(one.request).decode()] for name, one in self.loaded.items()}
            content = {
                "number": self.number,
                "generation": self.generation,
                "models": None if self.models is None else models,
                "settings": {
                    name: [number, path, base64.b64encode(one).decode()] for name, (number, path, one) in self.settings.items()
                },
                "settings_number": self.settings_number,
                "ended": self.ended.to_json(),
            }
            self._bytes = self.number, zlib.compress(json.dumps(content).encode(), 1)
        return self._bytes[1]

    def adopt(self, data: bytes) -> None:
        """Take over what another controller remembered, if it is newer."""
        content: dict[str, Any] = json.loads(zlib.decompress(data))
        if content["number"] <= self.number:
            return
        self.number = content["number"]
        self.generation = max(self.generation, content["generation"])
        if content["models"] is not None:
            self.models = {
                name: ModelOrder(generation=generation, request=base64.b64decode(request))
                for name, (generation, request) in content["models"].items()
            }
        self.settings = {
            name: (number, path, base64.b64decode(one)) for name, (number, path, one) in content["settings"].items()
        }
        self.settings_number = content["settings_number"]
        self.ended = EndedFigures.from_json(content["ended"])
