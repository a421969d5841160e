"""The kinds of model file that can be served, under the names that a config.pbtxt has for them."""

from __future__ import annotations

from dataclasses import dataclass

from protos.model_config_pb2 import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """One kind of model file.

    Attributes:
        platform: what metadata and completed configurations say.
        backend: likewise.
        file_name: in a version folder, where the configuration does not name another one.
        also: other names under which a configuration may ask for it.
    """

    platform: str
    backend: str
    file_name: str
    also: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Every name that a configuration may use as its platform or backend."""
        return self.also | {self.platform, self.backend}


ONNX = ModelKind(platform="onnxruntime_onnx", backend="onnxruntime", file_name="model.onnx")
# What torch.export.save writes. Triton's "pytorch" backend is the nearest that it has.
TORCH_EXPORT = ModelKind(
    platform="torch_export",
    backend="halfserve_torch",
    file_name="model.pt2",
    also=frozenset({"pytorch", "pytorch_torchexport"}),
)
# Where a version folder holds several and its configuration names none, the first counts.
KINDS = (ONNX, TORCH_EXPORT)


def asked_kinds(config: ModelConfig) -> tuple[ModelKind, ...]:
    """The kinds that a configuration leaves open: all where it names neither platform nor backend, none where it names what
    is not served.
    """
    asked = {name for name in (config.platform, config.backend) if name}
    return tuple(kind for kind in KINDS if asked <= kind.names)
