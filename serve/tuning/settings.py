"""The settings that are tuned, the values that are tried, and where Triton's configuration has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from halfserve.protos.model_config_pb2 import ModelConfig, ModelInstanceGroup
from halfserve.serve.engine.backend import ONNX, OPENVINO
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.padding.padding_rule import BUCKETS_KEY, KEY, TOKENS_KEY

PRECISION_KEY = "halfserve.cpu_precision"
THREAD_KEYS = {ONNX.backend: "intra_op_thread_count", OPENVINO.backend: "INFERENCE_NUM_THREADS"}
DEVICE_INSTANCES = (1, 2, 3, 4)
LARGEST_BATCH = 128
DELAYS_US = (0, 200, 1000, 3000, 10_000)
DELAY_SHARE = 0.4  # longest queue delay to try, as a share of the latency limit
SettingValue: TypeAlias = int | str | bool


@dataclass(frozen=True, kw_only=True)
class TunedSettings:
    """Values of one model's tuned settings."""

    instances: int = 1  # copies of the model; on devices, copies on each
    threads: int = 0  # threads of one copy on the CPU; 0 leaves them to the server
    max_batch_size: int = 0  # rows of the largest batch; 0 for a model without a batch dimension
    delay_us: int = 0  # microseconds that a request may wait for others
    padded: bool = False  # whether requests of different lengths share batches
    precision: str = ""  # precision on the CPU, as in "halfserve.cpu_precision"; "" where the configuration has none

    @property
    def division(self) -> tuple[SettingValue, ...]:
        """The settings that change what a batch costs, and not only which requests share it."""
        return self.instances, self.threads, self.padded, self.precision

    @property
    def text(self) -> str:
        copies = "1 copy" if self.instances == 1 else f"{self.instances} copies"
        parts = [f"{copies}, {self.threads or 'auto'} threads", f"batch {self.max_batch_size}", f"delay {self.delay_us} us"]
        return ", ".join([*parts, *(["padded"] if self.padded else []), *([self.precision] if self.precision else [])])


Choice: TypeAlias = tuple[TunedSettings, ...]  # the settings of each tuned model, in the order of `SearchSpace.models`


def choice_text(choice: Choice) -> str:
    return "; ".join(settings.text for settings in choice)


@dataclass(frozen=True, kw_only=True)
class TunedAxis:
    """The values of one setting of one model, in their order."""

    model: int  # index of the model
    name: str  # field of TunedSettings
    values: tuple[SettingValue, ...]

    def beside(self, choice: Choice) -> list[Choice]:
        """Return the choice with the next value, and with the one before."""
        index = self.values.index(getattr(choice[self.model], self.name))
        return [self.set(choice, self.values[place]) for place in (index + 1, index - 1) if 0 <= place < len(self.values)]

    def set(self, choice: Choice, value: SettingValue) -> Choice:
        """Return the choice with another value; batches of one row wait for none."""
        settings = replace(choice[self.model], **{self.name: value})  # type: ignore[arg-type]  # (by name)
        if self.name == "max_batch_size" and settings.max_batch_size <= 1:
            settings = replace(settings, delay_us=0)
        return (*choice[: self.model], settings, *choice[self.model + 1 :])


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The choices that may be tried: combinations of the axes' values that fit the cores, and the choice in force."""

    models: tuple[str, ...]  # names of the tuned models: one, or an ensemble's steps
    axes: tuple[TunedAxis, ...]
    start: Choice  # the choice in force
    cores: int  # cores that each model may use

    def allows(self, choice: Choice) -> bool:
        """Return whether a choice fits the cores and is not another one with a value that has no effect."""
        threaded = {axis.model for axis in self.axes if axis.name == "threads"}
        return choice == self.start or all(
            # Threads that the server chooses may be as many as cores.
            settings.instances * ((settings.threads or self.cores) if number in threaded else 1) <= self.cores
            and (settings.max_batch_size > 1 or not settings.delay_us)
            for number, settings in enumerate(choice)
        )

    def neighbours(self, choice: Choice) -> list[Choice]:
        """Return the choices that differ in one setting by one place, or divide all cores otherwise among copies."""
        found = [other for axis in self.axes for other in axis.beside(choice)]
        for copies, threads in product(self.axes, repeat=2):
            if (copies.name, threads.name, copies.model) == ("instances", "threads", threads.model):
                pairs = [pair for pair in product(copies.values, threads.values) if math.prod(map(int, pair)) == self.cores]
                found += [threads.set(copies.set(choice, count), each) for count, each in pairs]
        return [one for one in dict.fromkeys(found) if one != choice and self.allows(one)]

    def all(self) -> Iterator[Choice]:
        """Yield every choice."""
        for values in product(*(axis.values for axis in self.axes)):
            choice = self.start
            for axis, value in zip(self.axes, values, strict=True):
                choice = axis.set(choice, value)
            if self.allows(choice):
                yield choice


