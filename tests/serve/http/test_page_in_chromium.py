"""The page in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from halfserve.protos.certificates import RECORDED_INPUT, RECORDED_OUTPUT, SAMPLES
from halfserve.serve.engine.model import VersionState
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.http.tasks.classification import softmax
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.security import Security
from halfserve.serve.security.security_options import SecurityOptions
from halfserve.serve.security.tokens import new_token
from tests.models import mlp_weights, save_mlp, save_picky
from tests.serve.conftest import load_repository, vouched
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.ensemble_folders import save_ensemble
from tests.serve.http.chromium import Tab, chromium, find_chromium
from tests.serve.http.page_audit import FAINT, beyond
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_picture_models import encoded, save_picture_model
from tests.serve.http.tasks.small_text_models import save_text_model
from tests.serve.model_control.controlled import controlled_server
from tests.serve.running_server import RunningServer, running_server
from tests.serve.security.guarded import write_tokens

LONG = "the-european-fire-salamander-" * 6
HOSTILE = '<img src=x onerror="document.title=1">&amp;'
FIGURES = {"max_abs_error": 1e-3, "max_scaled_error": 2e-3, "cosine": 0.999999, "agreement": 1.0}
PLOT = {"reference": [], "candidate": [], "edges": [-4, -3, -2, -1], "counts": [5, 3, 0]}
CERTIFICATE = {
    "schema": "halfserve.certificate",
    "passed": True,
    "samples": 12,
    "created_utc": "2026-01-02T03:04:05+00:00",
    "budget": {"max_scaled_error": 0.01},
    "outputs": [{"name": HOSTILE, "execution": "rounded", "figures": FIGURES, "violations": [], "plot": PLOT}],
}
READY = "document.querySelector('#plots svg') && document.querySelector('#try form')"
STATIC = resources.files("halfserve.serve.http.page").joinpath("static")
WIDE = "[9007199254740993, -9223372036854775808, 18446744073709551615, 0.25]"
Run = Callable[[str], str]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with chromium(program, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, RestServer]]:
    """Models "mlp", with a certificate and a sample, "photos", "embedder", one of a hostile name, and "picky", all their own:
    the tests look at their counters.
    """
    root = tmp_path_factory.mktemp("shown")
    save_mlp(root / "mlp" / "1" / "model.onnx")
    save_sample(root / "mlp" / "1", CERTIFICATE)
    save_picky(root / "picky" / "1" / "model.onnx")
    save_text_model(root, "embedder")
    (save_picture_model(root, "photos") / "labels.txt").write_text(f"{LONG}\ngreen\nblue\n")
    save_picky(root / HOSTILE.replace("/", "") / "1" / "model.onnx")
    with running_server(lambda: vouched(load_repository(root))) as server, running_http(server) as rest:
        yield server, rest


@pytest.fixture
def url(tab: Tab, served: tuple[RunningServer, RestServer]) -> Iterator[str]:
    tab.complaints.clear()
    yield f"http://127.0.0.1:{served[1].port}"
    # The browser itself reports requests that are refused, some time after they are.
    assert [complaint for complaint in tab.complaints if not complaint.endswith("/infer")] == []


def choose(tab: Tab, url: str, model: str) -> None:
    visit(tab, f"{url}/#{model}%2F1")
    tab.wait_for(f"{READY} && document.querySelector('#heading h2').textContent.startsWith({json.dumps(model)})")


def visit(tab: Tab, address: str, *, width: int = 1280, dark: bool = False) -> None:
    tab.open("about:blank")
    tab.open(address, width=width, dark=dark)


def send(tab: Tab) -> str:
    tab.read("document.querySelector('#try form').requestSubmit()")
    return str(tab.wait_for("document.querySelector('#try .answer').innerText"))


def test_it_shows_the_models_and_one_of_them(tab: Tab, url: str) -> None:
    tab.open(url)
    tab.wait_for(READY)
    names = tab.read("[...document.querySelectorAll('#models .name')].map(e => e.textContent)")
    assert sorted(names) == sorted([HOSTILE.replace("/", ""), "embedder", "mlp", "photos", "picky"])
    choose(tab, url, "mlp")
    assert tab.read("document.querySelector('#status').textContent") == "ready"
    assert "CPUExecutionProvider" in tab.read("document.querySelector('#heading').innerText")
    assert tab.read("document.title").startswith("mlp")


def test_a_user_signs_in_with_a_token_and_has_its_rights(
    tab: Tab, served: tuple[RunningServer, RestServer], tmp_path: Path
) -> None:
    token, line = new_token("alice", [Role.INFER], models=["mlp"])
    write_tokens(tmp_path / "tokens", (token, line))
    server, _ = served
    options = SecurityOptions(token_file=tmp_path / "tokens")
    security = server.call(lambda: Security(options, server.core.figures.refuse))
    with running_http(server, guard=security.main) as rest:
        visit(tab, f"http://127.0.0.1:{rest.port}/#mlp%2F1", width=390, dark=True)
        tab.wait_for("document.querySelector('#sign-in input')")
        assert tab.read("document.querySelectorAll('#models *, #sign-in .error').length") == 0
        tab.read(signed_in("no token of this server"))
        assert "token" in tab.wait_for("document.querySelector('#sign-in .error')?.innerText")
        assert (tab.read(beyond(390)), tab.read(FAINT)) == ([], [])
        tab.read(signed_in(token))
        tab.wait_for(READY)
        assert tab.read("[...document.querySelectorAll('#models .name')].map(e => e.textContent)") == ["mlp"]
        assert "alice" in tab.read("document.querySelector('#holder').innerText")
        assert "FP16 [1, 10]" in send(tab)
        command = tab.read("document.querySelector('#try .shell pre').textContent")
        assert '-H "authorization: Bearer $TOKEN"' in command
        assert token not in tab.read("location.href + document.documentElement.outerHTML + JSON.stringify(localStorage)")
        assert "it needs the role metrics" in tab.wait_for("document.querySelector('#server').innerText")
        assert (tab.read(beyond(390)), tab.read(FAINT)) == ([], [])
        visit(tab, f"http://127.0.0.1:{rest.port}/docs")
        tab.wait_for("document.querySelector('.route')")  # with the token of this tab
        visit(tab, f"http://127.0.0.1:{rest.port}/")
        tab.wait_for(READY)
        tab.read("document.querySelector('#holder button').click()")
        tab.wait_for("document.querySelector('#sign-in input') && !document.querySelector('#models .name')")
        visit(tab, f"http://127.0.0.1:{rest.port}/docs")
        tab.wait_for("document.querySelector('#sign-in input')")


def signed_in(token: str) -> str:
    return f"""(() => {{
      document.querySelector('#sign-in input').value = {json.dumps(token)};
      document.querySelector('#sign-in form').requestSubmit();
    }})()"""


def test_names_are_text_and_never_markup(tab: Tab, url: str) -> None:
    choose(tab, url, "mlp")
    assert tab.wait_for("document.querySelector('#certificate td').textContent") == HOSTILE
    assert tab.read("document.querySelectorAll('#models img, #certificate img').length") == 0
    assert tab.read("document.title").startswith("mlp")


def test_a_request_is_sent_and_answered(tab: Tab, url: str, served: tuple[RunningServer, RestServer]) -> None:
    choose(tab, url, "mlp")
    before = statistics(url, "mlp")["requests"]
    tab.read(filled("random", "document.querySelector('input[name=\"x-0\"]').value = 2"))
    text = send(tab)
    assert "FP16 [2, 10]" in text
    assert "and 10 more" in text
    assert statistics(url, "mlp")["requests"] == before + 1
    pasted = tab.read("document.querySelector('#try .shell pre').textContent")
    assert pasted.startswith(f"curl {url}/v2/models/mlp/versions/1/infer -H 'content-type: application/json' -d '{{")
    answer = subprocess.run(["bash", "-c", f"{pasted} -s"], capture_output=True, check=True, timeout=500).stdout
    assert json.loads(answer)["outputs"][0]["shape"] == [2, 10]


def test_the_recorded_sample_comes_first_with_what_it_should_give(tab: Tab, url: str) -> None:
    choose(tab, url, "mlp")
    assert tab.read("document.querySelector('#try select').value") == "the model's own sample"
    assert tab.read("(({ width, height }) => [width, height])(document.querySelector('#try canvas'))") == [8, 8]
    text = send(tab)
    assert "same largest value as expected" in text
    assert "differs by at most 0" in text
    rows = tab.read("[...document.querySelectorAll('#try .values .value')].map(e => e.textContent)")
    assert rows[:4] == ["", "", "served", "expected"]
    assert len(rows) == 4 + 2 * 10


def test_a_picture_is_shown_and_classified_as_the_servers_own_path_does(tab: Tab, url: str) -> None:
    picture = encoded("PNG")
    choose(tab, url, "photos")
    assert tab.read("document.querySelector('#try .shell pre').textContent").endswith("/classify --data-binary @cat.jpg")
    tab.read(uploaded(picture, "my cat.png"))
    tab.wait_for("document.querySelector('#try .preview canvas')")
    send(tab)
    shown = tab.read("[...document.querySelectorAll('#try .answer .values .value')].map(e => e.textContent)")
    expected = httpx.post(f"{url}/v2/models/photos/classify", content=picture, timeout=60).json()
    assert [float(one) for one in shown] == pytest.approx([one["score"] for one in expected], rel=1e-3)
    command = tab.read("document.querySelector('#try .shell pre').textContent")
    assert command == f"curl {url}/v2/models/photos/versions/1/classify --data-binary '@my cat.png'"


def test_a_text_is_sent_to_the_path_that_people_call(tab: Tab, url: str) -> None:
    choose(tab, url, "embedder")
    command = tab.read("document.querySelector('#try .shell pre').textContent")
    assert command.startswith(f"curl {url}/v1/embeddings ")
    assert "embedding" in send(tab)


def test_commands_and_answers_are_copied(tab: Tab, url: str) -> None:
    choose(tab, url, "mlp")
    send(tab)
    tab.read("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert tab.read("[...document.querySelectorAll('pre')].every(e => e.parentElement.querySelector('.copy'))")
    tab.read(
        """(() => {
      Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (text) => { window.copied = text; } } });
      document.querySelector('#try .shell .copy').click();
    })()"""
    )
    tab.wait_for("document.querySelector('#try .shell .copy').textContent === 'Copied'")
    assert tab.read("window.copied === document.querySelector('#try .shell pre').textContent")


def test_own_values_are_sent(tab: Tab, url: str) -> None:
    choose(tab, url, "picky")
    tab.read(own("[[1]]"))
    assert "20" in send(tab)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("[[1", "input i: this is no JSON"),
        ("[[0.5]]", "400: input 'i' has the element 0.5 in data, expected whole numbers for INT64"),
        ("[[9]]", "500: the model failed on this request"),
    ],
    ids=["no-json", "no-integer", "fails"],
)
def test_what_goes_wrong_is_shown(tab: Tab, url: str, written: str, text: str) -> None:
    choose(tab, url, "picky")
    tab.read(own(written))
    tab.read("document.querySelector('#try form').requestSubmit()")
    assert text in tab.wait_for("document.querySelector('#try .error')?.textContent")


def test_what_models_do_is_plotted(tab: Tab, url: str, served: tuple[RunningServer, RestServer]) -> None:
    choose(tab, url, "mlp")
    send(tab)
    path = "document.querySelectorAll('#plots svg path')"
    tab.wait_for(f"[...{path}].some(p => p.getAttribute('d').includes('L'))")
    tab.wait_for("document.querySelector('#plots path.spot')")
    tab.wait_for("document.querySelector('#plots > :last-child rect.column')")
    httpx.post(f"{url}/v2/models/absent/infer", json={"inputs": []}, timeout=60)
    assert "not found" in tab.wait_for("(t => /not found/.test(t) && t)(document.querySelector('#server').innerText)")
    assert "this process alone" in tab.read("document.querySelector('#server').innerText")
    label = tab.read("document.querySelector('#plots svg').getAttribute('aria-label')")
    assert label.startswith("Requests answered per second; now")
    assert tab.wait_for("document.querySelector('#facts .share')") is not None


def test_what_is_being_read_stays_while_figures_change(tab: Tab, url: str) -> None:
    choose(tab, url, "mlp")
    send(tab)
    tab.wait_for("document.querySelector('#facts summary')")
    tab.read("document.querySelector('#facts details').open = true; document.querySelector('#facts summary').focus()")
    answered = tab.read("document.querySelector('#facts dl').innerText")
    send(tab)
    tab.wait_for(f"document.querySelector('#facts dl').innerText !== {json.dumps(answered)}")
    assert tab.read("document.querySelector('#facts details').open && document.activeElement.tagName") == "SUMMARY"
    assert tab.read("document.querySelectorAll('#facts rect.column').length") >= 1


@pytest.fixture
def refused(tab: Tab, served: tuple[RunningServer, RestServer]) -> Iterator[str]:
    """The name of a model whose version was refused, for a long reason."""
    server, _ = served
    reason = "model.onnx is <b>cut</b> off; copy it once more, and load the model again. " * 3
    server.call(lambda: server.core.states.set("broken", 1, VersionState.UNAVAILABLE, reason))
    yield "broken"
    server.call(lambda: server.core.states.clear("broken", 1, VersionState.UNAVAILABLE))
    tab.wait_for("!document.querySelector('#models').innerText.includes('broken')")


def test_what_was_refused_is_shown_with_its_reason(tab: Tab, url: str, refused: str) -> None:
    visit(tab, f"{url}/#{refused}%2F1")
    text = tab.wait_for("document.querySelector('#heading .reason') && document.querySelector('#heading').innerText")
    assert "unavailable" in text
    assert "model.onnx is <b>cut</b> off" in text
    assert "takes no requests" in tab.read("document.querySelector('#try').innerText")


def test_metrics_report_the_state_of_instances(tab: Tab, url: str, served: tuple[RunningServer, RestServer]) -> None:
    server, _ = served
    (copy,) = server.core.model("picky").batcher.instances
    copy.recovery.restarts, copy.recovery.fault = 2, "it hung for 5 s"
    try:
        choose(tab, url, "picky")
        text = tab.wait_for("document.querySelector('#facts dl').innerText")
        assert "1 up\ncopy 0 was restarted 2 times\ncopy 0: it hung for 5 s" in text
    finally:
        copy.recovery.restarts, copy.recovery.fault = 0, None


def test_the_certificate_is_shown(tab: Tab, url: str) -> None:
    choose(tab, url, "mlp")
    text = tab.wait_for("document.querySelector('#certificate table') && document.querySelector('#certificate').innerText")
    assert "within budget" in text
    assert "12 samples" in text
    assert tab.read("document.querySelectorAll('#certificate rect.column').length") == 3
    assert tab.read("document.querySelectorAll('#certificate line.limit').length") == 1
    choose(tab, url, "picky")
    assert "None." in tab.wait_for("document.querySelector('#certificate .empty').textContent")


def test_an_ensemble_shows_the_certificates_of_its_steps(tab: Tab, tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    scheme = ensemble(step("mlp", "x=x", "y=out"), input="x:FP16:64", output="out:FP16:10")
    save_ensemble(tmp_path / "behind", scheme)
    with controlled_server(tmp_path, ControlMode.NONE) as server, running_http(server) as rest:
        save_sample(tmp_path / "mlp" / "1", CERTIFICATE)
        vouched([server.core.model("mlp")])
        choose(tab, f"http://127.0.0.1:{rest.port}", "behind")
        assert "mlp/1\npassed" in tab.wait_for("document.querySelector('#certificate dl').innerText")
        tab.read("document.querySelector('#certificate a').click()")
        tab.wait_for("document.querySelector('#certificate table') && document.title.startsWith('mlp')")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("model", ["mlp", "photos"])
def test_it_fits_every_width_and_can_be_read_in_every_light(
    tab: Tab, url: str, refused: str, model: str, width: int, dark: bool
) -> None:
    visit(tab, f"{url}/#{model}%2F1", width=width, dark=dark)
    tab.wait_for(f"{READY} && document.querySelector('#models').innerText.includes('{refused}')")
    if model == "mlp":
        tab.wait_for("document.querySelector('#certificate td')")
    else:
        tab.read(uploaded(encoded("PNG"), f"{LONG}.png"))
    assert LONG[:20] in send(tab) or model == "mlp"
    tab.wait_for("document.querySelector('#server dl')")
    assert tab.read(beyond(width)) == []
    assert tab.read(FAINT) == []
    heights = "[...document.querySelectorAll('#models .badge')].map(e => e.offsetHeight)"
    assert len(set(tab.read(heights))) == 1  # a card beside a taller one has badges of one line, too


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_api_page_shows_every_route_of_the_document(tab: Tab, url: str, dark: bool) -> None:
    visit(tab, f"{url}/docs#classify", width=390, dark=dark)
    tab.wait_for("document.querySelector('#classify[open] .inside')")
    document = httpx.get(f"{url}/openapi.json", timeout=60).json()
    names = {one["operationId"] for item in document["paths"].values() for key, one in item.items() if key != "parameters"}
    assert set(tab.read("[...document.querySelectorAll('.route')].map(e => e.id)")) == names
    text = tab.read("document.querySelector('#classify').innerText")
    for part in ("inputs: string", "top_k?: integer | null", "PictureClass", '"label": "tabby"', "--data-binary @FILE", "429"):
        assert (part in text) == (part != "PictureClass"), part  # types stand where they are used
    tab.read("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    tab.wait_for("[...document.querySelectorAll('.route')].every(e => e.querySelector('.inside'))")
    assert "[object" not in tab.read("document.body.innerText")
    assert (tab.read(beyond(390)), tab.read(FAINT)) == ([], [])
    tab.read(
        """(() => {
      const search = document.querySelector('input[type=search]');
      search.value = '/classify';
      search.dispatchEvent(new Event('input'));
    })()"""
    )
    assert tab.read("[...document.querySelectorAll('.route:not([hidden])')].map(e => e.id)") == [
        "classify",
        "classifyByVersion",
    ]


def test_it_is_dark_where_the_reader_is(tab: Tab, url: str) -> None:
    tab.open("about:blank")
    tab.open(url, dark=True, width=500)
    tab.wait_for(READY)
    middle = "(e => (e.getBoundingClientRect().top + e.getBoundingClientRect().bottom) / 2)"
    one, other = (tab.read(f"{middle}(document.querySelector('{part}'))") for part in ("#theme", ".brand"))
    assert abs(one - other) < 2  # one row
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.read(background)
    tab.read("document.querySelector('#theme').click()")
    assert tab.read(background) != dark
    tab.read("localStorage.clear()")


def test_it_can_be_used_without_a_mouse_and_without_sight(tab: Tab, url: str) -> None:
    choose(tab, url, "mlp")
    unnamed = tab.read(
        """[...document.querySelectorAll('button, select, input, textarea, a, svg')]
           .filter(e => !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map(e => e.outerHTML)"""
    )
    assert unnamed == []
    assert tab.read("document.documentElement.lang") == "en"
    assert tab.read("[...document.querySelectorAll('[tabindex]')].every(e => e.tabIndex <= 0)")


def own(text: str) -> str:
    """A script that writes own values into the form."""
    return filled("own JSON", f"document.querySelector('#try textarea').value = {json.dumps(text)}")


def filled(choice: str, more: str) -> str:
    """A script that chooses the values of the only input, and does something more."""
    return f"""(() => {{
      const [fill] = document.querySelectorAll('#try select');
      fill.value = {json.dumps(choice)};
      fill.dispatchEvent(new Event('change'));
      {more};
    }})()"""


def uploaded(content: bytes, name: str) -> str:
    """A script that chooses a file, as a user does in the browser's dialog."""
    return f"""(() => {{
      const given = new DataTransfer();
      const bytes = Uint8Array.from(atob({json.dumps(base64.b64encode(content).decode())}), (one) => one.charCodeAt(0));
      given.items.add(new File([bytes], {json.dumps(name)}, {{ type: 'image/png' }}));
      const field = document.querySelector('#try input[type=file]');
      field.files = given.files;
      for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {{ bubbles: true }}));
    }})()"""


def save_sample(folder: Path, certificate: dict[str, Any]) -> None:
    """Write the certificate of "mlp" with a recorded sample, which looks like a digit."""
    x = np.zeros((1, 8, 8), np.float32)
    x[:, 1:7, 4] = 1
    y = np.maximum(x.reshape(1, 64) @ mlp_weights()[0].astype(np.float32), 0) @ mlp_weights()[1].astype(np.float32)
    np.savez(folder / SAMPLES, allow_pickle=False, **{f"{RECORDED_INPUT}x": x.reshape(1, 64), f"{RECORDED_OUTPUT}y": y})
    digest = hashlib.sha256((folder / SAMPLES).read_bytes()).hexdigest()
    (folder / "certificate.json").write_text(json.dumps(certificate | {"files": {SAMPLES: digest}}))


def statistics(url: str, name: str) -> dict[str, int]:
    models = httpx.get(f"{url}/ui/state", timeout=60).json()["models"]
    found: dict[str, int] = next(model for model in models if model["name"] == name)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script that has all of the module as `tensors`, and tells what it prints."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node on this machine")
    for name in ("tensors", "requests", "server", "dom"):
        (tmp_path / f"{name}.js").write_bytes(STATIC.joinpath(f"{name}.js").read_bytes())
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def ran(script: str) -> str:
        program = tmp_path / "script.js"
        program.write_text(f'import * as tensors from "./tensors.js";\n{script}')
        return subprocess.run([node, program], capture_output=True, check=True, text=True, timeout=500).stdout.strip()

    return ran


