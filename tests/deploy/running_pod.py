"""A server as a pod starts it, without a cluster: the rendered arguments, user 10001, no capabilities, a read-only root.

Mount namespaces take the place of the container's image: the project, its environment and Python's own files lie where user
10001 can read them, and /tmp is a tmpfs of the size that the manifest says. Ports and folders are the test's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT, Manifest, container, pod

USER = 10001
INSIDE = "/mnt"
SCRIPT = """
set -e
mount -t tmpfs -o mode=755 tmpfs /mnt
cp -r "$SECRETS" /mnt/halfserve
chown -R root:10001 /mnt/halfserve
find /mnt/halfserve -type f -exec chmod 0440 {} +
for name in code environment python models; do mkdir "/mnt/$name"; done
mount --bind "$CODE" /mnt/code
mount --bind "$ENVIRONMENT" /mnt/environment
mount --bind "$PYTHON" /mnt/python
mount --bind "$MODELS" /mnt/models
mount -t tmpfs -o "mode=1777,size=$SCRATCH" tmpfs /tmp
for place in /mnt/code /mnt/environment /mnt/python /mnt/models /; do mount -o remount,bind,ro "$place"; done
mount -o remount,ro /mnt
cd /mnt/models
exec setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \\
  env -i PATH=/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONHOME=/mnt/python LD_LIBRARY_PATH=/mnt/python/lib \\
  PYTHONPATH="/mnt/code:/mnt/environment/$PACKAGES" $VARIABLES "/mnt/python/bin/$INTERPRETER" -P -m halfserve "$@"
"""


def readable(*paths: str | Path) -> bool:
    """Whether other users may read these folders."""
    return all(Path(path).stat().st_mode & 0o005 == 0o005 for path in paths)


can_start_pods = pytest.mark.skipif(
    os.name != "posix"
    or os.geteuid() != 0
    or not (shutil.which("unshare") and shutil.which("setpriv"))
    or not readable(ROOT, sys.prefix, sys.base_prefix),
    reason="a pod needs root, unshare and setpriv, and a project that other users can read",
)


@dataclass(frozen=True)
class RunningPod:
    """A server that has written its ready line."""

    process: subprocess.Popen[str]  # the server's
    ports: dict[str, int]  # "grpc", "http" and "metrics"

    @property
    def address(self) -> str:
        """Of gRPC."""
        return f"127.0.0.1:{self.ports['grpc']}"


@contextmanager
def running_pod(
    manifests: list[Manifest], models: Path, secrets: Path, ports: dict[str, int], changes: dict[str, str] | None = None
) -> Iterator[RunningPod]:
    """Start the server of these manifests, and kill it at the end.

    Args:
        manifests: with a Deployment.
        models: the repository.
        secrets: a folder in place of /etc/halfserve.
        ports: to listen on, by the names of the container's ports.
        changes: of arguments, such as {"--lame-duck-seconds": "1"}.
    """
    values = {f"--{name}-port": str(port) for name, port in ports.items()} | (changes or {})
    (scratch,) = (volume["emptyDir"] for volume in pod(manifests)["spec"]["volumes"] if volume["name"] == "scratch")
    variables = {
        "CODE": ROOT,
        "ENVIRONMENT": sys.prefix,
        "PYTHON": sys.base_prefix,
        "MODELS": models,
        "SECRETS": secrets,
        "SCRATCH": scratch["sizeLimit"].replace("Mi", "m"),
        "PACKAGES": Path(sysconfig.get_path("purelib")).relative_to(sys.prefix),
        "VARIABLES": " ".join(f"{one['name']}={one['value']}" for one in container(manifests)["env"]),
        "INTERPRETER": Path(sys.executable).resolve().name,
    }
    command = ["unshare", "--mount", "sh", "-c", SCRIPT, "pod"]
    command += [_placed(argument, values) for argument in container(manifests)["args"]]
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        try:
            said: list[str] = []
            for line in process.stdout or ():
                said.append(line)
                if line.startswith("gRPC on "):
                    break
            else:
                raise AssertionError(f"the server did not start: {''.join(said)}")
            yield RunningPod(process, ports)
        finally:
            process.kill()


def _placed(argument: str, values: dict[str, str]) -> str:
    """An argument of the container with the test's value, or with its folder in the test's namespace."""
    option, is_option, value = argument.partition("=")
    if not is_option:
        return {"/models": f"{INSIDE}/models"}.get(argument, argument)
    return f"{option}={values.get(option, value.replace('/etc/halfserve', f'{INSIDE}/halfserve'))}"
