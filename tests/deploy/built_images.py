"""The images, built without docker: Debian's buildah, on a base that debootstrap makes in place of Docker Hub's.

The base is Debian trixie with its Python 3.13, under the names that the Dockerfile asks for. It has the machine's certificates,
so that pip and uv reach the package index from inside.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import ROOT

SUITE, PYTHON = "trixie", "3.13"
TOOLS = ("buildah", "debootstrap", "unshare", "setpriv", "tar")
CERTIFICATES = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"))
SLIM = """
FROM scratch
ADD root.tar /
COPY certificates.crt /etc/ssl/certs/ca-certificates.crt
RUN ln -s python3 /usr/bin/python
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_SYSTEM_CERTS=1
ENV PIP_DEFAULT_TIMEOUT=180 UV_HTTP_TIMEOUT=180
"""
WITH_COMPILER = f"""
FROM docker.io/library/python:{PYTHON}-slim-{SUITE}
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends build-essential python3-dev
"""
# As docker runs an image with --read-only, --tmpfs /tmp, --cap-drop ALL and no-new-privileges, on the machine's own network.
RUN = """
set -e
mount --bind "$IMAGE" "$IMAGE"
mount -t proc proc "$IMAGE/proc"
mount --rbind /dev "$IMAGE/dev"
mount -t tmpfs -o mode=1777 tmpfs "$IMAGE/tmp"
mkdir -p "$IMAGE$WORKDIR"  # docker makes it where the Dockerfile names it, buildah does not
mount --bind "$FOLDER" "$IMAGE$WORKDIR"
for place in "$IMAGE$WORKDIR" "$IMAGE"; do mount -o remount,bind,ro "$place"; done
exec chroot "$IMAGE" \\
  setpriv --reuid="$USER" --regid="$USER" --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \\
  env -i -C "$WORKDIR" "$@"
"""


can_build_images = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
    reason=f"images are built by root with {', '.join(TOOLS)}",
)


@dataclass(frozen=True)
class BuiltImage:
    """An image whose files are mounted."""

    files: Path  # the folder that is its root
    config: dict[str, Any]  # as docker has it: "User", "Env", "Entrypoint", "Cmd", "WorkingDir", "Healthcheck"

    def start(self, arguments: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a command as the image's user, on a root that cannot be written.

        Args:
            arguments: the whole command.
            folder: in place of the image's working folder.
            environment: beside the image's own variables.
        """
        own = {
            "IMAGE": str(self.files),
            "FOLDER": str(folder),
            "WORKDIR": self.config["WorkingDir"],
            "USER": self.config["User"],
        }
        variables = [*self.config["Env"], *(f"{name}={value}" for name, value in environment.items())]
        command = ["unshare", "--mount", "sh", "-c", RUN, "image", *variables, *arguments]
        return subprocess.Popen(
            command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )

    def run(self, arguments: Sequence[str], folder: Path, **environment: str) -> str:
        """What a command writes to standard output. Raises AssertionError where it fails."""
        process = self.start(arguments, folder, **environment)
        said, errors = process.communicate()
        assert process.returncode == 0, errors
        return said


@contextmanager
def built_images(folder: Path, targets: Sequence[str]) -> Iterator[dict[str, BuiltImage]]:
    """Build targets of the Dockerfile from nothing, and mount them; everything is in `folder`, and removed at the end."""
    buildah = _Buildah(folder)
    try:
        _make_base(buildah, folder)
        text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
        # All stages in one build: buildah 1.28 cannot mount a stage that it takes from its cache, as a second build would.
        asked = "\n".join(f"COPY --from={target} /opt/halfserve/sbom.json /{target}.json" for target in targets)
        (folder / "All").write_text(f"{text}\nFROM scratch AS all\n{asked}\n")
        options = ("--layers", f"--build-arg=PYTHON={PYTHON}")
        buildah.build(folder / "All", ROOT, "localhost/halfserve:all", *options)
        images = {}
        for target in targets:
            name = f"localhost/halfserve:{target}"
            buildah.build(ROOT / "Dockerfile", ROOT, name, *options, f"--target={target}")  # of the layers that there are now
            config = json.loads(buildah("inspect", "--type", "image", name))["Docker"]["config"]
            images[target] = BuiltImage(Path(buildah("mount", buildah("from", "--pull-never", name))), config)
        yield images
    finally:
        buildah("rm", "--all")
        buildah("rmi", "--all", "--force")


class _Buildah:
    """Calls of buildah with a storage of its own, so that nothing of this machine is used or left behind."""

    def __init__(self, folder: Path) -> None:
        self._command = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def __call__(self, *arguments: str) -> str:
        """What a command writes to standard output. Raises AssertionError where it fails."""
        environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        done = subprocess.run([*self._command, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def build(self, dockerfile: Path, context: Path, name: str, *options: str) -> None:
        """Build an image from what is on this machine and in the package index."""
        # Docker's own format, as OCI's has no health check.
        always = ("--format=docker", "--pull-never", "--network=host", f"--file={dockerfile}", f"--tag={name}")
        self("bud", *always, *options, str(context))


def _make_base(buildah: _Buildah, folder: Path) -> None:
    """The images that the Dockerfile begins with. Skips the test where no mirror of Debian answers."""
    root, context = folder / "root", folder / "base"
    context.mkdir(parents=True)
    packages = "--include=ca-certificates,python3,python3-pip,python3-venv"
    command = ["debootstrap", "--variant=minbase", packages, SUITE, str(root)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Failed getting release file" in made.stdout + made.stderr:
        pytest.skip(f"no mirror of Debian answers: {made.stderr}")
    assert made.returncode == 0, made.stdout[-4000:] + made.stderr
    for kept in (*root.glob("var/cache/apt/archives/*.deb"), *root.glob("var/lib/apt/lists/*_*")):
        kept.unlink()
    subprocess.run(["tar", "-C", str(root), "-cf", str(context / "root.tar"), "."], check=True)
    shutil.rmtree(root)
    shutil.copy(CERTIFICATES, context / "certificates.crt")
    for tag, text in ((f"slim-{SUITE}", SLIM), (SUITE, WITH_COMPILER)):
        (context / "Dockerfile").write_text(text)
        buildah.build(context / "Dockerfile", context, f"docker.io/library/python:{PYTHON}-{tag}")
