"""Machines with addresses of their own on this one: network namespaces, joined by a bridge. Links can be cut."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# From 198.18.0.0/15, which RFC 2544 reserves for benchmarks. This machine, with the clients, is 198.18.N.1.
NETWORK = "198.18.{number}.{host}"


@dataclass(frozen=True)
class Host:
    address: str  # IP address of the machine
    namespace: str  # name of its network namespace
    link: str  # name of its interface at the bridge

    @property
    def enter(self) -> list[str]:
        """Start of a command that runs in the namespace."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]

    def has(self, address: str) -> bool:
        """Whether HOST:PORT is an address of this machine."""
        return address.rpartition(":")[0] == self.address


@dataclass
class Network:
    """A bridge in this machine's own namespace, to which all machines are connected."""

    number: int  # number that distinguishes it from other networks on this machine
    hosts: list[Host] = field(default_factory=list)  # the machines

    @property
    def bridge(self) -> str:
        return f"hs{self.number}"

    @property
    def address(self) -> str:
        """Address of this machine, where the clients run."""
        return NETWORK.format(number=self.number, host=1)

    def add(self) -> Host:
        place = len(self.hosts) + 2
        name = f"{self.bridge}m{place}"
        host = Host(NETWORK.format(number=self.number, host=place), name, name)
        _ip("netns", "add", host.namespace)
        self.hosts.append(host)
        _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip("link", "set", host.link, "master", self.bridge, "up")
        for device in ("lo", "eth0"):
            _ip("-n", host.namespace, "link", "set", device, "up")
        return host

    @contextmanager
    def cut(self, host: Host) -> Iterator[None]:
        """Block all traffic from and to the machine."""
        _ip("link", "set", host.link, "down")
        try:
            yield
        finally:
            _ip("link", "set", host.link, "up")

    @contextmanager
    def cut_from_machines(self, host: Host) -> Iterator[None]:
        """Block traffic between the machine and other machines, but not with clients."""
        # In both directions, because messages would still arrive over open connections.
        ways = [pair for other in self.hosts if other != host for pair in ((host, other), (other, host))]
        for one, other in ways:
            _ip("-n", one.namespace, "route", "add", "blackhole", other.address)
        try:
            yield
        finally:
            for one, other in ways:
                _ip("-n", one.namespace, "route", "delete", "blackhole", other.address)


def missing() -> str:
    """The missing requirement of network namespaces; "" if they can be made."""
    if os.geteuid() != 0:
        return "root"
    return next((f"the program {name}" for name in ("ip", "nsenter") if shutil.which(name) is None), "")


@contextmanager
def network() -> Iterator[Network]:
    """Create a network without machines; everything is removed after the block."""
    used = _ip("-o", "address")
    number = random.choice([one for one in range(256) if NETWORK.format(number=one, host="") not in used])  # noqa: S311
    made = Network(number)
    _ip("link", "add", made.bridge, "type", "bridge")
    try:
        _ip("address", "add", f"{made.address}/24", "dev", made.bridge)
        _ip("link", "set", made.bridge, "up")
        yield made
    finally:
        for host in made.hosts:
            _ip("link", "delete", host.link)  # the system keeps a namespace for a while after its last process
            _ip("netns", "delete", host.namespace)
        _ip("link", "delete", made.bridge)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
