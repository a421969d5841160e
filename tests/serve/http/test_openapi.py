"""The OpenAPI document against the server: every route, every example, every answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.http.http_options import HttpLimits, HttpOptions
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.http.routing.document import openapi_document
from halfserve.serve.protocol.service import Service
from tests.serve.http.running_http import running_http
from tests.serve.running_server import RunningServer


async def described() -> dict[str, Any]:
    core = InferenceCore([])
    rest = RestServer(core, Service(core, server_version="0.0.test"), "127.0.0.1", HttpOptions())
    return openapi_document([route.declared for route in rest.routes], "0.0.test")


DOCUMENT = asyncio.run(described())


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        node: Any = DOCUMENT
        for part in schema["$ref"].removeprefix("#/").split("/"):
            node = node[part]
        schema = node
    return schema


def check(value: Any, schema: dict[str, Any]) -> None:
    Draft202012Validator(schema | {"components": DOCUMENT["components"]}).validate(value)


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in DOCUMENT["paths"].items():
        for method, operation in item.items():
            if method != "parameters":
                yield path, method.upper(), operation


def test_every_route_is_in_it_and_nothing_else(rest: RestServer) -> None:
    served = {
        (route.path, method)
        for route in rest.routes
        for method in (route.methods or set()) - {"HEAD"}
        if not route.path.startswith("/ui/") and route.path not in {"/", "/docs", "/v2/"}
    }
    assert {(path, method) for path, method, _ in operations()} == served


def test_references_lead_somewhere_and_names_are_unique() -> None:
    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                assert resolved(node)
            for entry in node.values():
                walk(entry)
        elif isinstance(node, list):
            for entry in node:
                walk(entry)

    walk(DOCUMENT)
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(names)) == len(names)
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    assert all(set(operation["tags"]) <= tags for _, _, operation in operations())


def test_every_path_parameter_is_described() -> None:
    for path, item in DOCUMENT["paths"].items():
        described = {resolved(parameter)["name"] for parameter in item.get("parameters", ())}
        assert described == {part[1:-1] for part in path.split("/") if part.startswith("{")}


@pytest.mark.parametrize(
    ("path", "method"),
    [(path, method) for path, method, _ in operations() if not path.startswith("/metrics")],
    ids=lambda value: value,
)
def test_answers_are_as_described(http: httpx.Client, path: str, method: str) -> None:
    operation = DOCUMENT["paths"][path][method.lower()]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
    if body is not None:
        check(body, operation["requestBody"]["content"]["application/json"]["schema"])
    real = path.replace("{model}", "unbatched").replace("{version}", "1").replace("{region}", "none")
    answer = http.request(method, real, json={} if body is None and method == "POST" else body)
    response = resolved(operation["responses"][str(answer.status_code)])
    if "content" not in response:
        assert answer.content == b""
        return
    kind = answer.headers["content-type"].partition(";")[0]
    described = response["content"][kind]
    if kind == "text/event-stream":
        check(json.loads(answer.text.removeprefix("data: ")), described["schema"])
        return
    check(answer.json(), described["schema"])
    example = described.get("example")
    if example is not None and ("infer" in path or "generate" in path):
        assert answer.json() == example  # what people read is what they get


def test_refusals_of_a_body_are_as_described(server: RunningServer) -> None:
    limits = HttpLimits(max_body_bytes=100)
    with (
        running_http(server, limits=limits) as rest,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as client,
    ):
        for path, method, operation in operations():
            if "requestBody" not in operation:
                continue
            real = path.replace("{model}", "unbatched").replace("{version}", "1").replace("{region}", "none")
            large = client.request(method, real, content=b" " * 101)
            coded = client.request(method, real, content=b" " * 50, headers={"content-encoding": "unknown"})
            assert (large.status_code, coded.status_code) == (413, 501), path
            assert {"413", "501", "503", "504"} <= operation["responses"].keys(), path


def test_settings_that_lead_nowhere_are_refused_as_described(http: httpx.Client) -> None:
    for path in ("/v2/trace/setting", "/v2/models/{model}/trace/setting"):
        answer = http.post(path.replace("{model}", "unbatched"), json={"trace_level": ["TIMESTAMPS"]})
        assert answer.status_code == 409
        assert "409" in DOCUMENT["paths"][path]["post"]["responses"]


def test_it_is_served_with_the_servers_version(http: httpx.Client, server: RunningServer) -> None:
    content = http.get("/openapi.json").json()
    assert content["openapi"].startswith("3.1.")
    assert content == DOCUMENT
