"""Every field report of the groups B to E has a fault on which its tests fail, so none of them tests nothing.

docs/field_reports.md has the table.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.properties.field_mutants import FIELD_MUTANTS
from tests.properties.mutant import ROOT, Mutant
from tests.properties.mutants import MUTANTS

IDS = {"B": 16, "C": 9, "D": 8, "E": 9}
REPORTS = [f"{group}{number:02}" for group, count in IDS.items() for number in range(1, count + 1)]
PAGE = ROOT / "docs" / "field_reports.md"
FAULTS = [mutant for mutant in (*MUTANTS, *FIELD_MUTANTS) if mutant.field_reports]
# Without the plugins that these tests do without, most of a second is saved each time.
OPTIONS = ("-q", "--tb=no", "-rf", "-p", "pytest_timeout", "-o", "addopts=--import-mode=importlib -p no:cacheprovider")


def files_of(report: str) -> list[Path]:
    return sorted((ROOT / "tests" / "field").glob(f"test_{report.lower()}_*.py"))


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_has_tests_of_its_name_and_a_fault_on_which_they_fail(report: str) -> None:
    assert files_of(report)
    assert [mutant for mutant in FAULTS if report in mutant.field_reports]


def test_the_page_names_every_fault_of_every_report() -> None:
    written = dict(re.findall(r"^\| ([B-E]\d\d) \|.*\| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE))
    names = {report: [mutant.name for mutant in FAULTS if report in mutant.field_reports] for report in REPORTS}
    assert written == {report: "; ".join(faults) for report, faults in names.items()}


@pytest.mark.parametrize("mutant", FIELD_MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_a_fault_is_where_it_was(mutant: Mutant) -> None:
    compile(mutant.source(), mutant.file, "exec")


@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_the_reports_of_a_fault_fail_on_it(mutant: Mutant, tmp_path: Path) -> None:
    files = [str(file) for report in mutant.field_reports for file in files_of(report)]
    environment = {**os.environ, "PYTHONPATH": str(mutant.package_in(tmp_path)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *files],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    failed = set(re.findall(r"^FAILED .*/test_([a-e]\d\d)_", done.stdout, flags=re.MULTILINE))
    assert done.returncode == 1, done.stdout + done.stderr
    assert failed == {report.lower() for report in mutant.field_reports}, done.stdout
