"""Histories for the comparison of simulation and memory: the kit's commands, and an engine's steps."""

import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np
from kvledger.core import (
    Commit,
    DoesNotFitError,
    Request,
    Scheduler,
    SchedulerConfig,
)
from kvledger.core.events import BlocksShared, RowsAssigned, RowsReleased, TokensPlaced, as_ints
from kvledger.core.types import ScheduledStep, TokenBatch
from kvledger.testing import Command, KitFailure, LedgerAdapter, PrefixKeys, Scenario, Trial, make_ledger
from kvledger.testing.choices import Chooser, chance, choose_prompt, pick
from kvledger.testing.content_model import Contents
from kvledger.testing.promises import Promise
from kvledger.testing.rules import RULES
from numpy.typing import NDArray

from tests.properties.same_slots import SameSlots, SlotMismatchError, batch_of

MakeWitness = Callable[[Scenario, LedgerAdapter], SameSlots]
MakeTrial = Callable[[Scenario], Trial]

# All bytes are compared after every step; reading back through tables says the same again, and takes longer.
_STEPS_PER_READ = 3

SAME_MEMORY = Promise("same_memory", "Simulated and real memory are the same, slot for slot and byte for byte.")


def ledger_trial(scenario: Scenario) -> Trial:
    """A trial of our allocator that leaves the state to those who follow it."""
    return Trial(make_ledger, scenario, checks_state=False)


class Followed:
    """A trial of our allocator whose commits are followed, each command a step of its own."""

    def __init__(self, scenario: Scenario, make_witness: MakeWitness, make_trial: MakeTrial = ledger_trial) -> None:
        self.trial = make_trial(scenario)
        self.ledger: LedgerAdapter = self.trial.manager
        self.witness = make_witness(scenario, self.ledger)
        self._contents = self.trial.model.contents
        self._request_in: dict[int, str] = {}
        self._followed = 0
        self._follow()

    def do(self, command: Command) -> None:
        """Play one command.

        Raises:
            KitFailure: a promise of the kit, or that simulation and memory are the same, is broken.
        """
        self.trial.do(command)
        try:
            self._follow()
        except SlotMismatchError as mismatch:
            raise self.trial.failure(SAME_MEMORY.broken(str(mismatch))) from None

    def finish(self) -> None:
        """Read everything back, and compare what the device knows of the last commands."""
        try:
            self.witness.step(batch_of([]), np.empty(0, dtype=np.int64), self.ledger.allocator.state)
            self._read_back()
        except SlotMismatchError as mismatch:
            raise self.trial.failure(SAME_MEMORY.broken(str(mismatch))) from None

    def _follow(self) -> None:
        while self._followed < len(self.ledger.log):
            commit = self.ledger.log[self._followed]
            self._followed += 1
            self.witness.apply(commit)
            self._note_rows(commit)
            placed = [event for event in commit.events if isinstance(event, TokensPlaced)]
            if placed:
                # A child of a fork has slots for what its parent has computed.
                is_fork = any(isinstance(event, BlocksShared) for event in commit.events)
                batch = batch_of(placed)
                self.witness.step(batch, self._contents_of(batch), self.ledger.allocator.state, not is_fork)

    def _note_rows(self, commit: Commit) -> None:
        for event in commit.events:
            if isinstance(event, RowsAssigned):
                self._request_in.update(zip(as_ints(event.rows), event.requests, strict=True))
            elif isinstance(event, RowsReleased):
                for row in as_ints(event.rows):
                    del self._request_in[row]

    def _contents_of(self, batch: TokenBatch) -> NDArray[np.int64]:
        numbers: list[int] = []
        for row, first, count in zip(batch.rows.tolist(), batch.first_positions.tolist(), batch.counts.tolist()):  # noqa: B905
            request = self.trial.requests[self._request_in[row]]
            numbers += self._contents.of(request.placed)[first : first + count] if count else []
        return np.array(numbers, dtype=np.int64)

    def _read_back(self) -> None:
        rows = sorted(self._request_in)
        placed = [self.trial.requests[self._request_in[row]].placed for row in rows]
        self.witness.read_back(rows, [np.array(self._contents.of(tokens), dtype=np.int64) for tokens in placed])


# What moves slots is drawn more often than the kit does: a history here is short.
_EMPHASIS = {"truncate": 5, "preempt": 2, "fork_and_diverge": 2}


def play_commands(
    chooser: Chooser,
    scenario: Scenario,
    make_witness: MakeWitness,
    num_rules: int,
    make_trial: MakeTrial = ledger_trial,
) -> SameSlots:
    """A history of the kit's rules, drawn by their weights."""
    followed = Followed(scenario, make_witness, make_trial)
    rules = [rule for rule in RULES if followed.trial.capabilities.issuperset(rule.needs)]
    tickets = [rule for rule in rules for _ in range(rule.weight * _EMPHASIS.get(rule.name, 1))]
    for _ in range(num_rules):
        pick(chooser, tickets).act(followed.trial, chooser, followed.do)
    followed.finish()
    return followed.witness


@attrs.define(eq=False)
class _Served:
    """A request of an engine: its tokens, the ones still to come included."""

    request: Request
    tokens: list[int]


