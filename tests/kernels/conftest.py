"""Kernel tests run on the twins and on Triton: compiled for the GPU if there is one, else interpreted."""

from typing import Any

import pytest

from tests.kernels.kernel_sets import KERNEL_SETS, kernel_set


@pytest.fixture(params=KERNEL_SETS)
def kernels(request: pytest.FixtureRequest) -> Any:
    """Each kernel set in turn."""
    return kernel_set(request.param)


@pytest.fixture
def twins() -> Any:
    """The plain-torch kernels."""
    return kernel_set("torch")


@pytest.fixture
def triton_kernels() -> Any:
    """The Triton kernels."""
    return kernel_set("triton")
