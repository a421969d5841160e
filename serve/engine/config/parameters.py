"""Parameters and settings of a config.pbtxt: halfserve's own keys, and the settings that have no effect here.

halfserve's settings are `parameters { key: "halfserve.xxx" value { string_value: "..." } }`: Triton keeps parameters that it
does not know, so that it can load the folder too. Unknown keys with this prefix are errors: a misspelt one would silently do
nothing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ENSEMBLE, ONNX, PYTHON, CpuPrecision, ModelKind
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.padding.padding_rule import parse_padding_rule, rising_lengths, whole

PREFIX = "halfserve."
MEASURED = "halfserve.measured"  # speed of the model in each way that was tried, in words
PADDED_ROWS = "halfserve.padded_rows"  # numbers of rows that the server pads batches to by its own choice, such as "1,2,4,8"
CUDA_WAYS = frozenset({"graphs", "nhwc", "copies", "blocking"})  # ways to compute on a CUDA device: see "halfserve.cuda_ways"
PINNED = "halfserve.pinned"  # keeps a model loaded
TASK = "halfserve.task"  # describes any model to clients
Parse = Callable[[str], Any]  # parses the text to the value; raises a ValueError that says which form is expected
# The server writes these for clients; values in a config.pbtxt have no effect.
REPORTED = frozenset(
    {
        *("halfserve.certificate", "halfserve.measured", "halfserve.nodes", PADDED_ROWS, "halfserve.padding_proved"),
        *("halfserve.precision", "halfserve.provider", "halfserve.steps"),
    }
)
# Paths of settings that this server acts on, "*" for all below; others are kept, shown to clients and named in a warning.
HONOURED = frozenset(
    {
        *("name", "platform", "backend", "version_policy.*", "max_batch_size", "default_model_filename", "parameters.*"),
        "model_warmup.*",
        *("input.name", "input.data_type", "input.dims", "input.reshape.*", "input.format"),
        *("input.allow_ragged_batch", "batch_input.*", "batch_output.*"),
        *("output.name", "output.data_type", "output.dims", "output.reshape.*", "output.label_filename"),
        *("instance_group.name", "instance_group.kind", "instance_group.count", "instance_group.gpus"),
        *("response_cache.enable", "model_operations.op_library_filename"),
        *("optimization.graph.level", "optimization.cuda.graphs"),
        "optimization.execution_accelerators.cpu_execution_accelerator.*",
        "optimization.execution_accelerators.gpu_execution_accelerator.*",
        *("dynamic_batching.preferred_batch_size", "dynamic_batching.max_queue_delay_microseconds"),
        *("dynamic_batching.priority_levels", "dynamic_batching.default_priority_level"),
        *("dynamic_batching.default_queue_policy.*", "dynamic_batching.priority_queue_policy.*"),
        *("ensemble_scheduling.step.model_name", "ensemble_scheduling.step.model_version"),
        *("ensemble_scheduling.step.input_map", "ensemble_scheduling.step.output_map"),
        *("sequence_batching.max_sequence_idle_microseconds", "sequence_batching.control_input.*"),
        *("sequence_batching.direct.max_queue_delay_microseconds", "sequence_batching.direct.minimum_slot_utilization"),
        *("sequence_batching.oldest.max_candidate_sequences", "sequence_batching.oldest.preferred_batch_size"),
        *("sequence_batching.oldest.max_queue_delay_microseconds", "sequence_batching.iterative_sequence"),
        *("sequence_batching.state.input_name", "sequence_batching.state.output_name", "sequence_batching.state.data_type"),
        *("sequence_batching.state.dims", "sequence_batching.state.initial_state.*"),
    }
)
# Settings that only ONNX Runtime acts on: settings by path, parameters by key and by prefix.
ONNX_ONLY = frozenset({"optimization.graph.level", "optimization.execution_accelerators", "model_operations"})
ONNX_ONLY_PARAMETERS = frozenset(
    {
        *("halfserve.optimization_level", "halfserve.cuda_ways", "halfserve.cpu_precision"),
        *("inter_op_thread_count", "execution_mode", "enable_mem_arena", "enable_mem_pattern"),
        *("memory.enable_memory_arena_shrinkage", "cudnn_conv_algo_search", "arena_extend_strategy", "gpu_mem_limit"),
        "do_copy_in_default_stream",
    }
)
ONNX_ONLY_PREFIXES = ("session.", "optimization.", "mlas.", "ep.")
PYTHON_ONLY = frozenset({"input.optional", "model_transaction_policy"})  # only Python models act on these
# Settings that only a CUDA device acts on.
DEVICE_ONLY = frozenset({"optimization.cuda.graphs", "optimization.execution_accelerators.gpu_execution_accelerator"})
DEVICE_ONLY_PARAMETERS = frozenset(
    {
        *("halfserve.cuda_graphs", "halfserve.cuda_ways", "cudnn_conv_algo_search", "arena_extend_strategy"),
        *("gpu_mem_limit", "do_copy_in_default_stream"),
    }
)
# Parameters outside these lists are free for any use; Triton acts on this one.
UNKNOWN_HERE = frozenset({"share_session_between_instances"})


def path(value: str) -> str:
    """Parse a file's path; the code that reads the file checks where it leads."""
    if "\0" in value:
        raise ValueError("expected a path without NUL characters")
    return value


