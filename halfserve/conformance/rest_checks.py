"""Checks of the protocol over REST, and of Triton's binary tensors."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from halfserve.conformance.checks import ConformanceCheck, NotOfferedError, ViolationError, expect
from halfserve.conformance.target_models import WIDTHS, TargetModel, model_of, same_values, unpacked

SECONDS = 30.0
UNKNOWN = "no-such-model-or-tensor"
OIP, BINARY, TRITON, HTTP = (
    "Open Inference Protocol, REST: ",
    "Binary tensor data extension: ",
    "Triton's extension: ",
    "RFC 9110: ",
)
LENGTH_HEADER = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class RestAnswer:
    """Status, headers (lower case) and body of an answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass(frozen=True)
class RestTarget:
    """A server's port."""

    host: str
    port: int

    def ask(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None = None, headers: Mapping[str, str] | None = None
    ) -> RestAnswer:
        """Send one request on a connection of its own."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        try:
            return send(connection, method, path, body, headers)
        finally:
            connection.close()

    def infer(self, model: str, request: Any) -> Any:
        """Send an inference request, and return the answer's JSON."""
        answer = self.ask("POST", infer_path(model), json.dumps(request).encode(), {"Content-Type": "application/json"})
        expect(answer.status == 200, "status 200", f"{answer.status}: {answer.body[:300]!r}")
        return answer.json


