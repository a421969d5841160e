"""The manifests in deploy/, and helm, which renders them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
EXAMPLES = sorted(path.stem for path in (DEPLOY / "values").glob("*.yaml"))
Manifest = dict[str, Any]


@cache
def helm_program() -> str | None:
    """The path of a helm that this machine can start."""
    found = shutil.which("helm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    try:
        if found is not None:
            subprocess.run([found, "version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # made for another kind of machine
        return None
    return found


needs_helm = pytest.mark.skipif(helm_program() is None, reason="there is no helm here; `make dev` unpacks one on Linux")


def helm_template(*options: str) -> subprocess.CompletedProcess[str]:
    """Render the chart as the release "halfserve" in the namespace "models"; fails where helm does."""
    command = [str(helm_program()), "template", "halfserve", str(DEPLOY / "halfserve"), "--namespace", "models", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


@cache
def example(name: str) -> list[Manifest]:
    """The plain manifests of one file in deploy/values."""
    return documents((DEPLOY / "manifests" / f"{name}.yaml").read_text(encoding="utf-8"))


def only(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = (manifest for manifest in manifests if manifest["kind"] == kind)
    return found


def pod(manifests: list[Manifest]) -> Manifest:
    """The server's pod, as a Pod: of the Deployment, or as KServe composes it from ServingRuntime and InferenceService."""
    if not any(manifest["kind"] == "ServingRuntime" for manifest in manifests):
        template: Manifest = only(manifests, "Deployment")["spec"]["template"]
        return {"apiVersion": "v1", "kind": "Pod", **template}
    runtime, predictor = only(manifests, "ServingRuntime")["spec"], only(manifests, "InferenceService")["spec"]["predictor"]
    of_kserve = {"minReplicas", "maxReplicas", "autoScaling", "deploymentStrategy", "model"}
    spec = {key: value for key, value in predictor.items() if key not in of_kserve}
    spec |= {key: runtime[key] for key in ("containers", "volumes")}
    metadata = {key: runtime[key] for key in ("labels", "annotations")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def container(manifests: list[Manifest]) -> Manifest:
    (found,) = pod(manifests)["spec"]["containers"]
    server: Manifest = found
    return server
