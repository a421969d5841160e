"""APIs that ask for a header with a value, as Triton's flags restrict them."""

from __future__ import annotations

import grpc
import httpx
import pytest

from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.protocol.rpc import INFERENCE, Api
from halfserve.serve.security.restricted_apis import GRPC_PREFIX, restricted_group
from halfserve.serve.security.security_options import SecurityError, SecurityOptions
from halfserve.serve.transports.transport import TransportName
from tests.serve.security.guarded import call, guarded_server, infer, infer_request

INFER = restricted_group("inference,metadata:infer-key=let-me", GRPC_PREFIX)
ADMIN = restricted_group("model-repository:admin-key=let-me", GRPC_PREFIX)
OPTIONS = SecurityOptions(grpc_restricted=(INFER, ADMIN))


def sent(key: str, *values: str) -> list[tuple[str, str]]:
    return [(f"{GRPC_PREFIX}{key}", value) for value in values]


@pytest.mark.parametrize("transport", TransportName)
def test_restricted_calls_need_the_header_with_its_value(transport: TransportName) -> None:
    with guarded_server(OPTIONS, transport) as (server, _), grpc.insecure_channel(server.address) as channel:
        for metadata in ([], sent("infer-key", "other"), sent("infer-key", "let-me", "let-me"), sent("admin-key", "let-me")):
            for method in ("ServerMetadata", "ModelInfer"):
                with pytest.raises(grpc.RpcError, match="this API is restricted; send its value once in the header") as refused:
                    call(channel, method, infer_request() if method == "ModelInfer" else b"", metadata)
                assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        call(channel, "ServerMetadata", metadata=sent("infer-key", "let-me"))
        assert infer(channel, sent("infer-key", "let-me")) == 2
        call(channel, "ServerLive")
        with pytest.raises(grpc.RpcError, match="PERMISSION_DENIED|this API is restricted"):
            call(channel, "RepositoryModelUnload", metadata=sent("infer-key", "let-me"))


def test_restricted_requests_need_the_header_with_its_value() -> None:
    restricted = (restricted_group("inference,metadata:infer-key=let-me"),)
    http = HttpOptions(port=0, metrics_port=None)
    with guarded_server(SecurityOptions(http_restricted=restricted)) as (server, security):
        rest = server.call(lambda: RestServer(server.core, server.service, "127.0.0.1", http, security.main))
        server.run(rest.start())
        with httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as client:
            for headers in ({}, {"infer-key": "other"}):
                assert client.get("/v2", headers=headers).status_code == 403
                for entry in ("infer", "generate", "generate_stream"):
                    answer = client.post(f"/v2/models/held/{entry}", json={"x": 1}, headers=headers)
                    assert (answer.status_code, answer.json()["error"][:22]) == (403, "this API is restricted")
            assert client.get("/v2", headers={"Infer-Key": "let-me"}).status_code == 200
            assert client.post("/v2/models/held/generate", json={"x": 1}, headers={"infer-key": "let-me"}).json()["y"] == 2
            assert client.get("/v2/health/live").status_code == 200
        with grpc.insecure_channel(server.address) as channel:
            assert infer(channel) == 2
        server.run(rest.stop(0.5))


def test_each_method_and_path_of_the_protocol_is_in_one_api() -> None:
    with guarded_server(SecurityOptions()) as (server, _):
        options = HttpOptions(port=0, metrics_port=None)
        rest = server.call(lambda: RestServer(server.core, server.service, "127.0.0.1", options))
    rpcs = server.service.rpcs.values()
    assert {rpc.path for rpc in rpcs if rpc.access.api is None} == {
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")
    }
    assert {rpc.access.api for rpc in rpcs} | {INFERENCE.api} == {*Api, None}
    assert {route.path for route in rest.routes if route.access.api is None} == {
        "/",
        "/docs",
        "/ui/files/{file}",
        "/metrics",
        "/openapi.json",
    }
    assert {route.access.api for route in rest.routes} == {*Api, None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("inference", "has another form than APIS:KEY=VALUE, such as 'inference,metadata:infer-key=SECRET'"),
        ("inference:key", "has another form"),
        ("inference:key=", "has another form"),
        ("inferences:key=value", "names 'inferences', expected one of health, metadata, inference, "),
    ],
)
def test_a_group_of_another_form_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}"):
        restricted_group(text)


def test_an_api_in_two_groups_is_refused() -> None:
    groups = tuple(restricted_group(f"health,{more}:key=value") for more in ("metadata", "trace"))
    with pytest.raises(SecurityError, match="the API 'health' is restricted twice, expected it in one group"):
        SecurityOptions(grpc_restricted=groups).check()
