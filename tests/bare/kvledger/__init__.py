"""Stands in for the installed package where nothing is installed (`make gpu`): put `tests/bare` on the path."""

from pathlib import Path

_ROOT = Path(__file__).parents[3]
__path__ = [str(_ROOT), str(Path(__file__).parent)]
exec(compile((_ROOT / "__init__.py").read_text(), str(_ROOT / "__init__.py"), "exec"))
