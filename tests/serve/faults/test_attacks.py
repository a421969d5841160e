"""Attacks beside a well-behaved client: the memory stays within the budget, and the client loses no request."""

from __future__ import annotations

import pytest

from benchmarks.attacks.__main__ import ATTACKS, is_good
from benchmarks.attacks.measure import Attack, measure
from tests.scale import SCALE, scaled

# Of each port and each kind one; `python -m benchmarks.attacks` runs all, and shows what the client notices.
CHOSEN = ("unread_rest_answers", "cache_keys", "cycles", "fast_models", "idle_connections")


@pytest.mark.long
@pytest.mark.timeout(600 * max(1.0, SCALE))
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.name in CHOSEN], ids=lambda attack: attack.name)
def test_an_attack_without_a_token_is_held_off(attack: Attack) -> None:
    outcome = measure(attack, scaled(1))
    assert is_good(attack, outcome), outcome
