"""Wanted state of a group of servers: orders that each of them carries out, and servers that join later too.

Ray Serve holds it in the `user_config` of the group's deployment, and gives it to each replica by `reconfigure`.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from halfserve.serve.fleet.member.fleet_commands import MODEL


@dataclass(frozen=True, kw_only=True)
class Order:
    """A call of a management method.

    Attributes:
        id: text that no other order has. A server carries out an order once.
        path: path of the method.
        request: serialized request.
    """

    id: str
    path: str
    request: bytes

    @classmethod
    def new(cls, path: str, request: bytes) -> Order:
        return cls(id=uuid.uuid4().hex, path=path, request=request)


Wanted = Mapping[str, Order]  # the last order for each target


def target_of(kind: str, name: str) -> str:
    """Return the key of what an order changes, such as a model or a setting."""
    return f"{kind} {name}"


def model_target(name: str) -> str:
    return target_of(MODEL, name)


def model_of_target(target: str) -> str | None:
    """Name of the model that an order changes; None for a setting."""
    kind, _, name = target.partition(" ")
    return name if kind == MODEL else None


def wanted_to_json(wanted: Wanted) -> dict[str, list[str]]:
    return {target: [one.id, one.path, base64.b64encode(one.request).decode()] for target, one in wanted.items()}


def wanted_from_json(content: Mapping[str, Any]) -> dict[str, Order]:
    return {
        target: Order(id=given, path=path, request=base64.b64decode(request))
        for target, (given, path, request) in content.items()
    }


class WantedStore(Protocol):
    """Keeps the wanted state of groups, and gives it to their servers."""

    async def read(self, group: str) -> Wanted:
        """Return the wanted state of a group.

        Raises:
            UnavailableError: the store cannot be reached now.
        """
        ...

    async def change(self, group: str, orders: Wanted) -> None:
        """Add orders to the wanted state of a group, in place of those for the same targets.

        Raises:
            UnavailableError: the store cannot be reached now.
        """
        ...
