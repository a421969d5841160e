"""A cluster on Ray in which no member has all models, under load."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.scale import SCALE, scaled
from tests.serve.ray_cluster.many_models import many_models

MOST = 10


@pytest.mark.long
@pytest.mark.timeout(900 * max(1.0, SCALE))
def test_every_request_is_answered_and_counted_while_models_move(tmp_path: Path) -> None:
    figures = many_models(tmp_path, models=24, members=3, most=MOST, seconds=scaled(15), clients=3)
    logging.getLogger(__name__).info("%s", figures)
    assert (figures["wrong_or_lost"], figures["counted_otherwise"]) == ([], {})
    assert max(figures["models_of_each_member"]) <= MOST
    assert min(figures["answered"], figures["answered_through_one_member"]) > 0
    assert figures["forwarded_through_one_member"] > 0
