"""The card that the GPU benches measure on. Without one they skip and print nothing."""

import os
from typing import Any

import pytest


def card_modules() -> tuple[Any, Any]:
    """torch and triton, where there is a card and Triton compiles for it; else the calling test skips or fails."""
    torch = pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device to measure on (torch {torch.__version__}, CUDA build: {torch.version.cuda})")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.fail("TRITON_INTERPRET is 1: the interpreter would be measured, not the card; unset it")
    return torch, triton


def describe_card(torch: Any, triton: Any) -> str:
    """The card and the versions that a figure belongs to."""
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, L2"
        f" {properties.L2_cache_size >> 20} MiB; torch {torch.__version__}, CUDA {torch.version.cuda}, triton"
        f" {triton.__version__}"
    )


def show(pytestconfig: pytest.Config, text: str) -> None:
    """Print past pytest's capture."""
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{text}", flush=True)
