"""An OpenVINO file: model.xml, a graph whose weights lie in model.bin. Its interface is read without OpenVINO.

Each `layer` has ports with a type and sizes, and `edge` elements join the ports. Layers of the type Parameter are inputs, and
layers of the type Result are outputs: https://docs.openvino.ai/2026/documentation/openvino-ir-format.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, XMLParser, fromstring

from halfserve.protos.datatypes import BY_WIRE
from halfserve.serve.engine.backend import OPENVINO, ModelInterface
from halfserve.serve.engine.disk_files import open_regular, require_regular
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import require_inside
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec

MAX_BYTES = 1 << 27  # most bytes of the graph without its weights, which is held several times while it is parsed
# Type names that differ from the wire's. A tensor of text ends the process of OpenVINO 2026.4's Python interface.
WIRE_NAMES = {"I8": "INT8", "I16": "INT16", "I32": "INT32", "I64": "INT64", "BOOLEAN": "BOOL", "STRING": ""} | {
    f"U{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)
}
# Input ports that determine an output's size, by the type of layer.
SIZE_PORTS = {
    **dict.fromkeys(("Broadcast", "Interpolate", "OneHot", "Pad", "Tile"), frozenset({1, 2})),
    "RandomUniform": frozenset({0}),
    "Range": frozenset({0, 1, 2}),
}
LOOPS = frozenset({"Loop", "If"})
OF_SHAPES = frozenset({"ShapeOf"})  # layers whose results do not depend on values


def read_ir_interface(path: Path) -> ModelInterface:
    """Read the interface of model.xml.
    Raises ModelLoadError: the file or its weights cannot be read, it is no OpenVINO graph, or a value has no wire type.
    """
    graph = _Graph(_read(path), path)
    inputs = tuple(_spec(layer, layer, f"{path}: input") for layer in graph.of_type("Parameter"))
    outputs = tuple(_spec(layer, graph.source(layer), f"{path}: output") for layer in graph.of_type("Result"))
    for kind, specs in (("input", inputs), ("output", outputs)):
        names = [spec.name for spec in specs]
        for name in names:
            if names.count(name) > 1:
                raise ModelLoadError(
                    f"{path}: {kind} {name!r} is there twice, expected each once; give the tensors other names"
                )
    batched = bool(inputs and outputs) and all(spec.shape[:1] == (ANY_SIZE,) for spec in (*inputs, *outputs))
    most = [rows for layer in graph.of_type("Parameter") if (rows := _most_rows(layer)) is not None] if batched else []
    return ModelInterface(
        inputs=inputs,
        outputs=outputs,
        batched=batched,
        kind=OPENVINO,
        most_rows=min(most, default=None),
        data_files=_weights(graph, path),
        open_ended=graph.is_open_ended(),
    )


def _read(path: Path) -> Element:
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ModelLoadError(f"{path}: has more than {MAX_BYTES} bytes, expected a graph without its weights")
    if b"\0" in content:  # as in UTF-16, which the parser would recognise, and which would hide a DOCTYPE from this search
        raise ModelLoadError(f"{path}: is not UTF-8 text, expected an OpenVINO graph as ov.save_model writes it")
    if b"<!DOCTYPE" in content:  # its entities can grow without bound
        raise ModelLoadError(f"{path}: has a DOCTYPE, expected an OpenVINO graph as ov.save_model writes it")
    try:
        # The encoding that the file declares is ignored.
        root = fromstring(content, XMLParser(encoding="utf-8"))  # noqa: S314  (no DOCTYPE, so no entities; a bounded size)
    except (ParseError, ValueError) as error:
        raise ModelLoadError(f"{path}: is not readable XML ({error}); save the model again with ov.save_model") from None
    if root.tag != "net" or root.find("layers") is None:
        raise ModelLoadError(f"{path}: is not an OpenVINO graph (no net and layers in it); expected what ov.save_model writes")
    return root


class _Graph:
    """The layers of a graph and the edges between them; bodies of loops are not examined."""

    def __init__(self, root: Element, path: Path) -> None:
        self._path = path
        layers = root.find("layers")
        self._layers = {layer.get("id", ""): layer for layer in (layers if layers is not None else ())}
        # Maps an input (layer, port) to the output that it takes.
        self._edges: dict[tuple[str, str], tuple[str, str]] = {}
        for edge in root.iterfind("edges/edge"):
            to = edge.get("to-layer", ""), edge.get("to-port", "")
            self._edges[to] = edge.get("from-layer", ""), edge.get("from-port", "")

    def of_type(self, kind: str) -> Iterator[Element]:
        return (layer for layer in self._layers.values() if layer.get("type") == kind)

    def source(self, result: Element) -> Element:
        """Return a copy of the layer that makes a Result's value, with only that output.
        Raises ModelLoadError: there is no such layer.
        """
        port = result.find("input/port")
        place = self._edges.get((result.get("id", ""), "" if port is None else port.get("id", "")))
        maker = None if place is None else self._layers.get(place[0])
        made = [] if maker is None or place is None else [p for p in maker.iterfind("output/port") if p.get("id") == place[1]]
        if maker is None or not made:
            raise ModelLoadError(f"{self._path}: output {result.get('name')!r} has no value; save the model again")
        alone = Element(maker.tag, maker.attrib)
        output = Element("output")
        output.append(made[0])
        alone.append(output)
        return alone

    def is_open_ended(self) -> bool:
        """Return whether the compute time of a batch depends on values: by loops, or by sizes computed from values."""
        values = {layer.get("id", "") for layer in self.of_type("Parameter")}
        taken: dict[str, list[tuple[int, str]]] = {}
        for (taker, port), (source, _) in self._edges.items():
            taken.setdefault(taker, []).append((int(port) if port.isdecimal() else 0, source))
        for number, layer in self._layers.items():  # ov.save_model writes the layers in topological order
            kind: str = layer.get("type", "")
            sources = taken.get(number, ())
            if kind in LOOPS or any(port in SIZE_PORTS.get(kind, ()) and source in values for port, source in sources):
                return True
            if kind not in OF_SHAPES and any(source in values for _, source in sources):
                values.add(number)
        return False


def _weights(graph: _Graph, path: Path) -> frozenset[str]:
    file = path.with_suffix(".bin")  # may be absent if the graph has no weights
    try:
        require_inside(path.parent, file)
        require_regular(file)
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror}") from None
    if file.exists():
        return frozenset({file.name})
    sizes = (data.get("size", "0") for layer in graph.of_type("Const") for data in layer.iterfind("data"))
    if any(size != "0" for size in sizes):
        raise ModelLoadError(f"{file}: is missing, and the model {path.name} beside it keeps its weights there; copy it there")
    return frozenset()


def _spec(named: Element, layer: Element, where: str) -> TensorSpec:
    """Return the spec of an input or output: `layer` makes its value, and `named` is the Parameter or Result itself."""
    port = layer.find("output/port")
    if port is None:
        raise ModelLoadError(f"{where} {named.get('name')!r} has no port; save the model again")
    # Clients know a tensor by the first of its names, as in Triton, or by its layer's.
    names = re.split(r"(?<!\\),", port.get("names", ""))
    name = min((one.replace("\\,", ",") for one in names if one), default=layer.get("name", ""))
    precision = port.get("precision", "")
    datatype = BY_WIRE.get(WIRE_NAMES.get(precision, precision))
    if datatype is None or datatype.array_dtype.hasobject:
        raise ModelLoadError(f"{where} {name!r} has the type {precision}, which cannot be served; cast it inside the model")
    data = layer.find("data")
    if data is not None and "..." in data.get("shape", ""):
        raise ModelLoadError(f"{where} {name!r} has no shape, not even a rank; convert the model with one")
    sizes = [size.text or "" for size in port.iterfind("dim")]
    if not all(re.fullmatch(r"-1|\d{1,18}", size) for size in sizes):
        raise ModelLoadError(f"{where} {name!r} has the sizes {sizes}, expected numbers; save the model again")
    return TensorSpec(name=name, datatype=datatype, shape=tuple(int(size) for size in sizes))


def _most_rows(parameter: Element) -> int | None:
    """Return the upper end of a first size such as 1..8; None if there is none."""
    data = parameter.find("data")
    first = re.match(r"\d*\.\.(\d+)", "" if data is None else data.get("shape", ""))
    return int(first[1]) if first else None
