"""Several whole servers that answer as one: the processes of `--processes`, and the replicas of a cluster on Ray.

`member` is what such a server does inside: it answers the RPCs that concern all. `agent` starts a server, watches it, reports
for it and carries out the orders for it. `control` is the controller of a cluster: a table of the living members, and calls to
all of them. `launch` starts the agents and servers: the supervisor of the processes of one machine, and Ray, which also keeps
what the servers of a cluster shall do. No tensor passes through agent or controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(arguments: Mapping[str, Any]) -> Any:
    """Return the `ray.serve.Application`, for `serve run halfserve.serve.fleet:app path=s3://bucket/models` and config files.

    Args:
        arguments: fields of `halfserve.serve.fleet.launch.cluster_arguments.ClusterArguments` by name; values may be strings.

    Raises:
        ClusterArgumentError: a name is unknown, or a value makes no sense.
    """
    from halfserve.serve.fleet.launch.cluster_arguments import ClusterArguments  # noqa: PLC0415  (as below)
    from halfserve.serve.fleet.launch.ray_application import build  # noqa: PLC0415  (imports Ray)

    return build(ClusterArguments.read(arguments), {})
