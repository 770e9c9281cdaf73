"""The engine's part of docs/live_serving.md is one program, and it runs."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("transformers", reason="real models need transformers")
pytest.importorskip("pyarrow", reason="event logs need pyarrow")

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[4] / "docs" / "live_serving.md"


def test_the_program_of_the_page_runs_and_prints_the_lines_that_it_shows(capsys) -> None:
    page = PAGE.read_text().partition("## 7.")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out.splitlines()
    start = page.index("    Available KV cache memory:")
    shown = [line[4:] for line in page[start : page.index("\n\n", start)].splitlines()]
    assert len(shown) == 6 and shown == printed[:6]
