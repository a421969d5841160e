"""Tokens for some models only, over both transports: all others are as if they were not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2
from tritonclient.utils import InferenceServerException

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.protocol.service import INFER_STREAM_PATH
from halfserve.serve.security.security import Security
from halfserve.serve.security.security_options import SecurityOptions
from halfserve.serve.security.tokens import new_token
from halfserve.serve.transports.transport import TransportName
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.ensemble_folders import CHAIN, save_add, save_ensemble
from tests.serve.model_control.controlled import control
from tests.serve.running_server import WAIT_S, RunningServer
from tests.serve.security.guarded import WATCH_S, bearer, guarded_server, infer_request, tokens_in, write_tokens
from tests.serve.security.tenants import (
    HEALTH,
    NOBODYS,
    OURS,
    THEIRS,
    Tenants,
    about,
    changes,
    health,
    models,
    tenants_in,
)
from tests.serve.security.test_http import guarded_http


@pytest.fixture(scope="module")
def server(transport: TransportName, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    path = tmp_path_factory.mktemp("tenants") / "tokens"
    tokens = tenants_in(path)
    options = SecurityOptions(token_file=path, watch_s=WATCH_S)
    with guarded_server(options, transport, models=models) as (running, _), grpc.insecure_channel(running.address) as channel:
        yield Tenants(running, channel, tokens, path)


NOT_READY = ("OK", "", pb.ModelReadyResponse(ready=False).SerializeToString())


def as_if_absent(outcome: tuple[str, str, bytes]) -> tuple[str, str, bytes]:
    status, text, answer = outcome
    return status, text.replace(THEIRS, NOBODYS), answer.replace(THEIRS.encode(), NOBODYS.encode())


def test_what_may_be_used_is_used_as_ever(server: Tenants) -> None:
    for _ in range(3):  # parsed, of a form that is known, and as a twin
        for (method, message), (_, same) in zip(about(OURS), about(OURS), strict=True):
            assert server.outcome("tenant", method, message) == server.outcome("root", method, same)
    for name in (OURS, "digits_v2"):
        answer = pb.ModelInferResponse.FromString(server.ask("tenant", *about(name)[0]))
        assert (answer.model_name, answer.raw_output_contents[0]) == (name, b"\0\0\x80?")


@pytest.mark.parametrize("place", range(len(about(THEIRS))))
def test_what_may_not_be_used_is_as_if_it_were_not_there(server: Tenants, place: int) -> None:
    theirs, absent = about(THEIRS)[place], about(NOBODYS)[place]
    assert server.outcome("other", *theirs) == server.outcome("root", *theirs)
    seen = server.outcome("tenant", *theirs)
    assert seen[0] in {"NOT_FOUND", "INVALID_ARGUMENT"} or (theirs[0].endswith("/ModelReady") and seen == NOT_READY)
    for who in ("tenant", "root"):
        assert as_if_absent(seen) == server.outcome(who, *absent)
    assert as_if_absent(server.outcome("tenant", *theirs)) == server.outcome("root", *absent), "the second time, too"


def test_a_name_that_comes_twice_in_a_message_is_the_one_that_counts(server: Tenants) -> None:
    allowed, hidden = pb.ModelInferRequest(model_name=OURS).SerializeToString(), infer_request(model=THEIRS)
    method = about(OURS)[0][0]
    assert server.outcome("tenant", method, allowed + hidden)[0] == "NOT_FOUND"
    hidden_first = pb.ModelInferRequest(model_name=THEIRS).SerializeToString() + infer_request(model=OURS)
    assert server.outcome("tenant", method, hidden_first)[0] == "OK"


def test_lists_hold_what_may_be_used(server: Tenants) -> None:
    assert server.index("tenant") == server.statistics("tenant") == [OURS, "digits_v2"]
    assert server.index("other") == server.statistics("other") == [THEIRS]
    assert server.index("root") == server.statistics("root") == [OURS, "digits_v2", THEIRS]


def test_a_stream_answers_as_single_requests_do(server: Tenants) -> None:
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    for name in (OURS, THEIRS, NOBODYS, OURS):
        requests.put(infer_request(model=name))
    requests.put(None)
    open_stream = server.channel.stream_stream(INFER_STREAM_PATH)
    answers = open_stream(iter(requests.get, None), metadata=bearer(server.tokens["tenant"]), timeout=WAIT_S)
    told = [pb.ModelStreamInferResponse.FromString(answer) for answer in answers]
    assert [answer.infer_response.model_name for answer in told] == [OURS, "", "", OURS]
    assert told[1].error_message.replace(THEIRS, NOBODYS) == told[2].error_message
    assert "is not served here" in told[1].error_message
    assert told[1].infer_response == told[2].infer_response


def test_health_of_a_model_is_visible_to_permitted_callers(server: Tenants) -> None:
    seen = {who: [server.outcome(who, HEALTH, health(name))[0] for name in ("", OURS, THEIRS)] for who in (None, "tenant")}
    assert seen == {None: ["OK", "NOT_FOUND", "NOT_FOUND"], "tenant": ["OK", "OK", "NOT_FOUND"]}
    assert server.outcome("root", HEALTH, health(THEIRS))[0] == "OK"
    for who in (None, "tenant"):
        asked = server.outcome(who, HEALTH, health(THEIRS))
        assert as_if_absent(asked) == server.outcome("root", HEALTH, health(NOBODYS))


def test_health_is_watched_by_the_same_rule(server: Tenants) -> None:
    def first_status(who: str | None, model: str) -> int:
        metadata = None if who is None else bearer(server.tokens[who])
        watch = server.channel.unary_stream("/grpc.health.v1.Health/Watch")(health(model), metadata=metadata, timeout=WAIT_S)
        status = health_pb2.HealthCheckResponse.FromString(next(iter(watch))).status
        watch.cancel()
        return int(status)

    serving, unknown = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    assert [first_status("tenant", name) for name in ("", OURS, THEIRS, NOBODYS)] == [serving, serving, unknown, unknown]
    assert [first_status(None, name) for name in ("", OURS)] == [serving, unknown]


@pytest.mark.parametrize("others_have_the_same", [True, False])
def test_health_is_watched_no_longer_with_a_token_that_is_gone(
    transport: TransportName, tmp_path: Path, *, others_have_the_same: bool
) -> None:
    path = tmp_path / "tokens"
    ours, same = (new_token(name, [Role.INFER], models=["digits*"]) for name in ("ours", "same"))
    token, _ = write_tokens(path, ours, same)
    options = SecurityOptions(token_file=path, watch_s=WATCH_S)
    with (
        guarded_server(options, transport, models=models) as (running, security),
        grpc.insecure_channel(running.address) as channel,
    ):
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watched = iter(watch(health(OURS), metadata=bearer(token), timeout=WAIT_S))
        assert health_pb2.HealthCheckResponse.FromString(next(watched)).status == health_pb2.HealthCheckResponse.SERVING
        write_tokens(path, same if others_have_the_same else new_token("other", [Role.INFER], models=[THEIRS]))
        running.call(security.reload)
        running.call(lambda: running.core.replace(OURS, []))
        with pytest.raises(grpc.RpcError) as ended:
            next(watched)
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert ended.value.details() == "what the token may do has changed; make the call again"


@pytest.mark.parametrize("place", range(len(changes(THEIRS))))
def test_a_restricted_administrator_cannot_touch_other_models(server: Tenants, place: int) -> None:
    theirs = server.outcome("manager", *changes(THEIRS)[place])
    assert as_if_absent(theirs) == server.outcome("manager", *changes(NOBODYS)[place])
    assert theirs[0] == "NOT_FOUND"
    assert server.outcome("manager", *changes(OURS)[place]) == server.outcome("root", *changes(OURS)[place])


def test_a_restricted_administrator_changes_no_global_setting(server: Tenants) -> None:
    trace, log = pb.TraceSettingRequest(), pb.LogSettingsRequest()
    trace.settings["trace_rate"].value.append("7")
    log.settings["log_info"].bool_param = False
    for method, request in (("TraceSetting", trace), ("LogSettings", log)):
        status, text, _ = server.outcome("manager", method, request.SerializeToString())
        assert status == "PERMISSION_DENIED"
        assert text.startswith("the token is for some models only, and this setting holds for all of them")
        assert server.outcome("manager", method, b"") == server.outcome("root", method, b"")


def test_rights_that_change_hold_on_connections_that_are_open(transport: TransportName, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    token, line = new_token("alice", [Role.INFER], models=[OURS])
    write_tokens(path, (token, line))
    options = SecurityOptions(token_file=path, watch_s=WATCH_S)
    with (
        guarded_server(options, transport, models=models) as (running, security),
        grpc.insecure_channel(running.address) as channel,
    ):
        alice = Tenants(running, channel, {"alice": token}, path)
        ours, theirs = about(OURS)[0], about(THEIRS)[0]
        assert (alice.outcome("alice", *ours)[0], alice.outcome("alice", *theirs)[0]) == ("OK", "NOT_FOUND")
        path.write_text(line.replace(f"model={OURS}", f"model={THEIRS}"))
        while alice.outcome("alice", *theirs)[0] != "OK":
            pass
        assert alice.outcome("alice", *ours)[0] == "NOT_FOUND"
        assert views_of(running, security) == 1, "nobody has the view from before"
        path.write_text(line.partition(" ")[0])
        while alice.outcome("alice", *ours)[0] != "OK":
            pass
        assert alice.index("alice") == [OURS, "digits_v2", THEIRS]
        assert views_of(running, security) == 0


def views_of(running: RunningServer, security: Security) -> int:
    gate = security.main.gate
    assert gate is not None
    return running.call(lambda: len(gate._views))


def test_without_limited_tokens_there_are_no_views(transport: TransportName, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens = tokens_in(path, alice=Role.INFER)
    with guarded_server(SecurityOptions(token_file=path), transport, models=models) as (running, security):
        with grpc.insecure_channel(running.address) as channel:
            alice = Tenants(running, channel, tokens, path)
            assert alice.outcome("alice", *about(THEIRS)[0])[0] == "OK"
            assert alice.outcome(None, HEALTH, health(THEIRS))[0] == "OK"
        assert views_of(running, security) == 0


def test_an_ensembles_hidden_steps_are_not_named(transport: TransportName, tmp_path: Path) -> None:
    root = tmp_path / "models"
    save_add(root / "one", 1)
    save_add(root / "ten", 10)
    save_ensemble(root / "digits", CHAIN)
    save_ensemble(root / "nested", ensemble(step("digits", "x=x", "out=out"), input="x:FP32:4", output="out:FP32:4"))
    holders = ("tenant", ["digits", "nested", "one"]), ("owner", ["digits", "one", "ten"])
    made = [new_token(name, [Role.ADMIN], models=allowed) for name, allowed in holders]
    tokens = dict(zip(("tenant", "owner"), write_tokens(tmp_path / "tokens", *made), strict=True))
    options = SecurityOptions(token_file=tmp_path / "tokens", watch_s=WATCH_S)
    x = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
    with (
        guarded_server(options, transport, models=list) as (server, _),
        triton.InferenceServerClient(server.address) as client,
        guarded_http(server, options) as (http, _),
    ):
        controlling = server.call(lambda: control(server.core, root, ControlMode.NONE))
        server.run(controlling.start())
        tenant, owner = ({"authorization": f"Bearer {tokens[name]}"} for name in ("tenant", "owner"))
        told = client.get_model_config("digits", headers=owner).config
        assert [one.model_name for one in told.ensemble_scheduling.step] == ["one", "ten"]
        assert "ten/1" in told.parameters["halfserve.steps"].string_value
        for name in ("digits", "nested"):
            told = client.get_model_config(name, headers=tenant).config
            assert (told.platform, told.HasField("ensemble_scheduling")) == ("ensemble", False)
            assert [one.name for one in told.output] == ["out"]
            assert client.infer(name, [x], headers=tenant).as_numpy("out").tolist() == [[12.0] * 4]
        server.call(lambda: server.core.replace("ten", []))
        with pytest.raises(InferenceServerException, match=r"now: step 2 \(a model\): the model is not served"):
            client.infer("digits", [x], headers=tenant)
        with pytest.raises(InferenceServerException, match=r"now: step 2 \(model 'ten'\): the model is not served"):
            client.infer("digits", [x], headers=owner)
        answers = [client.get_model_config(name, headers=tenant) for name in ("digits", "nested")]
        answers.append(client.get_model_repository_index(headers=tenant))
        for path in ("/v2/models/digits/config", "/v2/repository/index", "/ui/state", "/metrics"):
            method = "POST" if path.endswith("index") else "GET"
            answers.append(http.request(method, path, headers=tenant).raise_for_status().text)
        server.call(controlling.close)
    assert [answer for answer in map(str, answers) if re.search(r"\bten\b", answer)] == []
    assert "digits" in answers[-2]
