"""Plays a history on a manager, command by command, and checks every promise after each. Needs no Hypothesis.

    trial = Trial(make_ledger, Scenario(num_blocks=5))
    trial.do(New("a", ((0, 9),)))
    trial.do(Allocate("a", 9))
    trial.finish()

The trial knows the tokens of every request and what each slot must hold; it asks the manager for nothing but its view.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvledger.testing import promises
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
from kvledger.testing.failure import History, load_history
from kvledger.testing.invariants import INVARIANTS, InvariantViolation
from kvledger.testing.protocol import (
    FoundPrefix,
    Limits,
    ManagerFactory,
    Placement,
)
from kvledger.testing.releases import Releases
from kvledger.testing.scenario import Scenario
from kvledger.testing.trial_state import Step, TrialRequest
from kvledger.testing.view import AllocatorView

# Tokens of the kit's own: drafts, and the request that fills the pool at the end.
_FIRST_DRAFT_TOKEN = 1_000
_LAST_REQUEST_TOKEN = 999


class Trial(Releases):
    """One history on one manager. What it knows is `TrialState`; `Refusals`, `Lookups` and `Releases` judge answers."""

    def __init__(self, make: ManagerFactory, scenario: Scenario, checks_state: bool = True) -> None:
        super().__init__(make, scenario, checks_state)
        self._play: dict[type[Any], Callable[[Any], None]] = {
            New: self._new,
            Match: self._match,
            Gate: self._gate,
            Allocate: self._allocate,
            Append: self._append,
            ReleaseOutOfWindow: self._release_out_of_window,
            Truncate: self._truncate,
            Fork: self._fork,
            Free: lambda command: self._end(command.request, self.manager.free),
            Preempt: lambda command: self._end(command.request, self.manager.preempt),
            Abort: lambda command: self._end(command.request, self.manager.abort),
            Evict: self._evict,
            Reset: self._reset,
            ReleaseBlocks: lambda command: self._misuse(lambda: self.manager.release_blocks(command.blocks)),
        }

    # -- playing -----------------------------------------------------------------------------------------------------

    def do(self, command: Command) -> None:
        """Play one command and check everything.

        Raises:
            KitFailure: a promise is broken.
        """
        if self.stopped_by is not None:
            return
        self.commands.append(command)
        self._before = self.view
        self._finish_loads(command)
        try:
            self._play[type(command)](command)
            if self._checks_state:
                self._check_state()
        except InvariantViolation as violation:
            if violation.name not in self.supports.waived:
                raise self.failure(violation) from None
            self.stopped_by = violation.name

    def finish(self) -> None:
        """End every request, and see that the pool serves the longest request that fits."""
        for request in list(self.requests.values()):
            if request.is_live:
                self.do(Free(request.name))
        longest = self._longest_request()
        if longest:
            last = "the longest request"
            self.do(New(last, ((_LAST_REQUEST_TOKEN, longest),)))
            self.do(Allocate(last, longest))
            if not self.stopped_by and not self.requests[last].is_live:
                raise self.failure(promises.PROGRESS.broken(f"{longest} tokens find no place in an idle pool"))

    def _longest_request(self) -> int:
        """Tokens of the longest request that an idle pool can hold, all at once."""
        usable = self.scenario.num_usable_blocks
        for num_tokens in range(self.scenario.max_model_len, 0, -1):
            if sum([-(-num_tokens // group.block_size) for group in self.scenario.groups]) <= usable:
                return num_tokens
        return 0

    def _new(self, command: New) -> None:
        tokens = [token for token, count in command.prompt for _ in range(count)]
        self.requests[command.request] = TrialRequest(command.request, tokens, num_prompt=len(tokens))

    # -- commands that place -----------------------------------------------------------------------------------------

    def _allocate(self, command: Allocate) -> None:
        request = self.requests[command.request]
        found = request.found if command.adopt else None
        start = max(request.num_valid - command.back, 0) if request.is_live else 0
        hit = found.num_hit_tokens if found else 0
        external = 0 if request.is_live else max(min(command.external, len(request.tokens) - 1 - hit), 0)
        new = min(command.num_new_tokens, self.scenario.max_model_len - start - hit - external)
        if new < 1 and not (external and command.num_new_tokens == 0):
            return
        placement = Placement(request.name, list(request.tokens), start, new, external)
        watermark = self.scenario.watermark_blocks if command.use_watermark else 0
        limits = Limits(command.lookahead, command.reserved, command.use_watermark)
        answer = self._ask_for_blocks(lambda: self.manager.allocate(placement, found, limits))
        if answer is True:
            self._placed([(request, start + hit, external + new)], limits, found, start + hit + external)
            promises.check_headroom(self._earlier(), self.view, command.reserved, watermark)
            if hit or external:  # what is adopted and copied in is as much as the first computed token needs
                promises.check_out_of_window(self.scenario, request.name, start + hit + external, self.view)
            return
        steps = [(request, start + hit, external + new)]
        self._check_refusal(answer, steps, limits, command.reserved + watermark, found)

    def _append(self, command: Append) -> None:
        chosen = [self.requests[name] for name in command.requests]
        if "append" in self.capabilities:
            self._decode_step(chosen, command, self.manager.append)
            return
        for request in chosen:  # one by one, each a command of its own
            self._before = self.view
            self._decode_step([request], command, lambda placed, limits: self.manager.allocate(placed[0], None, limits))

    def _decode_step(
        self, chosen: Sequence[TrialRequest], command: Append, action: Callable[[list[Placement], Limits], Any]
    ) -> None:
        limits = Limits(command.lookahead, command.reserved)
        steps: list[Step] = []
        for number, request in enumerate(chosen):
            self._sample(request, command, number)
            start, new = self._next_tokens(request, command.drafts)
            if new > 0 or not request.is_live:
                steps.append((request, start, max(new, 1)))
        if not steps or ("append" not in self.capabilities and not steps[0][0].is_live):
            return
        placements = [Placement(request.name, list(request.tokens), start, new) for request, start, new in steps]
        answer = self._ask_for_blocks(lambda: action(placements, limits))
        if answer is True:
            self._placed(steps, limits, None)
            promises.check_headroom(self._earlier(), self.view, command.reserved, 0)
            return
        self._check_refusal(answer, steps, limits, command.reserved, None)

    def _sample(self, request: TrialRequest, command: Append, number: int) -> None:
        """Once all known tokens are computed, the step before has produced another, and judged the drafts."""
        known = len(request.tokens)
        if request.is_live and request.num_valid == known < self.scenario.max_model_len:
            accepted = request.placed[known : known + command.accepted]
            request.tokens += [*accepted, command.output + number][: self.scenario.max_model_len - known]

    def _next_tokens(self, request: TrialRequest, drafts: int) -> tuple[int, int]:
        start = request.num_valid
        return start, min(len(request.tokens) - start + drafts, self.scenario.max_model_len - start)

    def _placed(
        self,
        steps: Sequence[Step],
        limits: Limits,
        found: FoundPrefix | None,
        computed_from: int | None = None,
    ) -> None:
        """Blocks were given: write the new tokens where the tables say, then read as the next tokens would."""
        before = self._earlier()
        self.num_changes += 1
        self.model.copy_on_write(before, self.view)
        promises.check_tables_only_grow(before, self.view, None)
        if found is None or found.blocks is not None:
            adopted = found.blocks or () if found else ()
            promises.check_taken_once(before, self.view, adopted)
            if "ordered" in self.supports.options:
                promises.check_taken_from_the_head(before, self.view, adopted)
        promises.check_keys_stay(before, self.view, self._overwritten(before, steps))
        for request, total, new in steps:
            # Tokens before `total` are the request's own, or adopted: the same tokens in either case.
            valid = request.placed[:total] if request.is_live else request.tokens[:total]
            request.placed = [*valid, *[self._token_at(request, position) for position in range(total, total + new)]]
            request.is_live = True
            request.slots_asked = max(request.slots_asked, self._slots(total + new, limits))
            request.states_asked = max(request.states_asked, total + new)
            self._check_slots(request)
            problem = self.model.write(request.name, request.placed, total, self.view, computed_from)
            promises.SLOTS_EXIST.require(problem is None, str(problem))
        if computed_from is not None and computed_from == len(steps[0][0].placed):
            self._load_later(*steps[0])
            return
        for request, total, _ in steps:
            first = total if computed_from is None else computed_from
            problem = self.model.misread(request.name, request.placed, first, self.view)
            promises.OWN_CONTENT.require(problem is None, str(problem))
            promises.check_writes_are_private(self.scenario, request.name, total, len(request.placed), self.view)
            self._check_registered(before, request, total if request.loads_from is None else request.loads_from)
            request.loads_from = None
            if total < request.num_prompt <= request.num_valid:
                boundary = (request.num_prompt - 1) // self.scenario.alignment * self.scenario.alignment
                self._check_found_again(request, total, boundary, promises.PROMPTS_ARE_FOUND_AGAIN)
            if total < request.junction <= request.num_valid:
                self._check_found_again(request, total, request.junction, promises.JUNCTIONS_ARE_FOUND_AGAIN)

    def _load_later(self, request: TrialRequest, start: int, num_tokens: int) -> None:
        """What was placed is to be copied in before the request's next command, and nobody may find it before."""
        request.is_loading, request.loads_from = True, start
        self.model.expect(request.name, start, start + num_tokens, self.view)
        promises.check_writes_are_private(self.scenario, request.name, start, start + num_tokens, self.view)

    def _finish_loads(self, command: Command) -> None:
        """The content that the command's requests wait for is there."""
        named = [getattr(command, field, None) for field in ("request", "parent")]
        for name in [*named, *getattr(command, "requests", ())]:
            request = self.requests.get(name) if name else None
            if request is not None and request.is_loading:
                start, stop = request.loads_from or 0, len(request.placed)
                self.model.write(request.name, request.placed, start, self.view, computed_from=stop)
                request.is_loading = False

    def _token_at(self, request: TrialRequest, position: int) -> int:
        if position < len(request.tokens):
            return request.tokens[position]
        self._num_drafts += 1
        return _FIRST_DRAFT_TOKEN + self._num_drafts

    def _overwritten(self, before: AllocatorView, steps: Sequence[Step]) -> set[int]:
        """Blocks that the new tokens are written into, or that lie behind them after going back."""
        return {
            block
            for request, total, _ in steps
            for shape, table in zip(self.scenario.groups, before.tables.get(request.name, ()), strict=False)
            for block in table[total // shape.block_size :]
        }

    def _check_registered(self, before: AllocatorView, request: TrialRequest, total: int) -> None:
        keyed, was_keyed = self.view.keyed, before.keyed
        if keyed is None or was_keyed is None or not self.scenario.enable_caching:
            return
        known = min(len(request.placed), len(request.tokens))
        sure = known // self.scenario.alignment * self.scenario.alignment
        for group, shape in enumerate(self.scenario.groups):
            size, table = shape.block_size, self.view.tables[request.name][group]
            for index in range(total // size, len(table)):
                # The end of a prompt inside a block may be findable too: its key covers the tokens before.
                end = self.view.end_of_key(table[index], (index + 1) * size)
                is_known = end <= len(request.tokens)
                promises.DRAFTS_ARE_NOT_FOUND.require(
                    is_known or keyed.get(table[index]) in (None, was_keyed.get(table[index])),
                    f"block {table[index]}, at {index} of request {request.name!r}, can be found; "
                    f"{len(request.tokens)} tokens are known",
                )
                if shape.attends_to_all and (index + 1) * size <= sure and not request.lost_a_key:
                    promises.COMPLETE_BLOCKS_ARE_FOUND.require(
                        self.model.find(request.tokens[: (index + 1) * size], group, self.view),
                        f"block {table[index]}, at {index} of request {request.name!r}, cannot be found",
                    )
        if self._checks_orphans():
            new = {(block, group) for block, (group, _) in keyed.items() if block not in was_keyed}
            orphans = sorted(new.intersection(self.model.unreachable(self.view)))
            promises.NO_ORPHANS.require(
                not orphans, f"block {orphans[0][0] if orphans else ''} became findable behind one that is not"
            )

    def _check_found_again(self, request: TrialRequest, start: int, boundary: int, promise: promises.Promise) -> None:
        """That what the token at an aligned boundary attends to can be found, as far as the request holds it.

        Of states that is so where this step or the one before it ended.
        """
        if self.view.keyed is None or not self.scenario.enable_caching or self.scenario.use_eagle or request.lost_a_key:
            return
        for group, shape in enumerate(self.scenario.groups):
            size, table = shape.block_size, self.view.tables[request.name][group]
            if shape.kind == "state" and boundary not in (start, request.num_valid):
                continue
            for index in range(shape.attends_from(boundary) // size, boundary // size):
                promise.require(
                    table[index] == self.view.null_block
                    or self.model.find(request.tokens[: (index + 1) * size], group, self.view),
                    f"block {table[index]}, at {index} of request {request.name!r} in group {group} ({shape.kind}), "
                    f"cannot be found; what the token at {boundary} attends to should be",
                )

    # -- forks -------------------------------------------------------------------------------------------------------

    def _fork(self, command: Fork) -> None:
        parent, child = self.requests[command.parent], self.requests.get(command.child)
        action = lambda: self.manager.fork(parent.name, command.child, list(parent.tokens))  # noqa: E731
        if not parent.is_live or (child and child.is_live):
            self._misuse(action)
            return
        answer = self._ask(action)
        if isinstance(answer, Exception):
            self._unchanged()
            promises.JUSTIFIED_REFUSAL.require(
                len(self.live()) >= self.scenario.max_num_reqs, f"refused a fork: {answer}"
            )
            return
        self.num_changes += 1
        born = TrialRequest(command.child, list(parent.tokens), list(parent.placed), is_live=True)
        born.slots_asked = born.states_asked = len(born.placed)
        born.lost_a_key = parent.lost_a_key
        self.requests[command.child] = born
        self.model.copy_at_fork(parent.name, born.name, self.view)
        self._check_slots(born)
        promises.check_tables_only_grow(self._earlier(), self.view, None)
        promises.check_keys_stay(self._earlier(), self.view, set())

    # -- after every command -----------------------------------------------------------------------------------------

    def _check_state(self) -> None:
        for invariant in INVARIANTS:
            violation = invariant.violation(self.view)
            if violation is not None:
                raise violation
        for request in self.requests.values():
            if request.is_live and not request.is_loading:
                valid = request.num_valid
                problem = self.model.misread(request.name, request.placed[:valid], valid, self.view)
                promises.OWN_CONTENT.require(problem is None, str(problem))
        self._check_keys()
        if "rebuild" in self.capabilities:
            live, rebuilt = self._rebuilt()
            if live != rebuilt:
                parts = [part for part in live if live[part] != rebuilt.get(part)]
                detail = "; ".join([f"{part}: {live[part]} live, {rebuilt.get(part)} rebuilt" for part in parts])
                raise promises.EVENTS_REBUILD_STATE.broken(detail)

    def _check_keys(self) -> None:
        keyed, prefix_of = self.view.keyed, self.view.key_prefix
        if keyed is None or prefix_of is None:
            return
        for block, (group, key) in keyed.items():
            promises.KEYS_TELL_THE_TRUTH.require(
                self.model.block_holds(block, group, prefix_of(key)),
                f"block {block} is findable under {len(prefix_of(key))} tokens that it does not hold",
            )


def play(make: ManagerFactory, history: History, finish: bool = True) -> Trial:
    """Play a whole history; `finish` also ends every request at the end.

    Raises:
        KitFailure: a promise is broken.
    """
    trial = Trial(make, history.scenario)
    for command in history.commands:
        trial.do(command)
    if finish:
        trial.finish()
    return trial


def replay_file(path: Path, make: ManagerFactory) -> Trial:
    """Play a regression file on a manager. Needs no Hypothesis.

    Raises:
        KitFailure: the promise is (still) broken.
    """
    return play(make, load_history(path), finish=False)
