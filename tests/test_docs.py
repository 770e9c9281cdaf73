"""The pages in docs name files, modules, names and pages that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "backends", "sim", "kernels", "tests", "bench", "examples", "docs")
# `kvledger.testing` is the folder tests/kit, `kvledger.vllm` stands for backends/vllm.
PACKAGES = {**{name: name for name in FOLDERS[:4]}, "testing": "tests/kit", "vllm": "backends/vllm"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(params=PAGES, ids=lambda path: path.name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_path_on_a_page_exists(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", page.read_text(encoding="utf-8"))
    made_by_make_docs = "docs/site"
    assert [path for path in named if path != made_by_make_docs and not (ROOT / path).exists()] == []


def test_every_module_and_name_on_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    imports = re.findall(r"from kvledger\.([\w.]+) import (?:\(([^)]+)\)|([\w, ]+))", text)
    wanted = {(module, name) for module, many, few in imports for name in re.findall(r"\w+", many or few)}
    wanted |= {tuple(path.rsplit(".", 1)) for path in re.findall(r"`kvledger\.(\w+\.[\w.]*\w)`", text)}
    assert [f"kvledger.{module}.{name}" for module, name in sorted(wanted) if not exists(module, name)] == []


def exists(module: str, name: str) -> bool:
    """Whether a module or class has that name, as far as its text tells."""
    package, *rest = module.split(".")
    folder = ROOT.joinpath(PACKAGES[package], *rest)
    if folder.is_dir():
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        return (
            (folder / name).is_dir() or (folder / f"{name}.py").is_file() or f" {name}" in text or f'"{name}"' in text
        )
    if folder.with_suffix(".py").is_file():
        return re.search(rf"\b{name}\b", folder.with_suffix(".py").read_text(encoding="utf-8")) is not None
    return bool(rest) and exists(".".join((package, *rest[:-1])), rest[-1])  # a method of a class


def test_every_link_on_a_page_leads_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_linked_from_the_readme_or_from_another_page() -> None:
    linked = {link for page in PAGES for link in re.findall(r"([\w/]+\.md)", page.read_text(encoding="utf-8"))}
    assert {page.name for page in PAGES} - {"README.md"} <= {Path(link).name for link in linked}


def test_the_map_names_every_room() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = [
        path.parent.name for folder in ("core", "backends", "sim") for path in ROOT.glob(f"{folder}/*/__init__.py")
    ]
    assert [room for room in rooms if f"`{room}`" not in text] == []
