"""Image classifiers of timm and torchvision: by name with the user's weights, or a folder that timm saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch import __version__ as torch_version

from halfserve.amp_core.weights.state_dicts import load_into, load_weights, prefix_of, without_prefix
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.sources.picture_preparation import (
    LibraryPreparation,
    of_timm,
    picture_samples,
    proved,
    served_preparation,
)
from halfserve.export.sources.source import Source, repository_name, with_training
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.tasks.served_models import ImageModel, Preprocessing
from halfserve.export.tasks.task import Task
from halfserve.export.to_onnx.capture import one_line
from halfserve.protos.pictures import EVEN, PicturePreparation

LIBRARIES = ("timm", "torchvision")
SAME_TORCH = f"torch=={torch_version.partition('+')[0]}"  # keeps pip from another torch


@dataclass(frozen=True, kw_only=True)
class _Classifier:
    """A network of a library, not yet with the user's weights, and the preprocessing of its published ones.

    It takes images (batch, 3, height, width). Labels are empty where they are not known; the note is about the preparation of
    pictures.
    """

    network: nn.Module
    preprocessing: Preprocessing
    labels: Sequence[str] = ()
    note: str = ""


def open_named_model(argument: str, options: SourceOptions) -> Source:
    """Return the image classifier that `timm:NAME` or `torchvision:NAME` names, with the user's weights.

    Images are prepared as for the weights that the library publishes under this name. The number of classes is the weights'.

    Raises:
        ExportError: The library is missing or has no such classifier.
        WeightsError: The weights cannot be read or do not fit.
        UsageError: There are no weights.
    """
    library, _, name = argument.partition(":")
    if options.weights is None:
        raise UsageError(f"{argument} names a network without weights, and none are downloaded; give --weights FILE")
    make = _from_timm if library == "timm" else _from_torchvision
    weights = load_weights(options.weights)
    made = make(name)
    classes = _classes(made, weights)
    if classes is not None:
        made = replace(make(name, num_classes=classes), labels=())
    return _source(made, weights, options, place=options.weights, name=name)


def open_timm_folder(folder: Path, config: Mapping[str, Any], options: SourceOptions) -> Source:
    """Return the image classifier in a folder that timm saved, or that its hub holds; its config.json names an `architecture`.

    Raises:
        ExportError: timm is missing, does not know the architecture, or has not written config.json.
        WeightsError: The weights cannot be read or do not fit.
    """
    try:
        published = config.get("pretrained_cfg") or {}
        classes = config.get("num_classes", published.get("num_classes", 1000))
        arguments = {**(config.get("model_args") or {}), "num_classes": classes}
        made = _from_timm(str(config["architecture"]), published, **arguments)
        names = config.get("label_names") or published.get("label_names") or made.labels
        labels = tuple(map(str, names)) if len(names) == classes else ()
    except (AttributeError, TypeError, ValueError) as error:
        raise ExportError(f"{folder / 'config.json'} is not as timm writes it: {one_line(error)}") from error
    return _source(replace(made, labels=labels), load_weights(folder), options, place=folder, name=folder.resolve().name)


def _source(made: _Classifier, weights: Mapping[str, Tensor], options: SourceOptions, *, place: Path, name: str) -> Source:
    note = load_into(made.network, weights, str(place))
    samples = picture_samples(made.preprocessing, options).noting(made.note).noting(note)
    source = Source(
        module=ImageModel(made.network, made.preprocessing).eval(),
        samples=samples,
        name=repository_name(name),
        task=Task(name="image-classification", labels=tuple(made.labels), files=served_preparation(made.preprocessing)),
    )
    return with_training(source, place, made.network, prefix=prefix_of(weights, made.network.state_dict()))


def _classes(made: _Classifier, weights: Mapping[str, Tensor]) -> int | None:
    """Return the number of classes of the weights; None where it is the network's own, or cannot be told.

    The classifier is taken to be the last weight with more than one dimension; the weights are checked when they are loaded.
    """
    own = made.network.state_dict()
    given = without_prefix(weights, own)
    last = next((name for name in reversed(own) if name.endswith(".weight") and own[name].dim() > 1), None)
    if last is None or last not in given or given[last].shape[1:] != own[last].shape[1:]:
        return None
    return None if len(given[last]) == len(own[last]) else len(given[last])


def _from_timm(name: str, published: Mapping[str, Any] | None = None, **arguments: Any) -> _Classifier:
    timm = _library("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise ExportError(f"timm {timm.__version__} has no model {name!r}{_like(name, timm.list_models())}")
    try:
        network = timm.create_model(name, pretrained=False, **arguments)
    except Exception as error:  # the library's code, with a user's arguments
        raise ExportError(f"timm cannot make {name!r}: {one_line(error)}") from error
    data = import_module("timm.data")
    known = data.resolve_data_config({}, pretrained_cfg={**network.pretrained_cfg, **(published or {})})
    colours, height, width = known["input_size"]
    if colours != 3:
        raise ExportError(f"timm's {name!r} takes images of {colours} colours; expected 3: give it as MODULE:FACTORY")
    labels = ()
    if network.num_classes == 1000:
        imagenet = data.ImageNetInfo()
        labels = tuple(imagenet.index_to_description(index) for index in range(imagenet.num_classes()))
    mean, std = (tuple(map(float, known[name])) for name in ("mean", "std"))
    preprocessing, note = proved(
        Preprocessing(height=height, width=width, mean=mean, std=std),
        lambda: (of_timm(known, height, width), _as_array(data.create_transform(**known))),
        "timm",
    )
    return _Classifier(network=network, preprocessing=preprocessing, labels=labels, note=note)


def _from_torchvision(name: str, **arguments: Any) -> _Classifier:
    models = _library("torchvision.models", f"torchvision:{name}")
    if name not in models.list_models():
        raise ExportError(f"torchvision has no model {name!r}{_like(name, models.list_models())}")
    published = models.get_model_weights(name).DEFAULT
    prepare = published.transforms()
    if type(prepare).__name__ != "ImageClassification" or name.startswith("quantized_"):
        raise ExportError(
            f"torchvision's {name!r} is no image classifier in float32; give a module that returns the tensors you need as "
            "MODULE:FACTORY"
        )
    (edge,) = prepare.crop_size
    network = models.get_model(name, weights=None, **arguments)

    def made() -> tuple[PicturePreparation, LibraryPreparation]:
        (shorter,) = prepare.resize_size
        resample = prepare.interpolation.value
        pictures = PicturePreparation(height=edge, width=edge, resize=shorter, resample=resample, crop=EVEN)
        return pictures, _as_array(prepare)

    preprocessing, note = proved(
        Preprocessing(height=edge, width=edge, mean=prepare.mean, std=prepare.std), made, "torchvision"
    )
    return _Classifier(network=network, preprocessing=preprocessing, labels=published.meta["categories"], note=note)


def _as_array(prepare: Callable[[Any], Tensor]) -> LibraryPreparation:
    return lambda picture: prepare(picture).numpy()


def require_fitting_torchvision() -> None:
    """Check a torchvision that is installed, which timm and transformers import too.

    Raises:
        ExportError: It was built for another torch: its operators are missing, or its library cannot be loaded.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ExportError(f"torchvision needs the package {error.name}: pip install {error.name}") from error
    except Exception as error:  # a RuntimeError, OSError or AttributeError, by version
        try:
            installed = version("torchvision")
        except PackageNotFoundError:
            installed = "of unknown version"
        build = torch_version.partition("+")[2]
        index = f" --index-url URL, with the URL of PyTorch's index for {build} (pytorch.org names it)" if build else ""
        raise ExportError(
            f"torchvision {installed} does not fit torch {torch_version} ({one_line(error)}); expected the build for this "
            f"torch; run: pip uninstall -y torchvision && pip install torchvision {SAME_TORCH}{index}"
        ) from error


def _library(module: str, argument: str) -> Any:
    library = module.partition(".")[0]
    require_fitting_torchvision()
    try:
        return import_module(module)
    except ImportError as error:
        raise ExportError(f"{argument} needs the package {library}: pip install {library} {SAME_TORCH}") from error


def _like(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