def one_of(*choices: str) -> Parse:
    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(map(repr, choices))}")
        return value

    return parse


def switch(value: str) -> bool:
    choices = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
    if value.lower() not in choices:
        raise ValueError("expected 'on' or 'off'")
    return choices[value.lower()]


def number(least: float, most: float = math.inf, *, above: bool = False) -> Parse:
    """Return a parser of finite numbers from `least` to `most`, inclusive; `above` excludes `least`."""
    lower = f"above {least:g}" if above else f"of {least:g} or more"
    expected = f"expected a number {lower}" if most == math.inf else f"expected a number {lower} and at most {most:g}"

    def parse(value: str) -> float:
        try:
            result = float(value)
        except ValueError:
            raise ValueError(expected) from None
        if not math.isfinite(result) or result < least or (above and result == least) or result > most:
            raise ValueError(expected)
        return result

    return parse


def named_numbers(value: str) -> dict[str, float]:
    """Parse finite numbers by name, from "sr=16000, scale=0.5"."""
    numbers: dict[str, float] = {}
    for entry in value.split(","):
        name, _, text = entry.rpartition("=")
        try:
            numbers[name.strip()] = number(-math.inf)(text)
        except ValueError:
            numbers[""] = 0
    if "" in numbers:
        raise ValueError("expected names and finite numbers, such as 'sr=16000, scale=0.5'")
    return numbers


def dimensions(value: str) -> frozenset[int] | None:
    """Parse the allowed sizes of a vector; None for any size."""
    parts = [part.strip() for part in value.split(",")]
    if parts == ["any"]:
        return None
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError("expected 'any', or whole numbers above 0 with commas between them")
    return frozenset(map(int, parts))


def ways(value: str) -> frozenset[str]:
    """Parse ways to compute on a CUDA device, from "graphs, nhwc", or "none"."""
    parts = frozenset(part.strip() for part in value.split(","))
    if parts != {"none"} and not parts <= CUDA_WAYS:
        raise ValueError(f"expected 'none', or some of {', '.join(sorted(CUDA_WAYS))}, with commas between them")
    return parts - {"none"}


@dataclass(frozen=True)
class OwnParameter:
    """A `halfserve.*` key of config.pbtxt. The documentation's table of settings is generated from these.

    Attributes:
        parse: parses the text to the value.
        default: text of the value for a configuration without the key.
        values: description of the values.
        meaning: description of the key's effect.
    """

    parse: Parse
    default: str
    values: str
    meaning: str