class FollowedEngine:
    """A scheduler whose steps are followed: many commits a step, preemption, chunked prefill, rejected drafts."""

    def __init__(self, chooser: Chooser, scenario: Scenario, make_witness: MakeWitness) -> None:
        self._chooser, self.scenario = chooser, scenario
        self.ledger = LedgerAdapter(scenario)
        self.scheduler = Scheduler(self._limits(chooser), self.ledger.allocator)
        self.witness = make_witness(scenario, self.ledger)
        self._contents = Contents()
        self._served: dict[str, _Served] = {}
        self._num_drafts = 0
        self._num_requests = 0
        self._num_steps = 0
        self._followed = 0
        self._apply_commits()

    def _limits(self, chooser: Chooser) -> SchedulerConfig:
        drafts = chooser.integer(1, 3) if chance(chooser, 4) else 0
        seqs = min(self.scenario.max_num_reqs, chooser.integer(2, 8))
        tokens = seqs * (1 + drafts) + chooser.integer(0, 60)
        return SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            num_speculative_tokens=drafts,
            reserve_full_sequence=not chance(chooser, 2),
        )

    def submit(self) -> None:
        """A request arrives; what can never fit is refused."""
        runs = choose_prompt(self._chooser, self.scenario)
        prompt = [token for token, count in runs for _ in range(count)]
        room = self.scenario.max_model_len - len(prompt)
        if room < 1:
            return
        output = self._chooser.integer(1, min(room, 12))
        # Outputs follow from the prompt, so that equal requests go on being equal.
        tokens = [*prompt, *[(len(prompt) + i) % 3 for i in range(output)]]
        keys = PrefixKeys(prompt, self.ledger.allocator.config.hash_block_size)
        name = f"r{self._num_requests}"
        self._num_requests += 1
        request = Request(name, len(prompt), max_tokens=output, keys=keys)
        try:
            self.scheduler.submit(request)
        except DoesNotFitError:
            return
        self._served[name] = _Served(request, tokens)

    def step(self) -> None:
        """One engine step, if there is anything to do.

        Raises:
            SlotMismatchError: simulation and memory differ.
        """
        step = self.scheduler.schedule()
        self._apply_commits()
        if step is None:
            return
        requests = [self.scheduler.request_in(row) for row in step.batch.rows.tolist()]
        accepted = self._accepted(step)
        self.witness.step(step.batch, self._contents_of(step.batch, requests, accepted), self.ledger.allocator.state)
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_READ == 0:
            self._read_back(step.batch, requests)
        given = None if step.num_draft_tokens is None else np.array(accepted, dtype=np.int64)
        self.scheduler.complete(step, (), given)
        self._apply_commits()
        for request in requests:
            served = self._served[request.request_id]
            assert isinstance(request.keys, PrefixKeys)
            request.keys.tokens = served.tokens[: request.num_tokens]

    def _accepted(self, step: ScheduledStep) -> list[int]:
        if step.num_draft_tokens is None:
            return [0] * len(step.batch.rows)
        return [self._chooser.integer(0, count) for count in step.num_draft_tokens.tolist()]

    def _contents_of(
        self, batch: TokenBatch, requests: Sequence[Request], accepted: Sequence[int]
    ) -> NDArray[np.int64]:
        numbers: list[int] = []
        ends = batch.first_positions + batch.counts
        for request, first, end, right in zip(
            requests, batch.first_positions.tolist(), ends.tolist(), accepted, strict=True
        ):
            tokens = self._served[request.request_id].tokens[: request.num_tokens + right][:end]
            while len(tokens) < end:
                self._num_drafts += 1
                tokens.append(1_000 + self._num_drafts)
            numbers += self._contents.of(tokens)[first:end]
        return np.array(numbers, dtype=np.int64)

    def _read_back(self, batch: TokenBatch, requests: Sequence[Request]) -> None:
        """What the requests of this step have computed, but for drafts."""
        ends = (batch.first_positions + batch.counts).tolist()
        known = [
            self._served[request.request_id].tokens[: min(end, request.num_tokens)]
            for request, end in zip(requests, ends, strict=True)
        ]
        contents = [np.array(self._contents.of(tokens), dtype=np.int64) for tokens in known]
        self.witness.read_back(batch.rows.tolist(), contents)

    def _apply_commits(self) -> None:
        while self._followed < len(self.ledger.log):
            self.witness.apply(self.ledger.log[self._followed])
            self._followed += 1


def play_engine(chooser: Chooser, scenario: Scenario, make_witness: MakeWitness, num_moves: int) -> SameSlots:
    """Arrivals, steps and aborts, then steps until everything has ended."""
    engine = FollowedEngine(chooser, scenario, make_witness)
    for _ in range(num_moves):
        move = chooser.integer(0, 9)
        if move < 4:
            engine.submit()
        elif move < 9:
            engine.step()
        else:
            running = [engine.scheduler.request_in(row) for row in engine.scheduler._running.rows.tolist()]
            if running:
                engine.scheduler.abort(pick(chooser, running).request_id)
    return engine.witness


def shortened(failure: KitFailure, make_witness: MakeWitness, budget_s: float) -> KitFailure:
    """The same failure with as many commands left out as `budget_s` seconds allow trying."""
    best, deadline = failure, time.monotonic() + budget_s
    size = len(best.history.commands) // 2
    while size and time.monotonic() < deadline:
        stop = len(best.history.commands)
        while stop > 0 and time.monotonic() < deadline:
            commands = best.history.commands
            start = max(stop - size, 0)
            found = _failure_of(best.history.scenario, (*commands[:start], *commands[stop:]), make_witness)
            best, stop = found or best, start
        size //= 2
    return best


def _failure_of(scenario: Scenario, commands: Sequence[Command], make_witness: MakeWitness) -> KitFailure | None:
    try:
        followed = Followed(scenario, make_witness)
        for command in commands:
            followed.do(command)
        followed.finish()
    except KitFailure as failure:
        return failure if failure.violation.name == SAME_MEMORY.name else None
    except (LookupError, ValueError, TypeError):
        return None  # it names a request that never arrived
    return None
