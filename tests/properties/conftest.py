"""How much the property tests play: seconds, or an hour on two cores with `--hypothesis-profile=deep -n 2`."""

from collections.abc import Callable
from pathlib import Path

import pytest

DEEP_FACTOR = 90
# Every command of these is played on real memory in every layout as well, which takes ten times as long.
DEEP_FACTOR_OF = {"test_same_slots.py": 30}


def _is_deep(config: pytest.Config) -> bool:
    return config.getoption("--hypothesis-profile", None) == "deep"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A deep run is long on purpose: none of its tests is stopped for that."""
    for item in items:
        if _is_deep(config) and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture
def kit_histories(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Scales a number of histories to the profile."""
    factor = DEEP_FACTOR_OF.get(request.path.name, DEEP_FACTOR) if _is_deep(request.config) else 1
    return lambda count: count * factor
