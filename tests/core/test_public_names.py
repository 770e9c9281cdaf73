"""What `kvledger.core`, `.backends` and `.sim` promise can be imported, and importing core stays light."""

import importlib

import kvledger.core
import pytest


@pytest.mark.parametrize("package", ["kvledger.core", "kvledger.backends", "kvledger.sim"])
def test_every_public_name_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_every_public_name_of_core_has_a_docstring() -> None:
    names = [name for name in kvledger.core.__all__ if callable(getattr(kvledger.core, name))]
    assert [name for name in names if not getattr(kvledger.core, name).__doc__] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KVCacheAlocator'"):
        _ = kvledger.core.KVCacheAlocator
