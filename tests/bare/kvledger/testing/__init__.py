"""Stands in for the installed `kvledger.testing`, whose folder is `tests/kit`."""

from pathlib import Path

_KIT = Path(__file__).parents[3] / "kit"
__path__ = [str(_KIT)]
exec(compile((_KIT / "__init__.py").read_text(), str(_KIT / "__init__.py"), "exec"))
