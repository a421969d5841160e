"""Policies: parsing, printing, changing, explaining."""

from __future__ import annotations

import copy
import difflib
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve import Policy, autocast
from halfserve.amp_core.policy import PolicyError, Rule
from halfserve.amp_core.policy.operations import ALIASES, native_rule, overloads_of, qualified_name, qualified_names


@pytest.mark.parametrize(
    "text", ["native", "cuda", "cuda+fp32:sum,exp", "native+low:softmax+ban:exp+low:sum", "cuda+native:dot"]
)
def test_the_string_form_prints_back_as_it_was_written(text: str) -> None:
    assert str(Policy.parse(text)) == text


def is_known(name: str) -> bool:
    try:
        Policy().low(name)
    except PolicyError:
        return False
    return True


@cache
def names() -> list[str]:
    """Return the operations that a policy may name: a second's work, which is not for those who only collect."""
    qualified = torch._C._dispatch_get_all_op_names()
    bare = {name.removeprefix("aten::").partition(".")[0] for name in qualified if name.startswith("aten::")}
    return sorted(name for name in bare if is_known(name))


any_name = st.deferred(lambda: st.sampled_from(names()))
any_op = any_name | st.sampled_from(sorted(ALIASES))
changes = st.lists(st.tuples(any_op, st.sampled_from(list(Rule))), max_size=12)
any_policy = st.builds(Policy, st.sampled_from(["native", "cuda"]), changes.map(tuple))


def test_spaces_are_forgiven() -> None:
    assert Policy.parse(" cuda + fp32: sum, exp ") == Policy.cuda().fp32("sum", "exp")


@given(any_policy, any_op, st.sampled_from(list(Rule)))
def test_changing_a_policy_makes_another_and_a_later_change_wins(policy: Policy, op: str, rule: Rule) -> None:
    before = str(policy)
    change = {
        Rule.LOW: policy.low,
        Rule.FP32: policy.fp32,
        Rule.WIDEST: policy.widest,
        Rule.NATIVE: policy.native,
        Rule.BAN: policy.ban,
    }[rule]
    changed = change(op)
    assert str(policy) == before
    for name in qualified_names(op):
        assert changed.rules().get(name, Rule.NATIVE) is rule


def test_of_a_policy_made_by_hand_the_latest_change_of_an_operation_stays() -> None:
    policy = Policy("cuda", (("pow", Rule.FP32), ("exp", Rule.LOW), ("pow", Rule.BAN)))
    assert policy.changes == (("exp", Rule.LOW), ("pow", Rule.BAN))
    assert str(policy) == "cuda+low:exp+ban:pow"


def test_native_is_a_preset_on_the_class_and_a_change_on_a_policy() -> None:
    assert Policy.native() == Policy() == Policy.parse("native")
    assert Policy.native().rules() == {}
    assert "aten::gelu" in Policy.cuda().rules()
    assert "aten::gelu" not in Policy.cuda().native("gelu").rules()


def test_names_resolve_to_every_overload_that_autocast_may_touch() -> None:
    assert {qualified_name(o) for o in overloads_of("aten::pow")} == {
        "aten::pow.Scalar",
        "aten::pow.Tensor_Scalar",
        "aten::pow.Tensor_Tensor",
    }
    softmaxes = {qualified_name(o) for o in overloads_of("aten::softmax")} - {"aten::softmax.Dimname"}  # of torch 2.11
    assert softmaxes == {"aten::softmax.int"}
    assert {qualified_name(o) for o in overloads_of("aten::addmm")} == {"aten::addmm"}
    assert overloads_of("aten::add_") == overloads_of("aten::zeros") == ()


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_stands_for_operations_that_this_torch_has(alias: str) -> None:
    assert all(overloads_of(name) for name in qualified_names(alias))


