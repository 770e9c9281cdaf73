"""The worked example of docs/cuda_backend.md runs as printed."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="real memory needs torch")
from kvledger.backends import CacheArrangement

from tests.properties.same_slots import VARIANTS

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[3] / "docs" / "cuda_backend.md"


def test_the_page_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["num_steps"] == 5


def test_the_page_names_every_arrangement() -> None:
    text = PAGE.read_text()
    assert all(f"`{arrangement.name}`" in text for arrangement in CacheArrangement)


def test_the_page_counts_the_layouts_that_are_compared() -> None:
    assert len(VARIANTS) == 14
    assert "in fourteen layouts" in " ".join(PAGE.read_text().split())
