"""What a trial knows while it plays: the manager, its view, the requests, and what the last command found."""

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import numpy as np
from kvledger.testing import promises
from kvledger.testing.commands import Command
from kvledger.testing.content_model import ContentModel
from kvledger.testing.failure import History, KitFailure
from kvledger.testing.invariants import InvariantViolation
from kvledger.testing.protocol import (
    FactoryError,
    FoundPrefix,
    Limits,
    ManagerFactory,
    NeverFitsError,
    RefusedError,
    capabilities_of,
    name_of,
    supports_of,
)
from kvledger.testing.scenario import Scenario
from kvledger.testing.view import AllocatorView, snapshot


@attrs.define
class TrialRequest:
    """What the trial knows of a request.

    Attributes:
        tokens: every known token.
        placed: the tokens that have slots, drafts included; empty while it holds nothing.
        is_live: whether it holds blocks.
        slots_asked, states_asked: the most slots asked for since it holds blocks (or was truncated), with and without
            those of drafts to come.
        found: what its last lookup returned, and after how many changes that was.
        lost_a_key: whether a block of it was evicted by id while it held it, or all that could be found was.
        is_loading: whether the content of its external tokens is still to come.
        loads_from: the position of the first of them, until its next tokens are placed; else None.
        junction: where its last lookup could have ended, had full attention been alone, if that is further; else 0.
        num_prompt: tokens that it arrived with; 0 where the manager may see another prompt (a fork, a crop, a
            request that comes again with its outputs).
    """

    name: str
    tokens: list[int]
    placed: list[int] = attrs.field(factory=list[int])
    is_live: bool = False
    slots_asked: int = 0
    states_asked: int = 0
    found: FoundPrefix | None = None
    found_after: int = 0
    lost_a_key: bool = False
    is_loading: bool = False
    loads_from: int | None = None
    junction: int = 0
    num_prompt: int = 0

    @property
    def num_valid(self) -> int:
        """Placed tokens that are known ones: where it goes on."""
        for position, (placed, known) in enumerate(zip(self.placed, self.tokens, strict=False)):
            if placed != known:
                return position
        return min(len(self.placed), len(self.tokens))

    def end(self) -> None:
        """It holds nothing any more."""
        self.placed, self.is_live, self.lost_a_key = [], False, False
        self.slots_asked = self.states_asked = 0
        self.is_loading, self.loads_from, self.junction = False, None, 0
        if len(self.tokens) != self.num_prompt:
            self.num_prompt = 0  # if it comes again, its outputs so far may be part of its prompt


# A request, the position of its first new token, and how many there are.
Step: TypeAlias = tuple[TrialRequest, int, int]


class TrialState:
    """The state of a trial, and how it asks the manager.

    Attributes:
        view: the state after the last command.
        requests: every request that has arrived, by name.
        stopped_by: the name of a waived promise that broke; the rest of the history is not played.
    """

    def __init__(self, make: ManagerFactory, scenario: Scenario, checks_state: bool = True) -> None:
        self.scenario = scenario
        self.supports = supports_of(make)
        self._checks_state = checks_state
        self.factory = name_of(make)
        self.manager, self.view = self._made_by(make)
        self.capabilities = capabilities_of(self.manager)
        self.commands: list[Command] = []
        self.requests: dict[str, TrialRequest] = {}
        self.model = ContentModel(scenario)
        self.num_changes = 0
        self.stopped_by: str | None = None
        self._before: AllocatorView | None = None
        self._num_drafts = 0

    def _made_by(self, make: ManagerFactory) -> tuple[Any, AllocatorView]:
        try:
            manager = make(self.scenario)
            return manager, snapshot(manager.view(), len(self.scenario.groups))
        except Exception as error:
            raise FactoryError(
                f"{self.factory} makes no usable manager from {self.scenario.to_source()}: "
                f"{type(error).__name__}: {error}\n"
                "Say on the factory what it is made for, for example @supporting(Supports(block_sizes=(16,)))."
            ) from error

    def failure(self, violation: InvariantViolation) -> KitFailure:
        """The broken promise with the history that broke it."""
        history = History(self.scenario, tuple(self.commands), violation.name)
        return KitFailure(history, violation, self.factory, self._before, self.view)

    def live(self) -> list[str]:
        """Requests that hold blocks."""
        return [name for name, request in self.requests.items() if request.is_live]

    def _ask(self, action: Callable[[], Any]) -> Any:
        """The manager's answer, with `RefusedError` and `NeverFitsError` as values."""
        try:
            answer = action()
        except (RefusedError, NeverFitsError) as refusal:
            answer = refusal
        except Exception as error:
            self.view = self._view()
            raise promises.NO_CRASH.broken(f"{type(error).__name__}: {error}") from error
        self.view = self._view()
        return answer

    def _ask_for_blocks(self, action: Callable[[], Any]) -> bool | Exception:
        """`_ask`, for commands that answer whether they were carried out."""
        answer = self._ask(action)
        if not isinstance(answer, bool | np.bool_ | Exception):
            raise promises.NO_CRASH.broken(
                f"the answer is {answer!r}, neither True (carried out) nor False (not now, and nothing has changed)"
            )
        return answer if isinstance(answer, Exception) else bool(answer)

    def _view(self) -> AllocatorView:
        try:
            return snapshot(self.manager.view(), len(self.scenario.groups))
        except Exception as error:
            raise promises.NO_CRASH.broken(f"its state cannot be read: {type(error).__name__}: {error}") from error

    def _rebuilt(self) -> tuple[Any, Any]:
        try:
            return self.manager.rebuild()
        except Exception as error:
            raise promises.NO_CRASH.broken(f"its events cannot be folded: {type(error).__name__}: {error}") from error

    def _unchanged(self, promise: promises.Promise = promises.REFUSAL_CHANGES_NOTHING) -> None:
        assert self._before is not None
        difference = promises.first_difference(self._before, self.view)
        promise.require(difference is None, str(difference))

    def _misuse(self, action: Callable[[], Any]) -> None:
        """Refused or ignored, but never carried out."""
        self._ask(action)
        self._unchanged()

    def _earlier(self) -> AllocatorView:
        assert self._before is not None
        return self._before

    def _slots(self, end: int, limits: Limits) -> int:
        return min(end + limits.num_lookahead_tokens, self.scenario.max_model_len)

    def _is_fresh(self, request: TrialRequest) -> bool:
        return request.found is not None and request.found_after == self.num_changes

    def _check_slots(self, request: TrialRequest) -> None:
        for group, shape in enumerate(self.scenario.groups):
            # No state is written for the slots of drafts to come.
            num_slots = request.states_asked if shape.kind == "state" else request.slots_asked
            held, needed = len(self.view.tables[request.name][group]), -(-num_slots // shape.block_size)
            detail = (
                f"request {request.name!r} holds {held} blocks of {shape.block_size} in group {group} for "
                f"{num_slots} slots, which need {needed}"
            )
            promises.SLOTS_EXIST.require(held >= needed, detail)
            promises.NO_WASTE.require(held <= needed, detail)
