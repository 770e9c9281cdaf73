"""How much the property tests play: seconds in a normal run, an hour with `--hypothesis-profile=deep`."""

from collections.abc import Callable
from pathlib import Path

import pytest

DEEP_FACTOR = 100


def _is_deep(config: pytest.Config) -> bool:
    return config.getoption("--hypothesis-profile", None) == "deep"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A deep run is long on purpose: none of its tests is stopped for that."""
    for item in items:
        if _is_deep(config) and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="session")
def kit_histories(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Scales a number of histories to the profile."""
    return lambda count: count * (DEEP_FACTOR if _is_deep(request.config) else 1)
