"""What holds for all tests: without a GPU, Triton interprets its kernels; and how to run the command line."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

try:
    from hypothesis import settings
except ImportError:  # where only the kernels are tested
    pass
else:  # a test that takes longer beside others is no fault; --hypothesis-profile comes after this one
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")

# Of NVIDIA's driver, of AMD's, and of Windows' under Linux.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def pytest_configure() -> None:
    """Choose Triton's mode before anything imports it, which fixes it for the process (model libraries do)."""
    if not any(Path(path).exists() for path in GPU_DEVICES):
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def kvledger(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run the command line; return (exit code, standard output, standard error)."""

    from kvledger.sim.commands.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvledger", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run