# In alphabetical order, each with its parser, default, values and meaning (the fields of OwnParameter).
OWN_PARAMETERS: dict[str, OwnParameter] = {
    "halfserve.compute_weight": OwnParameter(
        number(0, above=True), "1", "a number above 0",
        "The model's share of `--compute-slots`.",
    ),
    "halfserve.constant_inputs": OwnParameter(
        named_numbers, "none", "`name=number`, with commas between",
        "Inputs of a fixed size that the server fills with a number, and clients do not send.",
    ),
    "halfserve.cpu_precision": OwnParameter(
        one_of(*map(str, CpuPrecision)), "`--cpu-precision`", "`auto`, `float32`, `bfloat16`, `float16`",
        "In which precision the CPU computes an ONNX model: see [OpenVINO](../guides/openvino.md).",
    ),
    "halfserve.cuda_graphs": OwnParameter(
        switch, "on for ONNX models with Convs, and for torch programs of fixed sizes or with `halfserve.padding_buckets`",
        "`on`, `off`",
        "Record the device's work for each batch size. A warning names models that cannot be recorded (nodes, inputs or "
        "outputs on the CPU, sizes that depend on values, random numbers); they run without.",
    ),
    "halfserve.cuda_ways": OwnParameter(
        ways, "tried when the model is loaded", "`none`, or some of `graphs`, `nhwc`, `copies`, `blocking`, with commas",
        "How a CUDA device computes an ONNX model: by recorded CUDA graphs, with Convs in NHWC order (`prefer_nhwc`), with "
        "copies of a recording's inputs and outputs without Python's lock, and with threads that sleep while they wait for the "
        "device (for all models of the process).",
    ),
    "halfserve.degraded_not_ready": OwnParameter(switch, "off", "`on`, `off`", "Whether a degraded model is not ready."),
    "halfserve.drift_threshold": OwnParameter(
        number(0.0, above=True), "the certificate's budget", "a number above 0",
        "Scaled error above which a comparison with the twin is bad. Over 5 % bad ones, the model is degraded.",
    ),
    "halfserve.embedding_dimensions": OwnParameter(
        dimensions, "none", "`any`, or sizes with commas between them",
        "Sizes to which `/v1/embeddings` may cut a vector (`dimensions`): of a model trained for that (Matryoshka). "
        "`halfserve export` writes them where the model's config.json does.",
    ),
    "halfserve.fp32_twin": OwnParameter(
        path, "none", "a file's name",
        "The fp32 twin, below the version's folder. `--fp32-twin` of `halfserve export` and `convert` writes it.",
    ),
    "halfserve.label_scores": OwnParameter(
        one_of("softmax", "sigmoid"), "softmax", "`softmax`, `sigmoid`",
        "How `/predict` and `/classify` make scores of logits: of one class among all, or of each class by itself. "
        "`halfserve export` writes `sigmoid` for models of several labels.",
    ),
    "halfserve.latency_target_ms": OwnParameter(
        number(0, above=True), "none", "a number above 0",
        "Answer within so many milliseconds or refuse the request.",
    ),
    "halfserve.max_batch_tokens": OwnParameter(
        whole, "none", "a whole number of 1 or more",
        "Rows times padded length of a batch, at most, where `halfserve.padding` is set.",
    ),
    "halfserve.max_compute_s": OwnParameter(
        number(0.0, above=True), "none", "a number above 0",
        "An instance that computes for longer is abandoned, loaded again and reported.",
    ),
    "halfserve.optimization_level": OwnParameter(
        one_of("all", "extended", "basic", "disabled"), "chosen by the crash probe", "`all`, `extended`, `basic`, `disabled`",
        "ONNX Runtime's optimisation level. With this key, the model is not tried in a child process first.",
    ),
    "halfserve.pad_to_preferred": OwnParameter(
        switch, "off", "`on`, `off`",
        "Pad a batch to the next preferred size. On CUDA, batches of models with Convs are padded to a few sizes without it, "
        "which `off` prevents.",
    ),
    "halfserve.padding": OwnParameter(
        parse_padding_rule, "none", "`INPUT[AXIS]=VALUE ... -> OUTPUT[AXIS] ...`",
        "Requests of different lengths share batches: these axes of inputs are padded with these values, and these axes of "
        "outputs are cut back. The input that varies most, such as the tokens, comes first. `halfserve export` writes it.",
    ),
    "halfserve.padding_buckets": OwnParameter(
        rising_lengths, "learned", "lengths, such as `16,32,64`",
        "Pad every request to one of these lengths, as CUDA graphs need it; longer ones are not padded.",
    ),
    PINNED: OwnParameter(
        switch, "off", "`on`, `off`",
        "With `--load-on-demand`, load the model at the start, and do not unload it to save memory: see "
        "[Models on demand](../guides/on_demand.md). In object storage, name it by `--load-model` too.",
    ),
    "halfserve.precision_guard": OwnParameter(
        one_of("off", "count", "reject", "fallback"), "count", "`off`, `count`, `reject`, `fallback`",
        "What to do with non-finite answers to finite requests: count them, refuse them, or answer from the fp32 twin "
        '(the response parameter `halfserve.precision` is then "fp32").',
    ),
    "halfserve.python_isolation": OwnParameter(
        one_of("process", "thread"), "process", "`process`, `thread`",
        "Where a Python model runs: each copy in a process of its own, or on a thread of the server, for light steps.",
    ),
    "halfserve.shadow_rate": OwnParameter(
        number(0.0, 1.0), "0.001", "0 to 1",
        "Share of batches that are compared with the twin, beside the traffic.",
    ),
    "halfserve.shadow_share": OwnParameter(
        number(0.0, 1.0, above=True), "0.0005", "above 0, at most 1",
        "Share of one thread's time for these comparisons.",
    ),
    "halfserve.strict_outputs": OwnParameter(
        switch, "off", "`on`, `off`",
        "Whether an output of a Python model in another shape than its configuration has, or with other rows than its "
        "request, is an error. Otherwise a warning names it once.",
    ),
    "halfserve.task": OwnParameter(
        str, "none", "a task's name",
        "What the model is for, such as `embeddings`, for clients to read. `halfserve export` writes it.",
    ),
    "halfserve.token_ids": OwnParameter(
        one_of("refused", "own"), "refused", "`refused`, `own`",
        "Whether `/v1/embeddings` takes token ids in place of texts. With `own` it computes them as ids of the model's own "
        "vocabulary. Clients such as LangChain send ids of OpenAI's vocabulary by default, which mean other tokens.",
    ),
    "halfserve.warm_up": OwnParameter(switch, "on", "`on`, `off`", "Run the model before it serves."),
}  # fmt: skip


