"""The RayService is what KubeRay, Ray Serve and the application take."""

from __future__ import annotations

from importlib.metadata import version

import jsonschema
import kubernetes_validate
import pytest
import yaml

from halfserve.serve.fleet.launch.cluster_arguments import ClusterArguments
from tests.deploy.manifests import DEPLOY, Manifest, documents, only
from tests.deploy.test_chart import CUSTOM, NEWEST, OLDEST

MANIFESTS = documents((DEPLOY / "ray_service.yaml").read_text(encoding="utf-8"))
SPEC = only(MANIFESTS, "RayService")["spec"]
HEAD, (WORKERS,) = SPEC["rayClusterConfig"]["headGroupSpec"], SPEC["rayClusterConfig"]["workerGroupSpecs"]
CONFIG = yaml.safe_load(SPEC["serveConfigV2"])
(APPLICATION,) = CONFIG["applications"]
ARGUMENTS = ClusterArguments.read(APPLICATION["args"])


@pytest.mark.parametrize("of", [OLDEST, NEWEST])
def test_manifests_fit_the_published_schemas(of: str) -> None:
    schema = {**CUSTOM["ray.io/v1 RayService"], "definitions": CUSTOM["definitions"]}
    assert not list(jsonschema.validators.validator_for(schema)(schema).iter_errors(SPEC))
    kubernetes_validate.validate(only(MANIFESTS, "Service"), of, strict=True)
    for group in (HEAD, WORKERS):
        kubernetes_validate.validate(pod(group), of, strict=True)


def pod(group: Manifest) -> Manifest:
    return {"apiVersion": "v1", "kind": "Pod", **group["template"]}


def test_the_config_names_the_application_as_the_command_does() -> None:
    (printed,) = ARGUMENTS.serve_config("halfserve")["applications"]
    assert {key: APPLICATION[key] for key in ("name", "import_path")} == {key: printed[key] for key in ("name", "import_path")}


def test_each_worker_has_room_for_one_member() -> None:
    (worker,) = WORKERS["template"]["spec"]["containers"]
    fewest, most = ARGUMENTS.bounds
    assert (WORKERS["minReplicas"], WORKERS["maxReplicas"]) == (fewest, most)
    assert float(worker["resources"]["limits"]["nvidia.com/gpu"]) == ARGUMENTS.gpus
    assert ARGUMENTS.cpus <= float(worker["resources"]["limits"]["cpu"]) < 2 * ARGUMENTS.cpus
    assert [port["containerPort"] for port in worker["ports"]] == [ARGUMENTS.first_port + each for each in range(3)]
    assert HEAD["rayStartParams"]["num-cpus"] == "0"


def test_the_service_finds_the_members() -> None:
    service = only(MANIFESTS, "Service")["spec"]
    assert service["selector"].items() <= WORKERS["template"]["metadata"]["labels"].items()
    assert service["ports"][0]["port"] == ARGUMENTS.first_port


def test_ray_is_the_version_that_is_tested() -> None:
    assert SPEC["rayClusterConfig"]["rayVersion"] == version("ray")
