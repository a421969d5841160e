"""The chart renders what Kubernetes, KEDA, the Prometheus operator and KServe take, and refuses values that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml

from halfserve.serve.serve_command import serve
from tests.deploy.manifests import (
    DEPLOY,
    EXAMPLES,
    Manifest,
    container,
    documents,
    example,
    helm_template,
    needs_helm,
    only,
    pod,
)
from tests.serve.observability.queries import unknown_in
from tests.serve.observability.test_alerts import RULES

OLDEST, NEWEST = "1.27", "1.37"  # Chart.yaml's kubeVersion, and the newest that the schemas know
CUSTOM: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("custom_resources.yaml").read_text(encoding="utf-8"))


def values_of(name: str) -> list[str]:
    return ["--values", str(DEPLOY / "values" / f"{name}.yaml")]


@needs_helm
@pytest.mark.parametrize("name", EXAMPLES)
def test_plain_manifests_are_what_the_chart_renders(name: str) -> None:
    rendered = helm_template(*values_of(name))
    assert rendered.returncode == 0, rendered.stderr
    assert documents(rendered.stdout) == example(name), "run: make manifests"


def test_the_charts_alert_rules_are_the_servers() -> None:
    assert (DEPLOY / "halfserve" / "alerts.yaml").read_bytes() == RULES.read_bytes(), "run: make manifests"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", EXAMPLES)
def test_manifests_fit_the_published_schemas(name: str, version: str) -> None:
    check_schemas(example(name), version)


def check_schemas(manifests: list[Manifest], version: str) -> None:
    for manifest in [*manifests, pod(manifests)]:
        schema = CUSTOM.get(f"{manifest['apiVersion']} {manifest['kind']}")
        if schema is None:
            kubernetes_validate.validate(manifest, version, strict=True)
        else:
            jsonschema.validate(manifest["spec"], {**schema, "definitions": CUSTOM["definitions"]})


@needs_helm
@pytest.mark.parametrize("kserve", [False, True])
def test_values_that_no_example_has_fit_the_schemas(kserve: bool, tmp_path: Path) -> None:
    values = {
        "image": {"pullSecrets": ["registry"]},
        "models": {"url": "gs://bucket/models"},
        "server": {"args": ["--max-batch-size=8"], "env": [{"name": "OTEL_SDK_DISABLED", "value": "true"}]},
        "gpu": {"count": 2, "runtimeClassName": "nvidia"},
        "tls": {"secret": "tls", "clientCertificates": True},
        "networkPolicy": {"enabled": True, "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]},
        "kserve": {"enabled": kserve},
        "serviceAccount": "models",
        "podAnnotations": {"team": "search"},
        "nodeSelector": {"gpu": "l4"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    rendered = helm_template("--values", str(tmp_path / "values.yaml"))
    assert rendered.returncode == 0, rendered.stderr
    manifests = documents(rendered.stdout)
    check_schemas(manifests, NEWEST)
    spec, server = pod(manifests)["spec"], container(manifests)
    assert spec["tolerations"][0] == {"key": "spot", "operator": "Exists"}
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert server["args"][1] == ("/mnt/models" if kserve else "gs://bucket/models")
    assert server["args"][-1] == "--max-batch-size=8"
    # The kubelet has no certificate to show.
    assert server["livenessProbe"]["tcpSocket"] == {"port": 8001}


@needs_helm
@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("replicas=0", "at '/replicas': minimum: got 0, want 1"),
        ("modells.url=s3://bucket", "additional properties 'modells' not allowed"),
        ("models.url=bucket", "at '/models/url': 'bucket' does not match pattern"),
        ("models.url=s3://bucket", "models.persistentVolumeClaim and models.url are both set, expected one"),
        ("models.persistentVolumeClaim=", "models.persistentVolumeClaim and models.url are both empty, expected one"),
        ("resources.limits.cpu=null", "resources.limits.cpu is not set, expected a number of cores"),
        ("scratch.size=big", "at '/scratch/size': 'big' does not match pattern"),
        ("gpu.count=-1", "at '/gpu/count': minimum: got -1, want 0"),
        ("server.args={--grpc-port=9000}", "server.args has --grpc-port, which the chart sets from its other values"),
        ("rollout.maxSurge=0", "rollout.maxSurge and rollout.maxUnavailable are both 0, expected one of them above"),
        ("autoscaling.kind=hpa", "autoscaling.kind is hpa without podMonitor.enabled, expected both"),
        ("autoscaling.kind=keda,podMonitor.enabled=true", "keda without autoscaling.prometheus, expected its address"),
        ("autoscaling.kind=hpa,autoscaling.minReplicas=9", "minReplicas is 9 and maxReplicas 8, expected minReplicas <="),
        ("alerts=true", "alerts is set without podMonitor.enabled, expected both"),
        ("tls.clientCertificates=true", "tls.clientCertificates is set without tls.secret, expected both"),
        ("tls.secret=t,podMonitor.enabled=true", "expected podMonitor.endpoint.tlsConfig"),
        ("tokens.secret=t,podMonitor.enabled=true", "expected podMonitor.endpoint.authorization.credentials"),
        ("networkPolicy.enabled=true,networkPolicy.clients=null", "at '/networkPolicy': missing property 'clients'"),
        ("kserve.enabled=true,podMonitor.enabled=true,autoscaling.kind=hpa", "hpa with kserve.enabled, expected keda or none"),
        ("kserve.enabled=true,models.secret=s", "models.secret is set with kserve.enabled, expected serviceAccount"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_in_one_line(setting: str, line: str) -> None:
    rendered = helm_template(*values_of("cpu"), "--set", setting)
    assert rendered.returncode != 0
    assert rendered.stdout == ""
    assert [said for said in rendered.stderr.splitlines() if line in said], rendered.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_everything_finds_the_pods_by_their_labels(name: str) -> None:
    manifests = example(name)
    labels = pod(manifests)["metadata"]["labels"]
    selectors = [found for manifest in manifests for found in selectors_of(manifest)]
    assert len(selectors) >= 2
    assert all(selector.items() <= labels.items() for selector in selectors)


def selectors_of(manifest: Manifest) -> list[dict[str, str]]:
    spec = manifest["spec"]
    found = [spec[key] for key in ("selector", "podSelector") if key in spec]
    return [selector.get("matchLabels", selector) for selector in found]


@pytest.mark.parametrize("name", EXAMPLES)
def test_ports_probes_and_arguments_agree(name: str) -> None:
    manifests = example(name)
    server = container(manifests)
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    arguments = parsed(server["args"])
    assert ports == {kind: arguments[f"{kind}_port"] for kind in ("http", "grpc", "metrics")}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        (check,) = server[kind].keys() & {"grpc", "httpGet", "tcpSocket"}
        assert server[kind][check]["port"] in ports.values()
        assert server[kind][check].get("scheme", "HTTP") == ("HTTPS" if arguments["tls_cert"] else "HTTP")
        assert not (check == "grpc" and arguments["tls_cert"]), "the kubelet's gRPC probe speaks no TLS"
    mounted = {mount["mountPath"] for mount in server["volumeMounts"]}
    for path in (arguments["token_file"], arguments["tls_cert"], arguments["tls_key"]):
        assert path is None or str(path.parent) in mounted
    for service in (manifest for manifest in manifests if manifest["kind"] == "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The values that `halfserve serve` reads from a container's arguments; an unknown option fails."""
    assert arguments[0] == "serve"
    application = typer.Typer(add_completion=False)
    application.command()(serve)
    command = typer.main.get_command(application)
    return dict(command.make_context("serve", list(arguments[1:])).params)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pod_has_the_time_that_its_server_takes_to_end(name: str) -> None:
    manifests = example(name)
    arguments = parsed(container(manifests)["args"])
    needed = arguments["lame_duck_seconds"] + arguments["drain_seconds"]
    assert pod(manifests)["spec"]["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize("name", EXAMPLES)
def test_pods_keep_to_the_restricted_security_standard(name: str) -> None:
    manifests = example(name)
    spec, security = pod(manifests)["spec"], container(manifests)["securityContext"]
    assert security["runAsNonRoot"]
    assert security["runAsUser"] > 0
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"]
    # Variables of a Service named halfserve, such as HALFSERVE_PORT, could be taken for settings.
    assert not spec["enableServiceLinks"]
    writable = [mount["mountPath"] for mount in container(manifests)["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["/tmp"]  # noqa: S108  (a path in a container)


def test_a_gpu_is_asked_for_and_required() -> None:
    manifests = example("gpu")
    server = container(manifests)
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert parsed(server["args"])["require_gpu"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod(manifests)["spec"]["tolerations"]


def test_an_autoscaled_deployment_leaves_its_replicas_to_the_autoscaler() -> None:
    assert "replicas" in only(example("cpu"), "Deployment")["spec"]
    assert "replicas" not in only(example("gpu"), "Deployment")["spec"]
    assert "replicas" not in only(example("hardened"), "Deployment")["spec"]


def test_autoscalers_ask_for_what_the_server_tells() -> None:
    (trigger,) = only(example("gpu"), "ScaledObject")["spec"]["triggers"]
    (metric,) = only(example("kserve"), "InferenceService")["spec"]["predictor"]["autoScaling"]["metrics"]
    query = trigger["metadata"]["query"]
    assert unknown_in(query) == []
    assert metric["external"]["metric"]["query"] == query
    monitor = only(example("gpu"), "PodMonitor")["metadata"]
    assert f'job="{monitor["namespace"]}/{monitor["name"]}"' in query  # as the Prometheus operator names it


def test_the_adapters_rule_defines_the_metric_of_the_hpa() -> None:
    (rule,) = yaml.safe_load((DEPLOY / "prometheus_adapter.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    (metric,) = only(example("hardened"), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'namespace="models"')
    assert unknown_in(query) == unknown_in(rule["seriesQuery"]) == []