def check_own_parameters(config: ModelConfig, source: Path) -> None:
    """Check every `halfserve.*` key and its value, as read from the file `source`.

    Raises:
        ModelLoadError: a key is unknown, or a value is invalid.
    """
    for key in sorted(config.parameters):
        if not key.startswith(PREFIX) or key in REPORTED:
            continue
        if key not in OWN_PARAMETERS:
            raise ModelLoadError(f"{source}: parameter {key!r} is not known; {_nearest(key)}")
        own_parameter(config, key, source)


def drop_reported(config: ModelConfig) -> None:
    """Remove keys that only the server reports: a copied config.pbtxt may hold values of another model."""
    for key in REPORTED & set(config.parameters):
        del config.parameters[key]


def own_parameter(config: ModelConfig, key: str, source: Path | str = "config.pbtxt") -> Any:
    """Return the value of a `halfserve.*` parameter; None if the configuration does not give it.

    Raises:
        ModelLoadError: the value is invalid.
    """
    if key not in config.parameters:
        return None
    value = config.parameters[key].string_value
    try:
        return OWN_PARAMETERS[key].parse(value)
    except ValueError as error:
        raise ModelLoadError(f"{source}: parameter {key!r} is {value!r}, {error}") from None


def _nearest(key: str) -> str:
    # Keys are compared without the prefix, which all of them share.
    near = difflib.get_close_matches(key.removeprefix(PREFIX), [known.removeprefix(PREFIX) for known in OWN_PARAMETERS], n=1)
    return f"did you mean {PREFIX + near[0]!r}?" if near else f"known are {', '.join(OWN_PARAMETERS)}"


def ignored_settings(config: ModelConfig, kind: ModelKind, *, on_device: bool) -> list[str]:
    """Return the paths of the settings that this server ignores. `on_device`: whether a copy of the model uses CUDA."""
    dropped, parameters, prefixes = frozenset[str](), UNKNOWN_HERE, tuple[str, ...]()
    if not on_device:
        dropped, parameters = DEVICE_ONLY, parameters | DEVICE_ONLY_PARAMETERS
    if kind is not ONNX:
        dropped, parameters, prefixes = dropped | ONNX_ONLY, parameters | ONNX_ONLY_PARAMETERS, ONNX_ONLY_PREFIXES
    if kind is ENSEMBLE:
        prefixes = (*prefixes, PREFIX)
    silent = REPORTED | {TASK}
    keys = (key for key in config.parameters if (key in parameters or key.startswith(prefixes)) and key not in silent)
    ignored = {*_ignored(config, "", dropped), *(f"parameters.{key}" for key in keys)}
    return sorted(ignored - PYTHON_ONLY if kind is PYTHON else ignored)


def _ignored(message: Message, prefix: str, dropped: AbstractSet[str]) -> Iterator[str]:
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        if path in dropped:
            yield path
            continue
        if path in HONOURED or f"{path}.*" in HONOURED:
            continue
        if not any(known.startswith(f"{path}.") for known in HONOURED):
            yield path
            continue
        for part in value if field.is_repeated else [value]:
            yield from _ignored(part, f"{path}.", dropped)
