"""The examples in the docstrings of core print what they show."""

import subprocess
import sys
from pathlib import Path

CORE = Path(__file__).parents[2] / "core"
# A fresh process, because examples register names of their own.
RUN = """
import doctest, importlib, sys
tried = [doctest.testmod(importlib.import_module(name)) for name in sys.argv[1:]]
sys.exit(any(result.failed or not result.attempted for result in tried))
"""


def test_every_example_of_core_prints_what_it_shows() -> None:
    paths = [path for path in sorted(CORE.rglob("*.py")) if ">>> " in path.read_text()]
    names = [".".join(("kvledger", *path.relative_to(CORE.parent).with_suffix("").parts)) for path in paths]
    assert names
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, *names], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
