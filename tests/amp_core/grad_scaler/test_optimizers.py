"""Every optimizer of torch steps as with torch's scaler, and never to a non-finite parameter."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from halfserve import GradScaler

SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4}
# Which step gets what into which gradient; neighbours and repetitions included.
INJECTED = {3: math.inf, 11: math.nan, 12: -math.inf, 13: math.inf, 29: math.nan, 49: math.inf}
EXCHANGED_AT = 25
# L-BFGS only steps with a closure, which torch.amp refuses: test_closure_step.py holds it against float32 instead.
INFOS: dict[str, OptimizerInfo] = {info.name: info for info in optim_db if not info.step_requires_closure}


def implementations(info: OptimizerInfo) -> Iterator[dict[str, Any]]:
    """The first settings of the list, for each implementation that runs on the CPU; then the other settings."""
    plain, *others = [given.kwargs for given in info.optim_inputs_func(device="cpu")]
    for name in ("foreach", "fused"):
        if name in info.supported_impls and (name == "foreach" or "cpu" in info.supports_fused_on):
            yield plain | {name: True}
    yield plain | ({"foreach": False} if "foreach" in info.supported_impls else {})
    yield from others


CASES = [(name, settings) for name, info in INFOS.items() for settings in implementations(info)]


class Model(nn.Module):
    """Matrices only, as Muon wants it; an embedding with sparse gradients where that is all an optimizer takes."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(16, 4, sparse=sparse) if sparse else nn.Linear(4, 4, bias=False)
        self.second = None if sparse else nn.Linear(4, 4, bias=False)
        self.inputs = torch.tensor([1, 5, 5, 7]) if sparse else torch.randn(8, 4)

    def forward(self) -> Tensor:
        hidden: Tensor = torch.tanh(self.first(self.inputs))
        return (hidden if self.second is None else self.second(hidden)).square().mean()


def inject(model: Model, value: float, place: int) -> None:
    gradient = model.first.weight.grad
    assert gradient is not None
    numbers = gradient.coalesce()._values() if gradient.is_sparse else gradient
    numbers.view(-1)[place % numbers.numel()] = value
    if gradient.is_sparse:
        model.first.weight.grad = torch.sparse_coo_tensor(
            gradient.coalesce().indices(), numbers, gradient.shape, is_coalesced=True, check_invariants=True
        )


def train(scalers: list[Any], name: str, settings: dict[str, Any], *, clip: bool) -> Iterator[dict[str, Tensor]]:
    """50 steps; the scaler at `EXCHANGED_AT` gives its state to the other one, which goes on."""
    torch.manual_seed(0)
    model = Model(sparse=INFOS[name].only_supports_sparse_grads)
    make_optimizer: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    optimizer = make_optimizer(model.parameters(), **settings)
    scaler, successor = scalers
    for step in range(50):
        if step == EXCHANGED_AT:
            successor.load_state_dict(scaler.state_dict())
            scaler = successor
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(model()))
        if step in INJECTED:
            inject(model, INJECTED[step], step)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scale = torch.tensor([scaler.get_scale(), scaler._growth_tracker.item()])
        yield {"scale": scale} | {key: value.clone() for key, value in model.state_dict().items()}


def assert_equal(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    for step, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        for key, value in mine.items():
            assert torch.equal(value, reference[key]), f"{key} after step {step}"
    assert len({tuple(state["scale"].tolist()) for state in ours}) > 10
    assert not any(torch.equal(*pair) for pair in zip(ours[0].values(), ours[-2].values(), strict=True))


def make(ours: bool) -> Any:
    return GradScaler("cpu", **SETTINGS) if ours else torch.amp.GradScaler("cpu", **SETTINGS)


@pytest.mark.long
@pytest.mark.parametrize(("name", "settings"), CASES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(CASES)])
def test_fifty_steps_are_torchs_bit_for_bit(name: str, settings: dict[str, Any]) -> None:
    # torch clips no sparse gradients; one clipped run per implementation is enough.
    clips = not INFOS[name].only_supports_sparse_grads and settings.keys() <= {"foreach", "fused"}
    for clip in (False, True)[: 1 + clips]:
        reference = list(train([make(ours=False), make(ours=False)], name, settings, clip=clip))
        assert_equal(list(train([make(ours=True), make(ours=True)], name, settings, clip=clip)), reference)


