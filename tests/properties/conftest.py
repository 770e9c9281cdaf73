"""How much the property tests play: seconds in a normal run, an hour with `--hypothesis-profile=deep`."""

from collections.abc import Callable

import pytest

DEEP_FACTOR = 100


@pytest.fixture(scope="session")
def kit_histories(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Scales a number of histories to the profile."""
    is_deep = request.config.getoption("--hypothesis-profile", None) == "deep"
    return lambda count: count * (DEEP_FACTOR if is_deep else 1)
