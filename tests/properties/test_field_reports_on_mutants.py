"""Every field report about the allocator has a fault on which its tests fail, so none of them tests nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.properties.mutants import CORE, MUTANTS, Mutant

REPORTS = ("B01", "B02", "B03", "B07", "B08", "B09", "B10", "C01", "C02", "C03", "C04", "C05", "C06", "D06")
ROOT = CORE.parent


def mutant_for(report: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if report in mutant.field_reports)


@pytest.mark.parametrize("report", REPORTS)
def test_a_fault_is_named_for(report: str) -> None:
    assert mutant_for(report).name
    assert list((ROOT / "tests" / "field").glob(f"test_{report.lower()}_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("report", REPORTS)
def test_the_tests_of_a_report_fail_on_its_fault(report: str, tmp_path: Path) -> None:
    mutant = mutant_for(report)
    core = tmp_path / "kvledger" / "core"
    shutil.copytree(CORE, core, ignore=shutil.ignore_patterns("__pycache__"))
    path = core / mutant.file
    assert path.read_text().count(mutant.line) == 1
    path.write_text(path.read_text().replace(mutant.line, mutant.wrong))
    files = sorted((ROOT / "tests" / "field").glob(f"test_{report.lower()}_*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *map(str, files)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1, f"{mutant.name!r} breaks nothing:\n{done.stdout}"
