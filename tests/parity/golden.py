"""Where the golden files are: tests/golden/, or the directory named by KVLEDGER_GOLDEN_DIR (same layout)."""

import os
from pathlib import Path


def golden_dir() -> Path:
    return Path(os.environ.get("KVLEDGER_GOLDEN_DIR") or Path(__file__).parents[1] / "golden")
