from __future__ import annotations

import pytest
from google.protobuf import text_format

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import Backend, DevicePlacement
from halfserve.serve.engine.config.instance_groups import complete_groups, load_copies
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.fakes import FakeBackend

ANYWHERE, ON_CPU = DevicePlacement(), DevicePlacement(use_gpu=False)
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
Copies = list[tuple[str, int]]


class Placed(FakeBackend):
    """A copy that says where it computes."""

    def __init__(self, provider: str) -> None:
        self.provider = provider

    def run(self, inputs: Tensors) -> Tensors:
        return inputs


def completed(groups: str, devices: int, placement: DevicePlacement = ANYWHERE, provider: str = CUDA) -> tuple[str, Copies]:
    """The completed groups, and where each copy is; `provider` is where a copy computes that may use a device."""
    config = text_format.Parse(f'name: "m" {groups}', ModelConfig())
    groups_of_config = complete_groups(config, placement, devices)
    copies, places = load_copies(groups_of_config, placement, lambda place: Placed(provider if place.use_gpu else CPU))
    assert len(copies) == len(places)
    found = [("cpu" if not place.use_gpu else "gpu" if place.require_gpu else "any", place.device_id) for place in places]
    return text_format.MessageToString(config, as_one_line=True).removeprefix('name: "m" ').strip(), found


@pytest.mark.parametrize(
    ("groups", "devices", "shown", "copies"),
    [
        ("", 2, 'name: "m" kind: KIND_GPU count: 1 gpus: [0, 1]', [("gpu", 0), ("gpu", 1)]),
        ("", 0, 'name: "m" kind: KIND_CPU count: 1', [("cpu", 0)]),
        (
            "instance_group { count: 2 }",
            2,
            'name: "m_0" kind: KIND_GPU count: 2 gpus: [0, 1]',
            [("gpu", 0)] * 2 + [("gpu", 1)] * 2,
        ),
        ("instance_group { kind: KIND_GPU }", 2, 'name: "m_0" kind: KIND_GPU count: 1 gpus: [0, 1]', [("gpu", 0), ("gpu", 1)]),
        ("instance_group { kind: KIND_GPU }", 0, 'name: "m_0" kind: KIND_GPU count: 1', [("gpu", 0)]),
        ("instance_group { gpus: 1 }", 2, 'name: "m_0" kind: KIND_GPU count: 1 gpus: 1', [("gpu", 1)]),
        ("instance_group { gpus: [0, 1] }", 0, 'name: "m_0" kind: KIND_CPU count: 2', [("cpu", 0)] * 2),
        ("instance_group { kind: KIND_CPU count: 2 }", 2, 'name: "m_0" kind: KIND_CPU count: 2', [("cpu", 0)] * 2),
        ("instance_group { kind: KIND_MODEL }", 2, 'name: "m_0" kind: KIND_MODEL count: 1', [("any", 0)]),
    ],
)
def test_copies_are_placed_as_triton_places_them(groups: str, devices: int, shown: str, copies: Copies) -> None:
    config = text_format.Parse(f"instance_group {{ {shown} }}", ModelConfig())
    assert completed(groups, devices) == (text_format.MessageToString(config, as_one_line=True).strip(), copies)


def test_groups_keep_their_order_and_get_names() -> None:
    shown, copies = completed('instance_group [{ kind: KIND_CPU name: "few" }, { gpus: [1, 0] }]', 2)
    assert copies == [("cpu", 0), ("gpu", 1), ("gpu", 0)]
    assert 'name: "few"' in shown
    assert 'name: "m_1"' in shown


@pytest.mark.parametrize("groups", ["", "instance_group { kind: KIND_GPU gpus: [0, 1] }", "instance_group { count: 2 }"])
def test_a_server_on_the_cpu_leaves_devices_alone(groups: str) -> None:
    shown, copies = completed(groups, 2, ON_CPU)
    assert copies == [("cpu", 0)] * (2 if groups else 1)
    assert ("KIND_CPU" in shown, "gpus" in shown) == (True, False)


def test_a_model_that_computes_on_the_cpu_has_no_copy_for_each_device() -> None:
    shown, copies = completed("instance_group { count: 2 }", 8, provider=CPU)
    assert (shown, copies) == (completed("instance_group { count: 2 }", 0))
    assert len(completed("instance_group { gpus: [0, 1] }", 2, provider=CPU)[1]) == 2


def test_the_first_copy_may_fall_back_on_the_cpu_and_no_other() -> None:
    config, asked = ModelConfig(name="m"), []

    def load(place: DevicePlacement) -> Backend:
        asked.append((place.device_id, place.require_gpu))
        return Placed(CUDA)

    load_copies(complete_groups(config, ANYWHERE, 3), ANYWHERE, load)
    assert asked == [(0, False), (1, True), (2, True)]


def test_instance_groups_share_one_bound_of_copies() -> None:
    def groups(count: int) -> str:
        return "instance_group { count: 10 kind: KIND_CPU }" * count

    assert len(completed(groups(100), 2)[1]) == 1000
    with pytest.raises(ModelLoadError, match="model 'm': its instance_groups ask for 1010 or more copies, expected 1000"):
        completed(groups(101), 2)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("count: -3", "model 'm': instance_group has count -3, expected 1 to 1000, or 0 for 1"),
        ("count: 2147483647", "instance_group has count 2147483647, expected 1 to 1000"),
        ("count: 1000 gpus: [0, 1]", "instance_groups ask for 2000 or more copies, expected 1000 at most"),
        ("count: 501", "instance_groups ask for 1002 or more copies, expected 1000 at most"),
        ("gpus: [0, -3]", r"model 'm': instance_group has gpus \[0, -3\], expected 0 or more"),
        ("kind: KIND_CPU gpus: [0, 1]", r"model 'm': instance_group has kind KIND_CPU and gpus \[0, 1\], expected one of them"),
        ("kind: KIND_MODEL gpus: 0", r"instance_group has kind KIND_MODEL and gpus \[0\], expected one of them"),
        (
            "gpus: [0, 2]",
            r"instance_group 'm_0' has gpus \[0, 2\], but there are 2 .* expected numbers up to 1, or no gpus",
        ),
        ("kind: KIND_GPU gpus: 7", r"instance_group 'm_0' has gpus \[7\], but there are 2 CUDA devices here"),
    ],
)
def test_copies_and_devices_that_cannot_be_are_refused(group: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        completed(f"instance_group {{ {group} }}", 2)
