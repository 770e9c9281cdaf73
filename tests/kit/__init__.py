"""The property-test kit: point it at a block manager and get the shortest history that breaks it.

`explore` and everything else but `machine_for`, `run_machine` and the strategies works without Hypothesis.
"""

from typing import TYPE_CHECKING, Any

from kvledger.testing.commands import (
    Abort,
    Allocate,
    Append,
    Command,
    Evict,
    Fork,
    Free,
    Gate,
    Match,
    New,
    Preempt,
    ReleaseBlocks,
    ReleaseOutOfWindow,
    Reset,
    Truncate,
)
from kvledger.testing.content_model import ContentModel
from kvledger.testing.differential import Differential
from kvledger.testing.explore import Played, explore, survey
from kvledger.testing.failure import History, KitFailure, load_history
from kvledger.testing.invariants import INVARIANTS, Invariant, InvariantViolation, check, check_log, violations
from kvledger.testing.ledger_adapter import LedgerAdapter, PrefixKeys, ledger_supports, make_ledger
from kvledger.testing.promises import PROMISES, Promise
from kvledger.testing.protocol import (
    CAPABILITIES,
    AllocatorUnderTest,
    FactoryError,
    FoundPrefix,
    Limits,
    NeverFitsError,
    Placement,
    RefusedError,
    Supports,
    capabilities_of,
    supporting,
)
from kvledger.testing.scenario import GroupShape, Scenario
from kvledger.testing.shorten import failure_of, shorten
from kvledger.testing.trial import Trial, play, replay_file
from kvledger.testing.view import AllocatorView, view_of

if TYPE_CHECKING:
    from kvledger.testing.machine import machine_for, run_machine
    from kvledger.testing.strategies import group_sets, histories, prompts, scenarios

_NEEDS_HYPOTHESIS = {
    "machine_for": "machine",
    "run_machine": "machine",
    "group_sets": "strategies",
    "histories": "strategies",
    "prompts": "strategies",
    "scenarios": "strategies",
}

__all__ = [
    "CAPABILITIES",
    "INVARIANTS",
    "PROMISES",
    "Abort",
    "Allocate",
    "AllocatorUnderTest",
    "AllocatorView",
    "Append",
    "Command",
    "ContentModel",
    "Differential",
    "Evict",
    "FactoryError",
    "Fork",
    "FoundPrefix",
    "Free",
    "Gate",
    "GroupShape",
    "History",
    "Invariant",
    "InvariantViolation",
    "KitFailure",
    "LedgerAdapter",
    "Limits",
    "Match",
    "NeverFitsError",
    "New",
    "Placement",
    "Played",
    "Preempt",
    "PrefixKeys",
    "Promise",
    "RefusedError",
    "ReleaseBlocks",
    "ReleaseOutOfWindow",
    "Reset",
    "Scenario",
    "Supports",
    "Trial",
    "Truncate",
    "capabilities_of",
    "check",
    "check_log",
    "explore",
    "failure_of",
    "group_sets",
    "histories",
    "ledger_supports",
    "load_history",
    "machine_for",
    "make_ledger",
    "play",
    "prompts",
    "replay_file",
    "run_machine",
    "scenarios",
    "shorten",
    "supporting",
    "survey",
    "view_of",
    "violations",
]


def __getattr__(name: str) -> Any:
    """Import what needs Hypothesis when it is first asked for."""
    if name in _NEEDS_HYPOTHESIS:
        import importlib

        return getattr(importlib.import_module(f"kvledger.testing.{_NEEDS_HYPOTHESIS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
