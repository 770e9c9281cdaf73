"""Kernel tests run on the twins and on Triton: compiled for the GPU if there is one, else interpreted."""

from importlib.util import find_spec
from typing import Any

import pytest

from tests.kernels.kernel_sets import KERNEL_SETS, kernel_set


def pytest_configure() -> None:
    """Choose Triton's mode while tests are collected: one that runs earlier may import triton, which fixes it."""
    if find_spec("torch") is not None and find_spec("triton") is not None:
        from tests.kernels.interpreter_repairs import use_interpreter_without_gpu

        use_interpreter_without_gpu()


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
