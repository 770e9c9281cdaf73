"""The program of docs/kernels.md runs as it stands."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="kernels need torch")

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_example_holds() -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(compile(program, str(PAGE), "exec"), names)
    assert "read" in names