def registered_for_cuda() -> set[str]:
    """torch's own operations; torchvision's may be there too."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return {name for name in names if name.startswith("aten::")}


def test_the_cuda_preset_covers_all_that_torch_registers_for_cuda() -> None:
    registered = registered_for_cuda()
    registered -= {"aten::copy_", "aten::_foreach_copy_", "aten::fill_.Tensor"}  # ours, which watch for overwritten weights
    registered -= {"aten::_cudnn_rnn"}  # in builds for CUDA: no rule, but a way of its own to lay out weights, which stays
    covered = {qualified_name(overload) for name in Policy.cuda().rules() for overload in overloads_of(name)}
    assert registered <= covered


def test_only_differences_are_overridden() -> None:
    assert Policy().difference("cpu") == {}
    on_cpu = Policy.cuda().difference("cpu")
    assert on_cpu["aten::softmax.int"] is Rule.FP32
    assert "aten::mm" not in on_cpu  # torch's own rule on the CPU too
    on_cuda = Policy.cuda().difference("cuda")
    # gelu is documented but not registered; what vmap leaves of softmax and the norms is not registered either; torch's own
    # widest raises where two low dtypes meet, ours does not. rms_norm is not registered in torch 2.11.
    parts = {"aten::_softmax", "aten::_log_softmax", "aten::native_group_norm"}
    assert {name for name, rule in on_cuda.items() if rule is not Rule.WIDEST} - parts == {
        "aten::gelu",
        *({"aten::rms_norm"} - registered_for_cuda()),
    }


def test_native_rules_of_the_cpu_are_what_torch_does() -> None:
    x = torch.ones(4, 4)
    unary: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda t: t.softmax(0),
        "exp": torch.exp,
        "prod": torch.prod,
        "trace": torch.trace,
    }
    for name, function in unary.items():
        with torch.autocast("cpu", torch.float16):
            observed = function(x.half()).dtype
        rules = {native_rule(overload, "cpu") for overload in overloads_of(f"aten::{name}")}
        assert rules == ({Rule.FP32} if observed is torch.float32 else {None})


def test_the_operations_that_a_policy_may_name_are_torchs_own() -> None:
    assert len(names()) > 900
    assert {"softmax", "conv2d", "lstm_cell", "linalg_norm", "native_layer_norm"} <= set(names())
    assert not {"add_", "zeros", "rand", "empty_like_out", "set_"} & set(names())


@pytest.mark.parametrize("rule", list(Rule))
def test_every_name_reads_back_with_every_rule(rule: Rule) -> None:
    policy = Policy("cuda", tuple((name, rule) for name in names()))
    assert Policy.parse(str(policy)) == policy
    assert str(policy).count(",") == len(names()) - 1


@given(any_policy)
def test_a_policy_is_its_string_a_value_and_a_key(policy: Policy) -> None:
    twin = Policy.parse(str(policy))
    assert twin == policy
    assert hash(twin) == hash(policy)
    assert str(twin) == str(policy)
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy  # noqa: S301  (our own bytes)
    with pytest.raises(AttributeError):
        policy.preset = "native"  # type: ignore[misc]


@given(any_policy, any_name, any_name)
def test_changes_of_different_operations_may_come_in_any_order(policy: Policy, one: str, other: str) -> None:
    if one != other:
        assert policy.low(one).ban(other).rules() == policy.ban(other).low(one).rules()


@settings(max_examples=30)
@given(any_name.filter(lambda name: len(name) > 4), st.data())
def test_a_misspelt_name_is_answered_with_one_at_least_as_near(name: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(1, len(name) - 2))
    misspelt = name[:place] + name[place + 1] + name[place] + name[place + 2 :]
    if is_known(misspelt):
        return
    with pytest.raises(PolicyError, match="no out-of-place operation") as caught:
        Policy().fp32(misspelt)
    if name.startswith("_"):  # torch's private operations may be named, but are not recommended
        return
    suggested = str(caught.value).partition("did you mean '")[2].partition("'")[0]
    assert is_known(suggested)
    similarity = difflib.SequenceMatcher(None, suggested, misspelt).ratio()
    assert similarity >= difflib.SequenceMatcher(None, name, misspelt).ratio() - 0.1


@given(any_name)
def test_explain_agrees_with_the_rules(name: str) -> None:
    for policy, rule in ((Policy().ban(name), Rule.BAN), (Policy.cuda().fp32(name), Rule.FP32)):
        line = policy.explain(name, "cpu").splitlines()[0]
        assert line.startswith(f"{name} on cpu: {rule} ")
        assert "(by the policy " in line or "torch's own rule)" in line
    assert "by the policy" not in Policy().explain(name, "cpu")


@pytest.mark.parametrize(
    ("name", "policy", "device", "text"),
    [
        ("mm", Policy(), "cpu", "mm on cpu: low (torch's own rule)"),
        ("mm", Policy().fp32("mm"), "cpu", "mm on cpu: fp32 (by the policy native+fp32:mm; torch's own rule: low)"),
        ("relu", Policy.cuda(), "cuda", "relu on cuda: its inputs' dtypes (torch's own rule)"),
        ("sum", Policy.cuda(), "cuda", "sum on cuda: fp32 (torch's own rule)"),
        ("exp", Policy.cuda(), "cpu", "exp on cpu: fp32 (by the policy cuda; torch's own rule: its inputs' dtypes)"),
        (
            "nll_loss",
            Policy.cuda(),
            "cuda",
            "\n".join(f"{op} on cuda: fp32 (torch's own rule)" for op in ("nll_loss", "nll_loss2d")),
        ),
    ],
)
def test_explain(name: str, policy: Policy, device: str, text: str) -> None:
    assert policy.explain(name, device) == text


MADE: Any = Policy  # called as no type checker allows


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Policy.parse("cudda"),
            "unknown policy 'cudda' .did you mean 'cuda'.*; a policy starts with native or cuda",
        ),
        (lambda: Policy.parse(""), "unknown policy ''; a policy starts with native or cuda"),
        (
            lambda: Policy.parse("cuda+fp31:exp"),
            r"cannot read 'fp31:exp' in the policy 'cuda\+fp31:exp' \(did you mean 'fp32'\?\); expected low\|fp32",
        ),
        (lambda: Policy.parse("cuda+exp"), r"cannot read 'exp' in the policy"),
        (lambda: Policy.parse("cuda+fp32:softmx"), "no out-of-place operation 'softmx'; did you mean 'softmax'"),
        (lambda: MADE.parse(None), "expected a policy's string form, such as .*; got None"),
        *(
            (lambda name=name: Policy().fp32(name), f"no out-of-place operation '{name}'{nearest}")
            for name, nearest in {
                "sofmax": "; did you mean 'softmax'",
                "torch.softmax": "; did you mean 'softmax'",
                "nn.functional.gelu": "; did you mean 'gelu'",
                "exp_": "; did you mean 'exp'",
                "aten::epx": "; did you mean 'aten::exp'",
                "mylib::exp": "; .*",
                "__class__": "",
                "": "",
            }.items()
        ),
        (lambda: MADE().fp32(3), "an operation is named by a string, such as 'softmax'; got 3"),
        (lambda: MADE(3), "starts with the name of a preset, native or cuda; got 3"),
        (lambda: MADE("cuda", (("softmx", Rule.LOW),)), "did you mean 'softmax'"),
        (lambda: MADE("cuda", ((["exp"], Rule.LOW),)), r"named by a string, such as 'softmax'; got \['exp'\]"),
        (
            lambda: MADE("cuda", (("exp", "fp31"),)),
            r"pairs \(operation, rule\), a rule being low.*; got \('exp', 'fp31'\)",
        ),
        (lambda: MADE("cuda", (("exp", Rule.LOW, 1),)), "expected changes as pairs"),
        (lambda: Policy().explain("softmx", "cpu"), "did you mean 'softmax'?"),
        (lambda: Policy().explain("softmax", "cup"), "no autocast for the device type 'cup'"),
        (lambda: autocast("cpu", policy="cudda"), r"unknown policy 'cudda' \(did you mean 'cuda'\?\)"),
        (lambda: autocast("cpu", policy=MADE), "policy must be a Policy or its string form"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make()
    assert not torch.is_autocast_enabled("cpu")
    assert isinstance(PolicyError(""), ValueError)


def test_a_rule_given_as_its_text_is_that_rule() -> None:
    as_text: Any = (("exp", "fp32"), ["sum", "low"], ("exp", Rule.LOW))
    with pytest.raises(PolicyError, match="expected changes as pairs"):
        Policy("native", as_text)
    policy = Policy("native", (as_text[0], as_text[2]))
    assert policy == Policy().low("exp") == Policy.parse(str(policy))
    half = torch.ones(2, dtype=torch.float16)
    with autocast("cpu", torch.float16, policy=Policy("native", as_text[:1])):
        assert half.exp().dtype is torch.float32
