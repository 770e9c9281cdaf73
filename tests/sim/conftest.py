"""What tests of the command line share: how to run it, and for `kvledger log` a run that is recorded once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from kvledger.sim.commands.cli import build_app


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations that grow and come back, more than the pool holds."""
    path = tmp_path_factory.mktemp("trace") / "turns.jsonl"
    rows = []
    for i in range(60):
        turns = i // 12 + 1
        rows.append(
            {
                "timestamp": 400 * i,
                "input_length": 512 * turns + 37 * (i % 12) + 1,
                "output_length": 20 + i % 7,
                "hash_ids": [1000 * (i % 12) + t for t in range(turns)] + [100_000 + i],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def record(trace: str) -> Callable[..., dict[str, Any]]:
    """Run `kvledger replay` in-process with a log of the run; returns the JSON that it prints."""
    from tests.sim.recorded_logs import POOL  # needs pyarrow, which most tests here do without

    def run(directory: Path, *arguments: str) -> dict[str, Any]:
        given = [trace, *(arguments or POOL), "--log", str(directory), "--log-flush", "50ms", "--json"]
        command = typer.main.get_command(build_app()).commands["replay"]  # pyright: ignore[reportAttributeAccessIssue]
        printed: list[dict[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvledger.sim.report.console.print_json", printed.append)
            with command.make_context("replay", given) as context:
                command.invoke(context)
        return printed[0]

    return run


@pytest.fixture(scope="session")
def recorded(record: Callable, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """(the log of a run, the report of the run)."""
    directory = tmp_path_factory.mktemp("recorded") / "run.log"
    return str(directory), record(directory)


@pytest.fixture(scope="session")
def kernel_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path that holds the small kernel database, written once."""
    pytest.importorskip("pyarrow")
    from tests.sim.kernel_database import write_database

    folder = tmp_path_factory.mktemp("packages")
    write_database(folder)
    return folder


@pytest.fixture
def kernel_database(kernel_packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small kernel database in place of an installed one."""
    monkeypatch.syspath_prepend(str(kernel_packages))
    return kernel_packages


@pytest.fixture
def no_kernel_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no kernel database is installed."""
    monkeypatch.setattr("kvledger.sim.latency.kernel_tables.PACKAGE", "a_package_that_is_not_there")
