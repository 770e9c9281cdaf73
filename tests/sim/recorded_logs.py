"""The pool of the recorded runs, and logs that are like another one but for some commits."""

from collections.abc import Callable
from pathlib import Path

from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.core.events import Commit

POOL = ["--num-gpu-blocks-override", "40", "--block-size", "512"]
FLUSH = FlushPolicy(every_commits=16)


def rewritten(source: str, target: Path, change: Callable[[Commit], Commit]) -> str:
    """A log like another one but for what `change` makes of its commits, with checksums that match."""
    log = DurableLog.create(target, flush=FLUSH)
    for commit in LogReader(source).commits():
        log.apply(change(commit))
    log.close()
    return str(target)
