from __future__ import annotations

import pytest

from protos import inference_pb2 as pb
from serve.engine.inference_core import InferenceCore
from serve.protocol import service as module
from serve.protocol.service import Service

SHARED_MEMORY = {"system_shared_memory", "cuda_shared_memory"}


def extensions(*, shared_memory: bool) -> set[str]:
    service = Service(InferenceCore([]), server_version="1.2", shared_memory=shared_memory)
    return set(service.server_metadata(pb.ServerMetadataRequest()).extensions)


def test_the_metadata_lists_what_is_served() -> None:
    assert extensions(shared_memory=False) >= {
        *("binary_tensor_data", "classification", "logging", "model_configuration", "model_repository"),
        *("model_repository(unload_dependents)", "schedule_policy", "statistics", "trace"),
    }
    assert not extensions(shared_memory=False) & {"sequence", "parameters"}


@pytest.mark.parametrize(
    ("enabled", "device", "listed"),
    [(False, True, set()), (True, False, {"system_shared_memory"}), (True, True, SHARED_MEMORY)],
)
def test_the_metadata_lists_shared_memory_only_where_there_is_some(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, device: bool, listed: set[str]
) -> None:
    monkeypatch.setattr(module, "has_cuda", lambda: device)
    assert extensions(shared_memory=enabled) & SHARED_MEMORY == listed
