"""The arrows of the design: core knows nothing of ours, kernels know only tensors, backends never import sim."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "core": {"core"},
    "kernels": {"kernels"},
    "backends": {"backends", "kernels", "core"},
    # The kit's invariants check logs in production too, so sim may use them.
    "sim": {"sim", "backends", "core", "testing"},
}
CORE_LIBRARIES = {"attrs", "numpy"}
# Imported inside a function, when a user chooses that hash.
CORE_OPTIONAL = {"cbor2", "xxhash"}


def imports_of(path: Path) -> list[tuple[str, int]]:
    """Absolute names of everything a file imports, relative imports resolved from the folder layout."""
    package = ["kvledger", *path.relative_to(ROOT).parts[:-1]]
    names: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names.append((".".join([*base, *([node.module] if node.module else [])]), node.lineno))
    return names


def printed_by(code: str) -> str:
    """What a fresh interpreter prints when it runs `code`."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def files_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_its_arrows_allow(folder: str) -> None:
    wrong = []
    for path in files_of(folder):
        for name, line in imports_of(path):
            parts = name.split(".")
            if parts[0] == "kvledger" and len(parts) > 1 and parts[1] not in ALLOWED[folder]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong


def test_core_imports_attrs_numpy_and_the_standard_library_only() -> None:
    wrong = []
    for path in files_of("core"):
        for name, line in imports_of(path):
            top = name.split(".")[0]
            if top not in {"kvledger", *CORE_LIBRARIES, *CORE_OPTIONAL, *sys.stdlib_module_names}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong


def test_importing_core_pulls_in_nothing_heavy() -> None:
    heavy = "torch triton simpy pandas polars pyarrow plotly matplotlib rich typer cbor2 xxhash"
    code = (
        "import sys, kvledger.core; "
        f"print(sorted(set('{heavy}'.split()) & set(sys.modules)), "
        "[m for m in sys.modules if m.startswith(('kvledger.sim', 'kvledger.backends', 'kvledger.kernels'))])"
    )
    assert printed_by(code) == "[] []"


def test_importing_core_loads_neither_numpy_nor_attrs() -> None:
    assert printed_by("import sys, kvledger.core; print({'numpy', 'attr', 'attrs'} & set(sys.modules))") == "set()"


def test_every_name_of_core_together_loads_little_beside_numpy_and_attrs() -> None:
    """Start-up of at most twice `import numpy, attrs`: what is loaded is a sturdier measure of it than a time."""
    code = (
        "import sys, numpy, attrs; before = set(sys.modules)\n"
        "from kvledger.core import *\n"
        "print(*[name for name in set(sys.modules) - before if not name.startswith('kvledger')])"
    )
    loaded = set(printed_by(code).split())
    rarely_needed = {
        "asyncio",
        "dataclasses",
        "difflib",
        "hashlib",
        "json",
        "logging",
        "multiprocessing",
        "tempfile",
        "urllib",
    }
    assert not loaded & rarely_needed
    assert len(loaded) <= 12, sorted(loaded)


def test_every_package_is_typed() -> None:
    for folder in (".", "tests/kit"):
        assert (ROOT / folder / "py.typed").exists()
