"""`kvledger.vllm`, as an installation maps it: see `setup.py`."""

from kvledger.backends.vllm.short_name import __dir__, __getattr__  # noqa: F401
