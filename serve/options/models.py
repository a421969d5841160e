"""Options of the models that a server loads, and of where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from halfserve.files.object_storage import is_url
from halfserve.serve.engine.backend import Trust
from halfserve.serve.model_control.control_options import ControlMode, ControlOptions
from halfserve.serve.storage.storage_options import DEFAULT_GIB, ObjectStorage, default_folder

_models = partial(typer.Option, rich_help_panel="Models")
_on_demand = partial(typer.Option, rich_help_panel="Models on demand")
_storage = partial(typer.Option, rich_help_panel="Object storage")
_as_triton = partial(typer.Option, rich_help_panel="As in Triton")


@dataclass(frozen=True, kw_only=True)
class Models:
    """Options of loading models, of object storage, and of trust in a repository's code."""

    model_control: Annotated[
        ControlMode,
        _models(
            help="Which models are served: what PATH holds at the start (none), at any time (poll), "
            "or what RepositoryModelLoad asks for (explicit)."
        ),
    ] = ControlOptions.mode
    load_model: Annotated[
        list[str] | None,
        _models(
            help="Model to load at the start with --model-control explicit or --load-on-demand; may be repeated, '*' is all."
        ),
    ] = None
    poll_seconds: Annotated[
        float,
        _models(min=0.1, help="Seconds between two checks of PATH for changes, with --model-control poll or --load-on-demand."),
    ] = ControlOptions.poll_interval_s
    warm_up_seconds: Annotated[float, _models(min=0, help="Time for trying out a model's batch sizes before it serves.")] = (
        ControlOptions.warm_up_budget_s
    )
    load_seconds: Annotated[
        float,
        _models(
            min=1,
            max=86400,
            help="Seconds that loading a model version may take, and again trying it out; a version that takes longer "
            "is refused.",
        ),
    ] = ControlOptions.load_limit_s
    load_threads: Annotated[
        int,
        _models(
            min=0,
            max=1024,
            help="Models that load at once; 0 for the number of processors, and half of it, at least 2, beside requests. "
            "Models whose files exceed the free memory together wait for each other.",
        ),
    ] = ControlOptions.load_threads
    model_config_name: Annotated[
        str, _as_triton(help="Use a model's configs/NAME.pbtxt, if it exists, in place of its config.pbtxt.")
    ] = ControlOptions.config_name
    require_config: Annotated[
        bool,
        _as_triton(
            "--require-config", help="Refuse models whose config.pbtxt does not name platform or backend, inputs and outputs."
        ),
    ] = ControlOptions.needs_config
    keep_going: Annotated[bool, _models("--keep-going", help="Start even if some models cannot be served, without them.")] = (
        ControlOptions.keep_going
    )
    model_uploads: Annotated[
        bool,
        _models("--model-uploads", help="Let load requests contain ONNX models and label files (--model-control explicit)."),
    ] = ControlOptions.uploads
    load_on_demand: Annotated[
        bool,
        _on_demand(
            "--load-on-demand",
            help="Start without models, and load each when the first request for it comes, which waits for the load. Models "
            "of --load-model, and those with halfserve.pinned in their config.pbtxt, are loaded at the start.",
        ),
    ] = ControlOptions.on_demand
    idle_unload_seconds: Annotated[
        float, _on_demand(min=0, help="Unload a model after this many seconds without a request; 0 means never.")
    ] = ControlOptions.idle_unload_s
    max_loaded_mib: Annotated[
        float,
        _on_demand(
            min=0,
            help="Limit of all loaded models in MiB: the size of their files times copies, over all --processes. The "
            "model that was idle longest is unloaded to make room. With 0, the free memory is the only limit.",
        ),
    ] = 0.0
    storage_folder: Annotated[
        Path | None,
        _storage(
            help="Folder for copies of models from object storage, which several servers may share; by default "
            "~/.cache/halfserve/storage.",
            show_default=False,
        ),
    ] = None
    storage_gib: Annotated[
        float, _storage(min=0.001, help="Limit of this folder in GiB; copies that no server uses are deleted to make room.")
    ] = DEFAULT_GIB
    trust_torch_archives: Annotated[
        bool,
        _models(
            "--trust-torch-archives",
            help="Serve .pt2 files of PATH too. This trusts everybody who writes there: such a file can run any code as this "
            "user.",
        ),
    ] = Trust.torch_archives
    trust_custom_operators: Annotated[
        bool,
        _models(
            "--trust-custom-operators",
            help="Load the libraries of PATH that models name in model_operations. This trusts everybody who writes there: a "
            "library can run any code as this user. The package onnxruntime-extensions needs no option.",
        ),
    ] = Trust.custom_operators
    trust_python_models: Annotated[
        bool,
        _models(
            "--trust-python-models",
            help="Serve Python models (model.py) of PATH too. This trusts everybody who writes there: they run as this user.",
        ),
    ] = Trust.python_models

    def __post_init__(self) -> None:
        is_explicit = self.model_control is ControlMode.EXPLICIT
        if (self.load_model or self.model_uploads) and not (is_explicit or (self.load_on_demand and not self.model_uploads)):
            raise typer.BadParameter("--load-model and --model-uploads need --model-control explicit; add it or leave them out")
        if self.load_on_demand and self.model_control is ControlMode.POLL:
            raise typer.BadParameter(
                "--load-on-demand and --model-control poll exclude each other: poll loads all models of PATH; leave one out"
            )
        if (self.idle_unload_seconds or self.max_loaded_mib) and not self.load_on_demand:
            raise typer.BadParameter(
                "--idle-unload-seconds and --max-loaded-mib need --load-on-demand, which loads again what they unload; add it"
            )

    def control(self, *, certificate_key: Path | None, lame_duck_s: float) -> ControlOptions:
        """Return what selects and loads models."""
        return ControlOptions(
            mode=self.model_control,
            load_at_start=tuple(self.load_model or ()),
            poll_interval_s=self.poll_seconds,
            keep_going=self.keep_going,
            uploads=self.model_uploads,
            warm_up_budget_s=self.warm_up_seconds,
            load_limit_s=self.load_seconds,
            load_threads=self.load_threads,
            certificate_key=certificate_key,
            lame_duck_s=lame_duck_s,
            needs_config=self.require_config,
            config_name=self.model_config_name,
            on_demand=self.load_on_demand,
            idle_unload_s=self.idle_unload_seconds,
            max_loaded_bytes=int(self.max_loaded_mib * 2**20),
        )

    def trust(self) -> Trust:
        """Permission for code of the repository."""
        return Trust(
            torch_archives=self.trust_torch_archives,
            python_models=self.trust_python_models,
            custom_operators=self.trust_custom_operators,
        )

    def first_place(self, path: str) -> Path | ObjectStorage:
        """Location of the first repository or model file."""
        if is_url(path):
            if self.model_config_name:
                raise typer.BadParameter(
                    "--model-config-name is for repositories on this disk; leave it out, or copy PATH here"
                )
            folder = self.storage_folder or default_folder()
            return ObjectStorage(url=path, folder=folder, max_bytes=int(self.storage_gib * 2**30))
        if self.storage_folder is not None:
            raise typer.BadParameter(f"--storage-folder is for object storage, and {path} is on this disk; leave it out")
        return Path(path)


def more_places(path: str, more_paths: Sequence[str]) -> tuple[Path, ...]:
    """Locations of further repositories, where the first one is on this disk too."""
    for one in (path, *more_paths):
        if more_paths and is_url(one):
            raise typer.BadParameter(f"{one} is in object storage, which is the only PATH then; start a server for each")
    return tuple(map(Path, more_paths))
