"""What stands between a card and its benches: none without one, none of the interpreter, and nothing to install."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the benches need torch")
pytest.importorskip("triton", reason="the benches need triton")

from bench.gpu_card import card_modules  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
OPTIONS = "--import-mode=importlib --strict-markers -p no:cacheprovider"


def test_without_a_card_a_bench_skips_and_says_what_torch_found(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.skip.Exception, match=rf"no CUDA device to measure on \(torch {torch.__version__[:4]}"):
        card_modules()


def test_the_interpreter_is_never_measured(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(pytest.fail.Exception, match="the interpreter would be measured"):
        card_modules()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert [module.__name__ for module in card_modules()] == ["torch", "triton"]


def test_where_the_package_is_not_installed_the_gpu_tests_are_collected_and_its_processes_find_it() -> None:
    # Without `site` no editable install is found, as on a machine that has torch and nothing of this project.
    environment = os.environ | {"PYTHONPATH": sysconfig.get_paths()["purelib"]}
    pytest_here = [sys.executable, "-S", "-m", "pytest", "-q", "-p", "no:kvledger", "-o", f"addopts={OPTIONS}"]
    files = ["tests/backends/cuda/test_gpu_cuda_backend.py", "tests/backends/serving/sampling/test_detokenizer.py"]
    probe = "tests/kernels/test_launch.py::test_nothing_heavy_is_imported_before_it_is_asked_for"
    done = subprocess.run([*pytest_here, *files, probe], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
