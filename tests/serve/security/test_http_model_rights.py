"""The same over HTTP: the REST interface, the page and the metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from serve.http.options import HttpOptions
from serve.http.rest_server import RestServer
from serve.security.expiry import DAY_S
from serve.security.memory_budget import MemoryBudget
from serve.security.options import SecurityOptions
from serve.security.roles import Role
from serve.security.security import Security
from serve.security.token_file import new_token
from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server
from tests.serve.security.guarded import WATCH_S, Clock, write_tokens
from tests.serve.security.tenants import NOBODYS, OURS, THEIRS, models, tenants_in

REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
WRONG = {"inputs": [{"name": "no_such_input", "datatype": "FP16", "shape": [3], "data": [1]}]}
ASKED = [
    ("POST", "/v2/models/{}/infer", REQUEST),
    ("POST", "/v2/models/{}/infer", WRONG),
    ("POST", "/v2/models/{}/versions/7/infer", REQUEST),
    ("POST", "/v2/models/{}/versions/x/infer", REQUEST),
    *(
        ("GET", f"/v2/models/{{}}{path}", None)
        for path in ("", "/ready", "/config", "/stats", "/versions/1", "/versions/x/ready")
    ),
    ("GET", "/ui/certificates/{}/1", None),
]
CHANGED = [
    ("GET", "/v2/models/{}/trace/setting", None),
    ("POST", "/v2/models/{}/trace/setting", {"trace_rate": "7"}),
    ("POST", "/v2/repository/models/{}/load", {}),
    ("POST", "/v2/repository/models/{}/unload", {}),
]


class Site:
    """HTTP on a running server, and its clients by the names of their tokens."""

    def __init__(self, server: RunningServer, path: Path, clock: Clock, budget: MemoryBudget | None = None) -> None:
        self.server, self.path, self.clock = server, path, clock
        options = SecurityOptions(token_file=path, watch_s=WATCH_S)
        self.security = server.call(lambda: Security(options, server.core.figures.refuse, clock=clock))
        http = HttpOptions(port=0, metrics_port=0)
        make = partial(RestServer, server.core, server.service, "127.0.0.1", http, self.security.main, budget=budget)
        self.rest = server.call(make)
        server.run(self.rest.start())
        server.call(self.security.start)
        self.clients: dict[str, httpx.Client] = {}

    def client(self, name: str, token: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}"}
        self.clients[name] = httpx.Client(base_url=f"http://127.0.0.1:{self.rest.port}", timeout=20, headers=headers)
        return self.clients[name]

    def outcome(self, who: str, method: str, path: str, body: object) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers, without those that tell the time or the body's length."""
        answer = self.clients[who].request(method, path, json=body)
        headers = {name: value for name, value in answer.headers.items() if name not in {"date", "content-length"}}
        return answer.status_code, answer.text, headers

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.server.call(self.security.close)
        self.server.run(self.rest.stop(0.5))


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with running_server(models) as server:
        yield server


@pytest.fixture(scope="module")
def site(running: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("tenants") / "tokens"
    tokens = tenants_in(path)
    made = Site(running, path, Clock())
    for name, token in tokens.items():
        made.client(name, token)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("who", "place"),
    [
        *(("tenant", place) for place in range(len(ASKED))),
        *(("manager", place) for place in range(len(ASKED), len(ASKED + CHANGED))),
    ],
)
def test_what_may_not_be_used_is_as_if_it_were_not_there(site: Site, who: str, place: int) -> None:
    method, path, body = (ASKED + CHANGED)[place]
    theirs = site.outcome(who, method, path.format(THEIRS), body)
    absent = site.outcome(who, method, path.format(NOBODYS), body)
    assert (theirs[0], theirs[1].replace(THEIRS, NOBODYS), theirs[2]) == absent
    assert theirs[0] in {400, 404}
    assert site.outcome(who, method, path.format(OURS), body) == site.outcome("root", method, path.format(OURS), body)
    if place < len(ASKED):
        assert absent == site.outcome("root", method, path.format(NOBODYS), body)


