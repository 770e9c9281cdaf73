"""The API reference builds without a warning and has the public names (`make docs` builds all of it)."""

import subprocess
import sys
from pathlib import Path

import kvledger.core

SCRIPT = Path(__file__).parents[1] / "docs" / "reference.py"


def test_the_reference_of_core_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, tmp_path, "kvledger.core"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "kvledger" / "core.html").read_text(encoding="utf-8")
    assert [name for name in kvledger.core.__all__ if f'id="{name}"' not in page] == []