def test_what_people_write_is_sent_as_it_is(run: Run) -> None:
    head = '{name: "x", datatype: "INT64", shape: [4]'
    body = run(f"console.log(tensors.request([{head}, data: tensors.written('{WIDE} ', 'x')}}]))")
    assert body == f'{{"inputs":[{{"name":"x","datatype":"INT64","shape":[4],"data":{WIDE}}}]}}'


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ('{datatype: "UINT8", shape: [-1, 32, 48, 3]}', "a picture"),
        ('{datatype: "UINT8", shape: [32, 48, 3]}', "a picture"),
        ('{datatype: "UINT8", shape: [-1, 32, 48, 4]}', "random"),
        ('{datatype: "UINT8", shape: [-1, -1, -1, 3]}', "random"),
        ('{datatype: "FP32", shape: [-1, 32, 48, 3]}', "random"),
        ('{datatype: "BYTES", shape: [-1, 1]}', "text"),
    ],
)
def test_the_form_offers_what_an_input_takes_first(run: Run, spec: str, expected: str) -> None:
    assert run(f"console.log(tensors.fills({spec})[0])") == expected


@pytest.mark.parametrize(
    ("datatype", "shape", "size"),
    [
        ("FP32", [1, 1, 8, 8], [8, 8]),
        ("FP32", [1, 3, 10, 8], [8, 10]),
        ("UINT8", [1, 10, 8, 3], [8, 10]),
        ("FP16", [1, 81], [9, 9]),
        ("INT64", [1, 8, 8], None),
        ("FP32", [1, 40, 8], None),
        ("FP32", [1, 2, 8, 8], None),
        ("FP32", [1, 10], None),
    ],
)
def test_a_tensor_that_is_a_picture_is_known(run: Run, datatype: str, shape: list[int], size: list[int] | None) -> None:
    count = math.prod(shape)
    tensor = {"datatype": datatype, "shape": shape, "data": [0] * (count // 2) + [3] * (count - count // 2)}
    script = f"const p = tensors.pictureOf({json.dumps(tensor)}); const shown = p && [p.width, p.height, p.pixels.at(-2)];"
    found = json.loads(run(f"{script} console.log(JSON.stringify(shown))"))
    assert found == (size and [*size, 255])


def test_scores_are_those_of_the_servers_paths(run: Run) -> None:
    def scores(numbers: list[float], how: str) -> list[float]:
        found: list[float] = json.loads(run(f"console.log(JSON.stringify(tensors.scores({numbers}, {how!r})))"))
        return found

    assert scores([1, 2, 3], "softmax") == pytest.approx(softmax(np.array([1, 2, 3], np.float32)).tolist(), rel=1e-5)
    assert scores([0.25, 0.75], "softmax") == [0.25, 0.75]  # they are scores already
    assert scores([0, 2], "sigmoid") == pytest.approx([0.5, 1 / (1 + math.exp(-2))])


def test_answers_are_compared_with_all_expected_numbers(run: Run) -> None:
    assert run("console.log(tensors.distance([1, -3, 'NaN'], [1, -4, 'NaN']))") == "0.25"
    assert run("const many = Array(200_000).fill(2); console.log(tensors.distance(many, many))") == "0"


@pytest.mark.parametrize(
    ("body", "command"),
    [
        ('{"a":"it\'s"}', """curl http://h:1/p -H 'content-type: application/json' -d '{"a":"it'\\''s"}'"""),
        ({"file": "cat.jpg"}, "curl http://h:1/p --data-binary @cat.jpg"),
        ({"file": "$(id).jpg"}, "curl http://h:1/p --data-binary '@$(id).jpg'"),
        (None, "curl http://h:1/p -H 'content-type: application/json' -d @request.json"),
        ("1" * 60_000, "curl http://h:1/p -H 'content-type: application/json' -d @request.json"),
    ],
    ids=["quoted", "file", "hostile", "too-large", "too-long"],
)
def test_commands_are_short_and_quoted(run: Run, body: object, command: str) -> None:
    options = '{ origin: "http://h:1", hasToken: false }'
    script = f"import {{ curl }} from './requests.js'; console.log(curl('/p', {json.dumps(body)}, {options}))"
    assert run(script) == command


def test_a_picture_is_cut_around_its_middle_and_loses_its_opacity(run: Run) -> None:
    part = run("console.log(JSON.stringify(tensors.middle({width: 400, height: 100}, {width: 50, height: 25})))")
    assert json.loads(part) == {"left": 100, "top": 0, "width": 200, "height": 100}
    assert run("console.log(tensors.colours([1, 2, 3, 255, 4, 5, 6, 255]).join())") == "1,2,3,4,5,6"


def test_an_output_whose_classes_have_names_is_asked_for_the_five_best(run: Run) -> None:
    outputs = '[{name: "logits", labelled: true}, {name: "features", labelled: false}]'
    body = json.loads(run(f"console.log(tensors.request([], {outputs}))"))
    assert body["outputs"] == [{"name": "logits", "parameters": {"classification": 5}}, {"name": "features"}]
    found = run("console.log(JSON.stringify(tensors.classOf('0.25:7:ratio 1:2')))")
    assert json.loads(found) == {"score": 0.25, "index": 7, "name": "ratio 1:2"}


@pytest.mark.parametrize(
    ("task", "path"),
    [
        ("embeddings", "/v1/embeddings"),
        ("text-classification", "/predict?model=a%20b"),
        ("rerank", "/rerank?model=a%20b"),
        ("image-classification", None),
    ],
)
def test_a_text_is_sent_to_the_path_of_the_models_task(run: Run, task: str, path: str | None) -> None:
    asked = json.loads(
        run(f"console.log(JSON.stringify(tensors.textRequest({{name: 'a b', task: '{task}'}}, 'one\\ntwo', 'q')))")
    )
    assert (asked and asked["path"]) == path
    if task == "rerank":
        assert asked["content"] == {"query": "q", "texts": ["one", "two"], "return_text": True}


def test_invalid_json_is_shown(run: Run) -> None:
    told = run("try { tensors.written('[1', 'x') } catch (error) { console.log(error.message) }")
    assert told.startswith("input x: this is no JSON (")


def test_answers_are_read_as_they_are_where_that_can_be_told(run: Run) -> None:
    """Only newer programs say how a number was written; others round it, as they always did."""
    read = run(f"console.log(tensors.answered('{{\"data\":{WIDE}}}').data.map(String).join(' '))")
    rounded = "9007199254740992 -9223372036854776000 18446744073709552000 0.25"
    assert read in {WIDE.strip("[]").replace(",", ""), rounded}
