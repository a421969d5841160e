from __future__ import annotations

from onnx import AttributeProto, GraphProto, ModelProto, SparseTensorProto, TensorProto

from halfserve.files.onnx_tensors import all_tensors


def tensor(name: str) -> TensorProto:
    return TensorProto(name=name)


def sparse(name: str) -> SparseTensorProto:
    return SparseTensorProto(values=tensor(f"{name}.values"), indices=tensor(f"{name}.indices"))


def graph(name: str, *bodies: GraphProto) -> GraphProto:
    """One with a tensor in every place that a graph and its nodes have."""
    made = GraphProto(initializer=[tensor(f"{name}.initializer")], sparse_initializer=[sparse(f"{name}.sparse")])
    made.node.add().attribute.append(attribute(name, *bodies))
    return made


def attribute(name: str, *bodies: GraphProto) -> AttributeProto:
    # All at once, and of no type: which of them counts is up to who reads it.
    return AttributeProto(
        t=tensor(f"{name}.t"),
        tensors=[tensor(f"{name}.tensors")],
        sparse_tensor=sparse(f"{name}.sparse_tensor"),
        sparse_tensors=[sparse(f"{name}.sparse_tensors")],
        g=bodies[0] if bodies else None,
        graphs=bodies[1:],
    )


def names(of: str) -> set[str]:
    parts = {f"{kind}.{part}" for kind in ("sparse_tensor", "sparse_tensors") for part in ("values", "indices")}
    return {f"{of}.{kind}" for kind in ("t", "tensors", *parts)}


def names_of_graph(of: str) -> set[str]:
    return {f"{of}.initializer", f"{of}.sparse.values", f"{of}.sparse.indices", *names(of)}


def test_every_place_that_a_model_has_for_a_tensor_is_walked() -> None:
    model = ModelProto(graph=graph("main", graph("g", graph("within g")), graph("graphs")))
    function = model.functions.add()
    function.node.add().attribute.append(attribute("function", graph("in function")))
    function.attribute_proto.append(attribute("default"))
    training = model.training_info.add()
    training.initialization.CopyFrom(graph("initialization"))
    training.algorithm.CopyFrom(graph("algorithm"))
    graphs = ("main", "g", "within g", "graphs", "in function", "initialization", "algorithm")
    expected = set[str]().union(*map(names_of_graph, graphs), names("function"), names("default"))
    found = [tensor.name for tensor in all_tensors(model)]
    assert set(found) == expected
    assert len(found) == len(expected), "each once"


def test_what_is_found_is_the_messages_own() -> None:
    model = ModelProto(graph=graph("main"))
    for found in all_tensors(model):
        found.raw_data = b"changed"
    assert model.graph.initializer[0].raw_data == b"changed"
    assert model.graph.node[0].attribute[0].sparse_tensors[0].indices.raw_data == b"changed"
