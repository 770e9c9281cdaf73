"""`pytest --kvledger-allocator MODULE:FACTORY` runs the kit on someone's manager, in a folder of its own."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

MANAGER = Path(__file__).parents[1] / "properties" / "list_manager.py"
PLUGIN = "kvledger.testing.plugin"
# An install from before the entry point existed does not know the plugin by itself.
IS_INSTALLED = any(entry.value == PLUGIN for entry in importlib.metadata.entry_points(group="pytest11"))


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    named = [] if IS_INSTALLED else ["-p", PLUGIN]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *named, *options]
    if "--kvledger-allocator" in options:
        command += ["--kvledger-shorten-seconds", "1"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mymanager.py").write_text(MANAGER.read_text())
    return tmp_path


def test_a_good_manager_passes(folder: Path) -> None:
    done = run_pytest(folder, "--kvledger-allocator", "mymanager:make", "--kvledger-histories", "25")
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    assert "played 25 random histories" in done.stdout
    assert "not offered, so not played: release_out_of_window, rebuild" in done.stdout
    assert not (folder / "kvledger-regressions").exists()


def test_a_broken_manager_fails_with_the_program_and_is_found_again_from_the_file(folder: Path) -> None:
    source = (folder / "mymanager.py").read_text()
    line = "        self.release_blocks(self.tables.pop(request_id)[::-1])\n"
    assert source.count(line) == 1
    (folder / "mymanager.py").write_text(source.replace(line, line.replace("[::-1]", "[:0:-1]")))
    options = ("--kvledger-allocator", "mymanager:make", "--kvledger-histories", "25")
    done = run_pytest(folder, *options)
    assert done.returncode == 1
    assert "from mymanager import make" in done.stdout
    assert "conservation: held + evictable + clean + null == num_blocks, after every commit." in done.stdout
    assert "Traceback" not in done.stdout
    assert "conservation is broken by" in done.stdout
    assert "Saved as kvledger-regressions/mymanager-make-conservation.json; the next run plays it first." in done.stdout
    assert list((folder / "kvledger-regressions").glob("mymanager-make-conservation.json"))
    again = run_pytest(folder, *options, "-k", "saved")
    assert "1 failed" in again.stdout

    (folder / "mymanager.py").write_text(source)
    assert "1 passed" in run_pytest(folder, *options, "-k", "saved").stdout


def test_a_rival_that_decides_otherwise_is_reported(folder: Path) -> None:
    rival = (folder / "mymanager.py").read_text().replace("*self.free_queue,", "*self.free_queue[::-1],")
    (folder / "rival.py").write_text(rival)
    options = ("--kvledger-rival", "rival:make", "--kvledger-histories", "10", "-k", "random")
    done = run_pytest(folder, "--kvledger-allocator", "mymanager:make", *options)
    assert "same_decisions" in done.stdout


@pytest.mark.parametrize("named", ["mymanager", "mymanager:nothing", "nowhere:make"])
def test_a_factory_that_is_not_there_is_named(folder: Path, named: str) -> None:
    done = run_pytest(folder, "--kvledger-allocator", named)
    assert done.returncode != 0
    assert named in done.stdout + done.stderr


def test_without_the_option_a_run_is_as_before(folder: Path) -> None:
    (folder / "test_mine.py").write_text("def test_mine():\n    pass\n")
    assert "1 passed" in run_pytest(folder).stdout
