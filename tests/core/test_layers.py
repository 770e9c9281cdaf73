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
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[] []"


def test_every_package_is_typed() -> None:
    for folder in (*ALLOWED, "tests/kit"):
        assert (ROOT / folder / "py.typed").exists()
