"""Policies over all operation names: what they print reads back, what is misspelt is named."""

from __future__ import annotations

import copy
import difflib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_core import Policy, autocast
from amp_core.policy import PolicyError, Rule


def is_known(name: str) -> bool:
    try:
        Policy().low(name)
    except PolicyError:
        return False
    return True


def _names() -> list[str]:
    qualified = torch._C._dispatch_get_all_op_names()
    bare = {name.removeprefix("aten::").partition(".")[0] for name in qualified if name.startswith("aten::")}
    return sorted(name for name in bare if is_known(name))


NAMES = _names()
changes = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(list(Rule))), max_size=12)
policies = st.builds(Policy, st.sampled_from(["native", "cuda"]), changes.map(tuple))


def test_the_operations_that_a_policy_may_name_are_torchs_own() -> None:
    assert len(NAMES) > 900
    assert {"softmax", "conv2d", "lstm_cell", "linalg_norm", "native_layer_norm"} <= set(NAMES)
    assert not {"add_", "zeros", "rand", "empty_like_out", "set_"} & set(NAMES)


@pytest.mark.parametrize("rule", list(Rule))
def test_every_name_reads_back_with_every_rule(rule: Rule) -> None:
    policy = Policy("cuda", tuple((name, rule) for name in NAMES))
    assert Policy.parse(str(policy)) == policy
    assert str(policy).count(",") == len(NAMES) - 1


@given(policies)
def test_a_policy_is_its_string_a_value_and_a_key(policy: Policy) -> None:
    twin = Policy.parse(str(policy))
    assert twin == policy
    assert hash(twin) == hash(policy)
    assert str(twin) == str(policy)
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy  # noqa: S301  (our own bytes)
    with pytest.raises(AttributeError):
        policy.preset = "native"  # type: ignore[misc]


@given(policies, st.sampled_from(NAMES))
def test_the_last_word_on_an_operation_is_what_counts(policy: Policy, op: str) -> None:
    assert policy.low(op).fp32(op) == policy.fp32(op)
    assert f"aten::{op}" not in policy.native(op).rules()
    assert policy.low(op).rules()[f"aten::{op}"] is Rule.LOW


@given(policies, st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_changes_of_different_operations_may_come_in_any_order(policy: Policy, one: str, other: str) -> None:
    if one != other:
        assert policy.low(one).ban(other).rules() == policy.ban(other).low(one).rules()


@given(st.sampled_from([name for name in NAMES if len(name) > 4]), st.data())
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


@given(st.sampled_from(NAMES))
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
    ],
)
def test_explain(name: str, policy: Policy, device: str, text: str) -> None:
    assert policy.explain(name, device) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Policy().fp32("sofmax"), "'sofmax'; did you mean 'softmax'?"),
        (lambda: Policy().fp32("torch.softmax"), "'torch.softmax'; did you mean 'softmax'?"),
        (lambda: Policy().fp32("nn.functional.gelu"), "'nn.functional.gelu'; did you mean 'gelu'?"),
        (lambda: Policy().ban("no_such_lib::op"), "'no_such_lib::op'"),
        (lambda: Policy().fp32(3), "an operation is named by a string, such as 'softmax'; got 3"),  # type: ignore[arg-type]
        (lambda: Policy.parse(None), "expected a policy's string form, such as .*; got None"),  # type: ignore[arg-type]
        (lambda: Policy("native", (("exp", "fp33"),)), r"low\|fp32\|widest\|native\|ban; got \('exp', 'fp33'\)"),  # type: ignore[arg-type]
        (lambda: Policy().explain("softmx", "cpu"), "did you mean 'softmax'?"),
        (lambda: Policy().explain("softmax", "cup"), "no autocast for the device type 'cup'"),
        (lambda: autocast("cpu", policy="cudda"), r"unknown policy 'cudda' \(did you mean 'cuda'\?\)"),
        (lambda: autocast("cpu", policy=Policy), "policy must be a Policy or its string form"),  # type: ignore[arg-type]
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