def settings_of(config: ModelConfig) -> TunedSettings:
    """Return the settings in a completed configuration."""
    key = THREAD_KEYS.get(config.backend, "")
    threads = config.parameters[key].string_value if key in config.parameters else ""
    precision = own_parameter(config, PRECISION_KEY) if config.backend == ONNX.backend else None
    return TunedSettings(
        instances=sum(max(1, group.count) for group in config.instance_group) or 1,
        threads=int(threads) if threads.isdecimal() else 0,
        max_batch_size=config.max_batch_size,
        delay_us=config.dynamic_batching.max_queue_delay_microseconds,
        padded=KEY in config.parameters,
        precision=precision or "",
    )


def axes_of(index: int, config: ModelConfig, *, cores: int, limit_ms: float, rows: int) -> list[TunedAxis]:
    """Return the axes of the model `index` with a completed configuration, but for its precision.

    `rows` are the fewest that a batch must be able to hold.
    """
    now = settings_of(config)
    on_device = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    shares = tuple(sorted({*(2**power for power in range(cores.bit_length())), cores}))
    found: dict[str, Sequence[SettingValue]] = {"instances": DEVICE_INSTANCES if on_device else shares}
    if not on_device and config.backend in THREAD_KEYS:
        found["threads"] = shares
    if config.max_batch_size:
        largest = max(LARGEST_BATCH, config.max_batch_size)
        found["max_batch_size"] = [2**n for n in range(largest.bit_length()) if rows <= 2**n <= largest]
        found["delay_us"] = [delay for delay in DELAYS_US if delay <= limit_ms * 1e3 * DELAY_SHARE]
    if now.padded:
        found["padded"] = (False, True)
    axes = [
        TunedAxis(model=index, name=name, values=tuple(sorted({*values, getattr(now, name)}))) for name, values in found.items()
    ]
    return [axis for axis in axes if len(axis.values) > 1]


def configured(config: ModelConfig, now: TunedSettings, wanted: TunedSettings, backend: str) -> ModelConfig:
    """Return a configuration with the wanted settings. It need not be complete; what stays as it is `now` stays as written."""
    result = ModelConfig()
    result.CopyFrom(config)
    parameters, batching = result.parameters, result.dynamic_batching
    if wanted.instances != now.instances:
        if not result.instance_group:
            result.instance_group.add()
        del result.instance_group[1:]
        result.instance_group[0].count = wanted.instances
    if wanted.threads != now.threads:
        parameters[THREAD_KEYS[backend]].string_value = str(wanted.threads)
    if wanted.max_batch_size != now.max_batch_size:
        result.max_batch_size = wanted.max_batch_size
        batching.preferred_batch_size[:] = [size for size in batching.preferred_batch_size if size <= wanted.max_batch_size]
        batching.SetInParent()
    if wanted.delay_us != now.delay_us:
        batching.max_queue_delay_microseconds = wanted.delay_us
    if wanted.padded != now.padded:
        for key in (KEY, BUCKETS_KEY, TOKENS_KEY):
            parameters.pop(key, None)
    if wanted.precision != now.precision:
        parameters[PRECISION_KEY].string_value = wanted.precision
    return result
