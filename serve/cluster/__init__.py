"""Servers on many machines that answer as one.

A controller knows the members and decides what each of them serves. Beside each server an agent starts it, reports to the
controller and carries out its orders. Clients speak to the servers directly: no tensor passes through agent or controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(arguments: Mapping[str, Any]) -> Any:
    """The `ray.serve.Application`, for `serve run halfserve.serve.cluster:app path=s3://bucket/models` and config files.

    Args:
        arguments: the fields of `halfserve.serve.cluster.on_ray.arguments.ClusterArguments`, by name; values may be strings.

    Raises:
        ClusterArgumentError: a name is unknown, or a value makes no sense.
    """
    from halfserve.serve.cluster.on_ray.application import build  # noqa: PLC0415  (imports Ray)

    return build(arguments)
