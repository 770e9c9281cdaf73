"""The pytest plugin: `pytest --kvledger-allocator mypkg:make` runs the whole kit on someone's manager."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from kvledger.testing.choices import RandomChooser, choose_scenario
from kvledger.testing.protocol import CAPABILITIES, ManagerFactory, capabilities_of, name_of, supports_of

_SUITE = Path(__file__).with_name("suite.py")
# The name of the properties whose values are shown at the end of a run.
NOTE = "kvledger"
# Histories of a normal run take seconds; those of `--hypothesis-profile=deep` take about an hour.
_HISTORIES, _DEEP_HISTORIES = 200, 100_000


def pytest_addoption(parser: pytest.Parser) -> None:
    """The kit's options."""
    group = parser.getgroup("kvledger", "property tests of KV-cache block managers")
    group.addoption(
        "--kvledger-allocator",
        metavar="MODULE:FACTORY",
        help="run the kvledger kit on the block managers that this factory makes from a kvledger.testing.Scenario",
    )
    group.addoption(
        "--kvledger-rival",
        metavar="MODULE:FACTORY",
        help="a second factory: both managers must make the same decisions",
    )
    group.addoption(
        "--kvledger-histories",
        type=int,
        metavar="N",
        help=f"random histories to play (default {_HISTORIES}; {_DEEP_HISTORIES:,} with --hypothesis-profile=deep)",
    )
    group.addoption(
        "--kvledger-shorten-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds to spend on making a failing history short (default: %(default)s)",
    )
    group.addoption(
        "--kvledger-regressions",
        type=Path,
        default=Path("kvledger-regressions"),
        metavar="DIR",
        help="where failing histories are saved, and played again first (default: %(default)s)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the deep profile before Hypothesis looks for it, and collect the suite where a manager is named."""
    try:
        from hypothesis import settings
    except ImportError:
        pass
    else:
        settings.register_profile("deep", max_examples=5_000, deadline=None)
    if config.getoption("--kvledger-allocator"):
        if config.args_source != pytest.Config.ArgsSource.ARGS:
            config.args.clear()
        config.args.append(str(_SUITE))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was played, and what the manager does not offer, so that it was not."""
    make = _factory(config, "--kvledger-allocator")
    if make is None:
        return
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, ())]
    notes = [value for report in reports for name, value in report.user_properties if name == NOTE]
    terminalreporter.section("kvledger")
    for line in [*notes, *_capability_notes(make)]:
        terminalreporter.write_line(line)


def _capability_notes(make: ManagerFactory) -> list[str]:
    try:
        offered = capabilities_of(make(choose_scenario(RandomChooser(0), supports_of(make))))
    except Exception:  # its test has told why
        return []
    missing = [name for name in CAPABILITIES if name not in offered]
    return [
        f"{name_of(make)} offers {', '.join([name for name in CAPABILITIES if name in offered]) or 'no capability'}",
        f"not offered, so not played: {', '.join(missing) or 'nothing'}",
    ]


def _is_deep(config: pytest.Config) -> bool:
    return config.getoption("--hypothesis-profile", None) == "deep"


def _factory(config: pytest.Config, option: str) -> ManagerFactory | None:
    named = config.getoption(option)
    if not named:
        return None
    module, _, name = named.partition(":")
    if not module or not name:
        raise pytest.UsageError(f"{option} takes MODULE:FACTORY, for example mypkg.testing:make, not {named!r}")
    folder = str(config.invocation_params.dir)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"{option}={named}: {error}") from error


@pytest.fixture(scope="session")
def kvledger_make(request: pytest.FixtureRequest) -> ManagerFactory:
    """The factory of the managers under test."""
    make = _factory(request.config, "--kvledger-allocator")
    if make is None:
        pytest.skip("no manager is named: give --kvledger-allocator MODULE:FACTORY")
    return make


@pytest.fixture(scope="session")
def kvledger_rival(request: pytest.FixtureRequest) -> ManagerFactory | None:
    """The factory of the managers that must decide alike, if one is named."""
    return _factory(request.config, "--kvledger-rival")


@pytest.fixture(scope="session")
def kvledger_histories(request: pytest.FixtureRequest) -> int:
    """How many random histories to play."""
    given = request.config.getoption("--kvledger-histories")
    return given or (_DEEP_HISTORIES if _is_deep(request.config) else _HISTORIES)


@pytest.fixture(scope="session")
def kvledger_shorten_s(request: pytest.FixtureRequest) -> float:
    """Seconds to spend on making a failing history short."""
    return float(str(request.config.getoption("--kvledger-shorten-seconds")))


@pytest.fixture(scope="session")
def kvledger_regressions(request: pytest.FixtureRequest) -> Path:
    """The folder of regression files."""
    return Path(str(request.config.getoption("--kvledger-regressions")))
