"""State of the controller that outlives it: the users' orders. All agents keep a copy for the next controller."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.fleet.control.ended_counters import EndedCounters
from halfserve.serve.fleet.control.reports import ModelOrder, SettingsChanges


class ClusterMemory:
    """State that a new controller must recover.

    Attributes:
        number: revision of this state; increases with each change, across controllers.
        generation: largest generation of all orders.
        models: orders that apply to all members, by model; None until a repository has been reported.
        settings: log and trace settings that users changed: number, method path and serialized request by setting.
        settings_number: number of the latest settings change.
        ended: counters of members that have ended.
    """

    def __init__(self) -> None:
        self.number = 0
        self.generation = 0
        self.models: dict[str, ModelOrder] | None = None
        self.settings: dict[str, tuple[int, str, bytes]] = {}
        self.settings_number = 0
        self.ended = EndedCounters()
        self._bytes: tuple[int, bytes] | None = None

    @property
    def loaded(self) -> dict[str, ModelOrder]:
        """The orders for all members, by model."""
        return self.models or {}

    def changed(self) -> None:
        """Increase the revision, so that agents receive the present state."""
        self.number += 1

    def order(self, name: str, request: bytes = b"") -> ModelOrder:
        """Create a new order, which does not apply to all members yet.

        Args:
            name: name of the model.
            request: serialized RepositoryModelLoadRequest; empty for the model as it is in the repository.
        """
        self.generation += 1
        plain = pb.RepositoryModelLoadRequest(model_name=name)
        return ModelOrder(generation=self.generation, request=request or plain.SerializeToString())

    def set(self, settings: Mapping[str, bytes], path: str) -> None:
        """Record settings of logs or traces for all members: serialized requests for the method at `path`, by setting."""
        self.settings_number += 1
        self.settings |= {name: (self.settings_number, path, one) for name, one in settings.items()}
        self.changed()

    def settings_since(self, number: int) -> SettingsChanges | None:
        """SettingsChanges changed after change `number`; None if there are none."""
        if number == self.settings_number:
            return None
        changed = [(path, one) for at, path, one in self.settings.values() if at > number]
        return SettingsChanges(number=self.settings_number, changes=changed)

    def begin(self, names: Iterable[str]) -> None:
        """Order these models for all members."""
        self.models = {name: self.order(name) for name in sorted(names)}
        self.changed()

    def to_bytes(self) -> bytes:
        """Serialize the whole state for `adopt`; the result is cached until the next change."""
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
        """Replace this state by the one that another controller serialized, if that is newer."""
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
        self.ended = EndedCounters.from_json(content["ended"])
