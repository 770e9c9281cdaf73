"""What `make gpu` runs can be imported with torch, triton, transformers and numpy; a machine with a GPU has no more."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
# attrs and hypothesis come with the project's core and its tests; where pyarrow is missing, whole modules skip.
AVAILABLE = ("torch", "triton", "transformers", "numpy", "pytest", "attrs", "hypothesis", "pyarrow")

COLLECT = """
import ast, importlib, importlib.metadata, pathlib, re, sys
import pytest

def required(names):
    found, left = set(), list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", re.match(r"[\\w.-]+", left.pop()).group()).lower()
        if name not in found:
            try:
                requirements = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            found.add(name)
            left += [text for text in requirements if "extra ==" not in text]
    return found

available, paths = sys.argv[1].split(","), sys.argv[2:]
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
allowed = required(available)
blocked = {
    module
    for module, owners in importlib.metadata.packages_distributions().items()
    if not {normal(owner) for owner in owners} & allowed and module != "kvledger" and not module.startswith("_")
}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not on the machine with the GPU", name=name)

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, "")  # as `python -m pytest` does
options = ["--collect-only", "-q", "-p", "no:kvledger", "-W", "default", "-W", "ignore::pytest.PytestConfigWarning"]
options += ["-o", "addopts=--import-mode=importlib --strict-markers -p no:cacheprovider"]
code = pytest.main([*options, *paths])
# The benches import what draws their reports when they are done.
for path in [each for each in paths if each.startswith("bench/")]:
    for node in ast.walk(ast.parse(pathlib.Path(path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kvledger."):
            importlib.import_module(node.module)
print("blocked:", *sorted(blocked))
sys.exit(code)
"""


def paths_of_make_gpu() -> list[str]:
    """Files and folders that the pytest lines of `make gpu` name."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    recipes = [line for line in makefile.splitlines() if "$(GPU_PYTEST)" in line]
    words = [word.rstrip(";") for line in recipes for word in shlex.split(line, posix=False)]
    patterns = [word for word in words if re.match(r"(tests|bench)/", word)]
    return sorted({str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)})


def test_make_gpu_collects_its_tests_where_nothing_else_is_installed() -> None:
    for name in AVAILABLE:
        if importlib.util.find_spec({"attrs": "attr"}.get(name, name)) is None:
            pytest.skip(f"{name} is not installed")
    paths = paths_of_make_gpu()
    assert len(paths) > 8, paths
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT / "tests" / "bare")}
    environment.pop("PYTEST_ADDOPTS", None)
    collected = subprocess.run(
        [sys.executable, "-c", COLLECT, ",".join(AVAILABLE), *paths],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    errors = "\n".join(line for line in collected.stdout.splitlines() if "::" not in line)
    assert collected.returncode == 0, f"{errors}\n{collected.stderr}"
    blocked = collected.stdout.rpartition("blocked:")[2].split()
    assert {"torch", "numpy", "pytest", "attr"}.isdisjoint(blocked)
    assert not [line for line in collected.stdout.splitlines() if line.startswith("ERROR ")]
