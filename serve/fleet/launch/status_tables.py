"""Prints the status of a cluster as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from halfserve.serve.client.cli.display import PipedConsole


def print_status(name: str, status: Mapping[str, Any]) -> None:
    """Print a summary line, and one table each of members and models."""
    console = PipedConsole()
    members = status["members"]
    line = f"{name}: " + ("1 member" if len(members) == 1 else f"{len(members)} members")
    if "wanted" in status:
        line += f", {status['running']} of {status['wanted']} replicas run ({status['replicas']} asked for), {status['status']}"
        line += ", which wait for room" if status["lacks_room"] else ""
    console.print(line, soft_wrap=True)
    if status.get("message"):
        console.print(status["message"], soft_wrap=True)
    console.print(_members(members))
    console.print(_models(status["models"], len(members)))


def _members(members: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("member", "gRPC", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("models", "busy\n%", "queue\nms", "refused\n%"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in members:
        load = f"{one['busy'] * 100:.0f}", f"{one['queue_s'] * 1000:.2f}", f"{one['refused'] * 100:.1f}"
        table.add_row(one["id"], one["grpc_address"], one["state"], str(len(one["models"])), *load)
    return table


def _models(models: list[dict[str, Any]], members: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("model", overflow="fold")
    for heading in ("version", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("members", "req/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for one in models:
        for version in one["versions"]:
            shown = f"{len(one['members'])}/{members}", f"{one['requests_s']:,.0f}"
            table.add_row(one["name"], version["version"], version["state"], *shown, version["reason"])
    return table