def test_lists_the_page_and_the_metrics_hold_what_may_be_used(site: Site) -> None:
    def index(who: str) -> list[str]:
        return [entry["name"] for entry in site.clients[who].post("/v2/repository/index").json()]

    def page(who: str) -> list[str]:
        return [entry["name"] for entry in site.clients[who].get("/ui/state").json()["models"]]

    def statistics(who: str) -> list[str]:
        return [entry["name"] for entry in site.clients[who].get("/v2/models/stats").json()["model_stats"]]

    for read in (index, page, statistics):
        assert read("tenant") == [OURS, "digits_v2"]
        assert read("root") == [OURS, "digits_v2", THEIRS]
    ours, everything = (site.clients[who].get("/metrics").text for who in ("scraper", "root"))
    assert 'model="digits_v2"' in ours
    assert THEIRS not in ours
    assert THEIRS in everything
    alone = f"http://127.0.0.1:{site.rest.metrics_port}/metrics"
    assert THEIRS not in httpx.get(alone, headers=site.clients["scraper"].headers).text


def test_the_page_of_some_models_shows_their_past(site: Site) -> None:
    page = site.rest._page
    assert page is not None
    site.server.call(page._history.look)

    def samples(who: str) -> list[int]:
        state = site.clients[who].get("/ui/state").json()
        return [len(entry["samples"]) > 0 for entry in state["models"]]

    assert samples("tenant") == [True, True]


def test_what_holds_for_all_models_is_not_changed_by_who_administers_some(site: Site) -> None:
    for path, change in (("/v2/trace/setting", {"trace_rate": "7"}), ("/v2/logging", {"log_info": False})):
        assert site.clients["manager"].post(path, json=change).status_code == 403
        assert site.clients["manager"].get(path).json() == site.clients["root"].get(path).json()


def test_a_token_ends_and_changes_its_rights_on_a_connection_that_is_open(running: RunningServer, tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "tokens"
    token, line = new_token("alice", [Role.INFER], models=[OURS], expires_s=clock.now_s + DAY_S)
    write_tokens(path, (token, line))
    site = Site(running, path, clock)
    try:
        alice = site.client("alice", token)
        assert (alice.get(f"/v2/models/{OURS}").status_code, alice.get(f"/v2/models/{THEIRS}").status_code) == (200, 404)
        path.write_text(line.replace(f"model={OURS}", f"model={THEIRS}"))
        while alice.get(f"/v2/models/{THEIRS}").status_code != 200:
            pass
        assert alice.get(f"/v2/models/{OURS}").status_code == 404
        clock.now_s += DAY_S
        for refused in (alice.get("/v2"), alice.post(f"/v2/models/{THEIRS}/infer", json=REQUEST)):
            assert refused.status_code == 401
            assert refused.json() == {"error": "the token has expired; ask who runs the server for another"}
    finally:
        site.close()


def test_what_is_held_for_one_tenant_counts_for_all(tmp_path: Path) -> None:
    backend = HeldBackend(held=True)
    large = json.dumps(REQUEST).ljust(20_000)
    with running_server(lambda: [held_model(backend, OURS), held_model(HeldBackend(), THEIRS)]) as server:
        tokens = tenants_in(tmp_path / "tokens")
        site = Site(server, tmp_path / "tokens", Clock(), MemoryBudget(30_000))
        try:
            tenant, other = (site.client(name, tokens[name]) for name in ("tenant", "other"))
            with ThreadPoolExecutor() as apart:
                first = apart.submit(tenant.post, f"/v2/models/{OURS}/infer", content=large)
                assert backend.entered.wait(HOLD_S)
                assert other.post(f"/v2/models/{THEIRS}/infer", content=large).status_code == 503
                assert other.post(f"/v2/models/{THEIRS}/infer", json=REQUEST).status_code == 200  # less than its part
                backend.release.set()
                assert first.result().status_code == 200
            assert other.post(f"/v2/models/{THEIRS}/infer", content=large).status_code == 200
        finally:
            backend.release.set()
            site.close()
