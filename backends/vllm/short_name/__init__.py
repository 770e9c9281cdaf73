"""Installed as `kvledger.vllm`: the short name of `kvledger.backends.vllm`, for `--scheduler-cls` and the like."""

from importlib import import_module
from typing import Any

vllm = import_module("kvledger.backends.vllm")


def __getattr__(name: str) -> Any:
    return getattr(vllm, name)


def __dir__() -> list[str]:
    return dir(vllm)
