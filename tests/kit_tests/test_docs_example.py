"""The worked example of docs/test_your_allocator.md: it finds the planted bug, and nothing once that is fixed."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvledger.testing import KitFailure, explore, survey
from kvledger.testing.protocol import ManagerFactory

PAGE = Path(__file__).parents[2] / "docs" / "test_your_allocator.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


def made_from(source: str, folder: Path) -> ManagerFactory:
    path = folder / "mymanager.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mymanager", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make


def fixed(source: str) -> str:
    """The page's diff, applied."""
    (diff,) = blocks("diff")
    old = "".join([line[1:] + "\n" for line in diff.splitlines() if not line.startswith("+")])
    new = "".join([line[1:] + "\n" for line in diff.splitlines()])
    assert source.count(old) == 1
    return source.replace(old, new)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Iterator[KitFailure]:
    make = made_from("\n".join(blocks("python")), tmp_path_factory.mktemp("example"))
    with pytest.raises(KitFailure):
        explore(make, 20, shorten_s=0)
    yield survey(make, 25, shorten_s=1)["keys_tell_the_truth", "Allocate"]


def test_the_planted_bug_is_found_by_a_short_program(found: KitFailure) -> None:
    assert found.violation.name == "keys_tell_the_truth"
    assert len(found.history.commands) <= 8


def test_the_report_has_the_parts_that_the_page_shows(found: KitFailure) -> None:
    report = found.report()
    for part in ("trial = Trial(make, Scenario(num_blocks=", "before the last command", "after it", "findable blocks"):
        assert part in report
    assert "keys_tell_the_truth: A findable block holds the content that its key names." in report


def test_the_program_of_the_page_breaks_the_promise(tmp_path) -> None:
    """As printed, with its two import lines."""
    (printed,) = [block for block in blocks("text") if block.startswith("trial = ")]
    program = printed.split("\n\n")[0]
    make = made_from("\n".join(blocks("python")), tmp_path)
    names: dict[str, object] = {"make": make}
    exec("from kvledger.testing import *", names)
    with pytest.raises(KitFailure) as failure:
        exec(program, names)
    assert failure.value.report().split("\n\n")[1:] == printed.rstrip().split("\n\n")[1:]


def test_nothing_is_found_once_it_is_fixed(tmp_path) -> None:
    explore(made_from(fixed("\n".join(blocks("python"))), tmp_path), 100)


def test_the_adapter_has_20_lines() -> None:
    _, adapter = blocks("python")
    assert len([line for line in adapter.splitlines() if line.strip()]) <= 20
