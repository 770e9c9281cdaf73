"""Every rule, edge and field report that is cited somewhere exists: docs/rules.md and tests/field hold them."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RULES = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
NUMBERS = r"\d+(?:(?:, | and | to |, and )\d+)*"


@cache
def texts() -> list[tuple[str, str]]:
    """The path and the text of everything that may cite, each run of white space (and of `#`) being one space."""
    code = (
        path
        for folder in ("core", "backends", "sim", "kernels", "tests/kit")
        for path in ROOT.glob(f"{folder}/**/*.py")
    )
    return [
        (str(path.relative_to(ROOT)), re.sub(r"\s*\n[\s#]*|\s+", " ", path.read_text(encoding="utf-8")))
        for path in (*code, *ROOT.glob("docs/*.md"), *ROOT.glob("*.md"))
    ]


def numbers(text: str) -> set[int]:
    """`1, 3 to 5` -> 1, 3, 4, 5."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?: to (\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def rows_below(heading: str) -> set[str]:
    section = RULES.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| (\w+) \|", section, re.MULTILINE))


@pytest.mark.parametrize(("word", "heading"), [("rule", "Block ids"), ("edge", "Where vLLM 0.32 is sharp")])
def test_every_cited_number_is_a_row_of_the_rules(word: str, heading: str) -> None:
    rows = rows_below(heading)
    cited = [
        (path, number)
        for path, text in texts()
        for listed in re.findall(rf"\b{word}s? ({NUMBERS})", text, re.IGNORECASE)
        for number in sorted(numbers(listed))
    ]
    assert cited
    assert [(path, number) for path, number in cited if str(number) not in rows] == []


def test_a_list_of_rules_is_understood() -> None:
    assert re.search(NUMBERS, "rules 15, 18 to 21 and 3 of")[0] == "15, 18 to 21 and 3"
    assert numbers("15, 18 to 21 and 3") == {3, 15, 18, 19, 20, 21}


def test_every_cited_field_report_has_its_tests() -> None:
    tests = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "field").glob("test_*.py")}
    cited = {(path, name) for path, text in texts() for name in re.findall(r"\b[A-G]\d\d\b", text)}
    assert {name for _, name in cited} >= {"A01", "B07", "C01", "D01", "E01", "F01", "G01"}
    missing = [
        (path, name)
        for path, name in sorted(cited)
        if not any(
            f"_{name.lower()}_" in stem or re.search(rf"\b{name}\b|_{name.lower()}_", text)
            for stem, text in tests.items()
        )
    ]
    assert missing == []
