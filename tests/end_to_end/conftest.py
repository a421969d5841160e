from __future__ import annotations

import pytest

SOAK = "test_soak.py"


@pytest.hookimpl(trylast=True)  # after the plugin that puts tests into a random order
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest test: its two minutes then pass while the other workers do the rest."""
    items.sort(key=lambda item: item.path.name != SOAK)