@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "SparseAdam"])
def test_states_are_exchanged_in_mid_run_in_both_directions(name: str, ours_first: bool) -> None:
    mixed = list(train([make(ours=ours_first), make(ours=not ours_first)], name, {}, clip=False))
    assert_equal(mixed, list(train([make(ours=False), make(ours=False)], name, {}, clip=False)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["SGD", "SparseAdam", "Adagrad"])
def test_duplicates_in_sparse_gradients_add_up_as_torchs_do(name: str, dtype: torch.dtype) -> None:
    """At a scale that is no power of two, it shows whether they are added up before they are unscaled, or after."""
    weights = []
    for kind in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        embedding = nn.Embedding(8, 4, sparse=True, dtype=dtype)
        optimizer = getattr(torch.optim, name)(embedding.parameters(), lr=0.1)
        scaler: Any = kind("cpu", init_scale=3000.0)
        for _ in range(3):
            optimizer.zero_grad()
            outputs = embedding(torch.randint(8, (64,)))
            torch.autograd.backward(scaler.scale((outputs * torch.rand(64, 4)).sum()))
            scaler.step(optimizer)
            scaler.update()
        weights.append(embedding.weight.detach())
    assert torch.equal(*weights)


def test_the_list_is_not_empty() -> None:
    assert {"Adadelta", "Adafactor", "Adam", "AdamW", "Muon", "NAdam", "Rprop", "SGD", "SparseAdam"} <= INFOS.keys()
    assert {"foreach", "fused"} <= {key for _, settings in CASES for key in settings}


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "fused sgd": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"foreach": True}),
    "fused adam": (torch.optim.Adam, {"fused": True}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
}
EXTREMES = [math.inf, -math.inf, math.nan, 0.0, -0.0, 3.4e38, 1e30, 65504.0, 1.0, 6e-8, 1e-38, 1e-45]
GRADIENTS = st.lists(st.lists(st.sampled_from(EXTREMES), min_size=3, max_size=3), min_size=1, max_size=6)


def run(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, steps: list[list[float]], *, clip: bool
) -> None:
    scaler.scale(torch.ones(()))
    for gradient in steps:
        before = parameter.detach().clone()
        parameter.grad = torch.tensor(gradient).to(parameter.dtype)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([parameter], 1.0)
        scaler.step(optimizer)
        assert torch.isfinite(parameter).all(), (gradient, parameter)
        if scaler.step_was_skipped:
            assert torch.equal(parameter, before)
        scaler.update()


@settings(max_examples=80)
@given(
    steps=GRADIENTS,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([2.0**-14, 2.0**-3, 1.0, 2.0**16, 2.0**100]),
    growth=st.sampled_from([1, 3]),
    hysteresis=st.sampled_from([1, 2]),
    lr=st.sampled_from([1e-8, 1e-2, 1e3]),
    clip=st.booleans(),
)
def test_guarded_no_schedule_writes_a_non_finite_value(
    steps: list[list[float]],
    optimizer: str,
    dtype: torch.dtype,
    scale: float,
    growth: int,
    hysteresis: int,
    lr: float,
    clip: bool,
) -> None:
    kind, options = OPTIMIZERS[optimizer]
    parameter = nn.Parameter(torch.tensor([0.0, 1.0, -1e-7]).to(dtype))
    scaler = GradScaler(
        "cpu",
        scale,
        growth_interval=growth,
        hysteresis=hysteresis,
        on_min_scale="stop",
        allow_fp16_gradients=True,
        guard_parameters=dtype is not torch.float16,  # float16 parameters are guarded anyway
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The step of .* was undone", category=RuntimeWarning)
        run(scaler, kind([parameter], lr=lr, **options), parameter, steps, clip=clip)


@settings(max_examples=80)
@given(
    steps=GRADIENTS,
    optimizer=st.sampled_from(["sgd", "fused sgd", "adam", "adamw", "fused adam", "rprop", "adagrad"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([2.0**-14, 2.0**-3, 1.0, 2.0**16, 2.0**100]),
    clip=st.booleans(),
)
def test_unguarded_the_gradients_alone_do_not_either(
    steps: list[list[float]], optimizer: str, dtype: torch.dtype, scale: float, clip: bool
) -> None:
    # Without momentum, whose sum of finite gradients may overflow, and at a small learning rate: beyond is `guard_parameters`.
    kind, options = OPTIMIZERS[optimizer]
    parameter = nn.Parameter(torch.tensor([0.0, 1.0, -1e-7]).to(dtype))
    scaler = GradScaler("cpu", scale, growth_interval=2, on_min_scale="stop")
    run(scaler, kind([parameter], lr=1e-8, **options), parameter, steps, clip=clip)