def send(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | Iterator[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> RestAnswer:
    """Send one request on a connection."""
    given = dict(headers or {})
    connection.request(method, path, body, given, encode_chunked="Transfer-Encoding" in given)
    answer = connection.getresponse()
    return RestAnswer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


def infer_path(model: str) -> str:
    """Return the path of a model's inference."""
    return f"/v2/models/{quote(model, safe='')}/infer"


def described_model(target: RestTarget, name: str) -> TargetModel:
    """Return a model by its metadata."""
    answer = target.ask("GET", f"/v2/models/{quote(name, safe='')}")
    expect(answer.status == 200, f"metadata of the model {name!r}", f"{answer.status}: {answer.body[:300]!r}")
    return model_of(answer.json, name)


def listed_models(target: RestTarget) -> list[str]:
    """Return the names of the models that are ready, where the server lists them."""
    answer = target.ask("POST", "/v2/repository/index", b'{"ready": true}')
    return list(dict.fromkeys(model["name"] for model in answer.json)) if answer.status == 200 else []


def rest_checks(target: RestTarget, models: Sequence[TargetModel]) -> Iterator[ConformanceCheck]:
    """Yield the checks; those of errors ask the first model."""
    yield from (ConformanceCheck(name=f"rest.{name}", clause=clause, run=run) for name, clause, run in _server_checks(target))
    for model in models:
        checks = _ModelChecks(target, model)
        parts = [*checks.of_each_model(), *(checks.of_one_model() if model is models[0] else ())]
        yield from (ConformanceCheck(name=f"rest.{name}[{model.name}]", clause=clause, run=run) for name, clause, run in parts)


Row = tuple[str, str, Callable[[], None]]


def _refused(answer: RestAnswer) -> None:
    """Expect an error of the protocol: an HTTP status of errors, typically 400, and a JSON object with a text."""
    expect(answer.status >= 400, "a status of errors, typically 400", f"{answer.status}: {answer.body[:300]!r}")
    try:
        text = answer.json["error"]
    except (ValueError, KeyError, TypeError):
        text = None
    expect(isinstance(text, str) and text, 'an object with the text "error"', answer.body[:300])


def _health_objects(target: RestTarget) -> None:
    for word in ("live", "ready"):
        answer = target.ask("GET", f"/v2/health/{word}")
        if not answer.body:
            raise NotOfferedError("the bodies are empty, as Triton's are; the REST client of KServe's SDK needs them")
        expect(answer.json.get(word) is True, f'{{"{word}": true}}', answer.body[:300])


def _server_checks(target: RestTarget) -> list[Row]:
    def has_status(path: str, statuses: Sequence[int]) -> Callable[[], None]:
        def run() -> None:
            status = target.ask("GET", path).status
            expect(status in statuses, f"a status of {list(statuses)}", status)

        return run

    def metadata() -> None:
        answer = target.ask("GET", "/v2")
        expect(answer.status == 200, "status 200", answer.status)
        found = answer.json
        expect(found.get("name") and found.get("version"), "a name and a version", found)
        expect(isinstance(found.get("extensions"), list), "a list of extensions", found.get("extensions"))

    def keep_alive() -> None:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=SECONDS)
        try:
            send(connection, "GET", "/v2/health/live")
            first = connection.sock
            expect(send(connection, "GET", "/v2/health/live").status == 200, "a second answer of status 200", "another")
            if first is None or connection.sock is not first:
                raise NotOfferedError("the server closes the connection after an answer")
        finally:
            connection.close()

    def index() -> None:
        answer = target.ask("POST", "/v2/repository/index", b"{}")
        if answer.status in (404, 405, 501):
            raise NotOfferedError(f"POST /v2/repository/index answers {answer.status}")
        expect(answer.status == 200 and isinstance(answer.json, list), "a list of models", answer.body[:300])

    failing = (400, 404, 405, 503)
    return [
        ("server_live", OIP + "Server Live", has_status("/v2/health/live", (200,))),
        ("server_ready", OIP + "Server Ready", has_status("/v2/health/ready", (200,))),
        ("health_objects", OIP + "Server Live and Ready Response JSON Objects", lambda: _health_objects(target)),
        ("server_metadata", OIP + "Server Metadata", metadata),
        ("model_ready.unknown", OIP + "Model Ready", has_status(f"/v2/models/{UNKNOWN}/ready", failing)),
        (
            "model_metadata.unknown",
            OIP + "Model Metadata JSON Error Object",
            lambda: _refused(target.ask("GET", f"/v2/models/{UNKNOWN}")),
        ),
        (
            "infer.unknown_model",
            OIP + "Inference Response JSON Error Object",
            lambda: _refused(target.ask("POST", infer_path(UNKNOWN), b'{"inputs": []}')),
        ),
        ("unknown_path", HTTP + "404 of a path that is not there", has_status("/v2/no-such-path", (400, 404))),
        ("wrong_method", HTTP + "405 of another method", has_status(infer_path(UNKNOWN), (400, 404, 405))),
        ("keep_alive", "RFC 9112, 9.3: persistent connections", keep_alive),
        ("repository_index", TRITON + "model repository", index),
    ]


class _ModelChecks:
    def __init__(self, target: RestTarget, model: TargetModel) -> None:
        self._target, self._model, self._path = target, model, infer_path(model.name)
        self._has_halves = any(tensor.datatype in ("FP16", "BF16") for tensor in model.inputs)

    def of_each_model(self) -> list[Row]:
        """Checks that depend on the model's data types."""
        return [
            ("model_ready", OIP + "Model Ready", self._ready),
            ("model_metadata", OIP + "Model Metadata", self._metadata),
            ("infer.flat", f"{OIP}Tensor Data, flattened ({self._model.datatypes})", self._flat),
            ("infer.nested", f"{OIP}Tensor Data, nested ({self._model.datatypes})", self._nested),
            ("infer.binary_input", f"{BINARY}request ({self._model.datatypes})", self._binary_input),
            ("infer.binary_output", f"{BINARY}response ({self._model.datatypes})", self._binary_output),
        ]

    def of_one_model(self) -> list[Row]:
        """Checks that one model is enough for."""
        return [
            ("infer.id", OIP + "Inference Request id", self._id),
            ("infer.outputs", OIP + "Inference Request outputs", self._outputs),
            ("infer.parameters", OIP + "Parameters", self._parameters),
            ("infer.version", OIP + "paths with a version", self._version),
            ("infer.chunked", "RFC 9112, 7.1: chunked requests", self._chunked),
            ("infer.gzip", TRITON + "compressed bodies", self._gzip),
            *(
                (f"infer.refused.{name}", OIP + "Inference Response JSON Error Object", self._refusal(change))
                for name, change in REFUSED.items()
            ),
            ("infer.client_errors", HTTP + "4xx where the client is at fault", self._client_errors),
            ("infer.refused.not_json", OIP + "Inference Response JSON Error Object", self._not_json),
        ]

    def _request(self, **fields: Any) -> dict[str, Any]:
        for tensor in self._model.inputs:
            if tensor.datatype == "BF16":
                raise NotOfferedError("BF16 has no form in JSON")
        return {"inputs": [tensor.json for tensor in self._model.inputs], **fields}

    def _infer(self, request: Any) -> dict[str, list[Any]]:
        try:
            found = self._target.infer(self._model.name, request)
        except ViolationError as error:
            if "FP16" in self._model.datatypes:  # the protocol gives half precision no form in JSON; most servers take numbers
                raise NotOfferedError(f"FP16 in JSON: {error}") from None
            raise
        expect(found.get("model_name") == self._model.name, f"model_name {self._model.name!r}", found.get("model_name"))
        described = {tensor.name: tensor.datatype for tensor in self._model.outputs}
        values = {}
        for output in found["outputs"]:
            name = output["name"]
            expect(described.get(name) == output["datatype"], f"an output of {described}", f"{name} {output['datatype']}")
            values[name] = _flat(output["data"])
            count = 1
            for dimension in output["shape"]:
                count *= dimension
            expect(len(values[name]) == count, f"{count} elements in {name} of shape {output['shape']}", len(values[name]))
        return values

    def _ready(self) -> None:
        status = self._target.ask("GET", f"/v2/models/{quote(self._model.name, safe='')}/ready").status
        expect(status == 200, "status 200", status)

    def _metadata(self) -> None:
        found = self._target.ask("GET", f"/v2/models/{quote(self._model.name, safe='')}").json
        expect(found.get("name") == self._model.name, f"the name {self._model.name!r}", found.get("name"))
        for tensor in (*found["inputs"], *found["outputs"]):
            expect(tensor["name"] and tensor["datatype"] in WIDTHS, "a name and a data type of the protocol", tensor)

    def _flat(self) -> None:
        self._infer(self._request())

    def _nested(self) -> None:
        request = self._request()
        flat = self._infer(request)
        for given, tensor in zip(request["inputs"], self._model.inputs, strict=True):
            given["data"] = tensor.nested
        nested = self._infer(request)
        for name, values in flat.items():
            expect(same_values(nested.get(name, []), values), f"the values of flattened data in {name}", nested.get(name))

    def _needs_binary(self) -> None:
        extensions = self._target.ask("GET", "/v2").json.get("extensions") or []
        if "binary_tensor_data" not in extensions:
            raise NotOfferedError("binary_tensor_data is not among the server's extensions")

    def _binary(self, **fields: Any) -> RestAnswer:
        inputs = [
            {
                **{key: value for key, value in tensor.json.items() if key != "data"},
                "parameters": {"binary_data_size": len(tensor.raw)},
            }
            for tensor in self._model.inputs
        ]
        header = json.dumps({"inputs": inputs, **fields}).encode()
        body = header + b"".join(tensor.raw for tensor in self._model.inputs)
        headers = {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(header))}
        answer = self._target.ask("POST", self._path, body, headers)
        expect(answer.status == 200, "status 200", f"{answer.status}: {answer.body[:300]!r}")
        return answer

    def _binary_input(self) -> None:
        self._needs_binary()
        wanted = self._infer(self._request())
        plain = [{"name": tensor.name, "parameters": {"binary_data": False}} for tensor in self._model.outputs]
        found = {output["name"]: _flat(output["data"]) for output in self._binary(outputs=plain).json["outputs"]}
        for name, values in wanted.items():
            expect(same_values(found.get(name, []), values), f"the values of JSON in {name}", found.get(name))

    def _binary_output(self) -> None:
        self._needs_binary()
        answer = self._binary(parameters={"binary_data_output": True})
        length = int(answer.headers.get(LENGTH_HEADER.lower(), "0"))
        expect(length, f"the header {LENGTH_HEADER}", answer.headers)
        outputs, rest = json.loads(answer.body[:length])["outputs"], answer.body[length:]
        wanted = self._infer(self._request()) if not self._has_halves else {}
        for output in outputs:
            size = output["parameters"]["binary_data_size"]
            values, rest = unpacked(rest[:size], output["datatype"]), rest[size:]
            known = wanted.get(output["name"], values)
            expect(same_values(values, known), f"the values of JSON in {output['name']}", values)
        expect(not rest, "no bytes behind the last output", len(rest))

    def _id(self) -> None:
        found = self._target.infer(self._model.name, self._request(id="check-1"))
        expect(found.get("id") == "check-1", "the request's id 'check-1'", found.get("id"))

    def _outputs(self) -> None:
        wanted = self._model.outputs[-1].name
        found = list(self._infer(self._request(outputs=[{"name": wanted}])))
        expect(found == [wanted], f"the one output {wanted!r}", found)

    def _parameters(self) -> None:
        request = self._request(parameters={"conformance_check": "x"})
        request["inputs"][0]["parameters"] = {"conformance_check": 1}
        self._infer(request)

    def _version(self) -> None:
        found = self._target.ask("GET", f"/v2/models/{quote(self._model.name, safe='')}").json
        versions = found.get("versions")
        if not versions:
            raise NotOfferedError("the metadata has no versions")
        path = f"/v2/models/{quote(self._model.name, safe='')}/versions/{versions[-1]}"
        for method, end, body in (("GET", "", None), ("GET", "/ready", None), ("POST", "/infer", json.dumps(self._request()))):
            status = self._target.ask(method, path + end, body.encode() if body else None).status
            expect(status == 200, f"status 200 of {path}{end}", status)

    def _chunked(self) -> None:
        body = json.dumps(self._request()).encode()
        parts = iter([body[:10], body[10:]])
        answer = self._target.ask("POST", self._path, parts, {"Transfer-Encoding": "chunked"})
        expect(answer.status == 200, "status 200", f"{answer.status}: {answer.body[:300]!r}")

    def _gzip(self) -> None:
        body = gzip.compress(json.dumps(self._request()).encode())
        answer = self._target.ask("POST", self._path, body, {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"})
        if answer.status in (400, 415):
            raise NotOfferedError(f"a body with Content-Encoding: gzip is answered by {answer.status}")
        expect(answer.status == 200, "status 200", f"{answer.status}: {answer.body[:300]!r}")
        held = gzip.decompress(answer.body) if answer.headers.get("content-encoding") == "gzip" else answer.body
        expect(json.loads(held).get("outputs"), "an answer with outputs", held[:300])

    def _refusal(self, change: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
        def run() -> None:
            request = self._request()
            change(request)
            _refused(self._target.ask("POST", self._path, json.dumps(request).encode()))

        return run

    def _client_errors(self) -> None:
        found = {}
        for name, change in REFUSED.items():
            request = self._request()
            change(request)
            found[name] = self._target.ask("POST", self._path, json.dumps(request).encode()).status
        others = {name: status for name, status in found.items() if not 400 <= status < 500}
        expect(not others, "statuses from 400 to 499", others)

    def _not_json(self) -> None:
        for body in (b"", b"{", b"[]", b"\xff\xfe"):
            _refused(self._target.ask("POST", self._path, body))


def _flat(data: Any) -> list[Any]:
    return [value for part in data for value in _flat(part)] if isinstance(data, list) else [data]


def _changed(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda request: request["inputs"][0].update(values)


# Ways to break a request of a model, by name.
REFUSED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no_inputs": lambda request: request.pop("inputs"),
    "inputs_of_another_type": lambda request: request.update(inputs={"name": "x"}),
    "no_data": lambda request: request["inputs"][0].pop("data"),
    "unknown_input": _changed(name=UNKNOWN),
    "unknown_output": lambda request: request.update(outputs=[{"name": UNKNOWN}]),
    "unknown_datatype": _changed(datatype="FP7"),
    "negative_shape": lambda request: request["inputs"][0].update(shape=[-1] * len(request["inputs"][0]["shape"])),
    "too_much_data": lambda request: request["inputs"][0]["data"].extend(request["inputs"][0]["data"] * 2),
    "data_of_another_type": lambda request: request["inputs"][0].update(data=[{"x": 1}] * len(request["inputs"][0]["data"])),
}
