"""Lets the tests run where nothing is installed (`make gpu`), and in the background of a shell."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

BARE = Path(__file__).parent / "tests" / "bare"


def make_importable() -> None:
    """Make `kvledger` importable from the checkout, here and in what tests start, unless it is installed."""
    if importlib.util.find_spec("kvledger") is not None:
        return
    sys.path.insert(0, str(BARE))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(BARE) if not others else os.pathsep.join([str(BARE), others])


# The conftests of folders import the package when they are loaded, which is before any hook is called.
make_importable()


def pytest_configure() -> None:
    """Heed interrupts.

    A shell lets its background jobs ignore interrupts, and what they start inherits that: the commands that tests
    interrupt would not notice.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how many recorded operations and events the parity tests compared."""
    for name in ("ops_compared", "events_compared"):
        passed = terminalreporter.stats.get("passed", ())
        counts = [value for report in passed for key, value in report.user_properties if key == name]
        if counts:
            what = name.replace("_", " ")
            terminalreporter.write_line(f"golden: {sum(counts):,} {what} in {len(counts)} recorded runs")
