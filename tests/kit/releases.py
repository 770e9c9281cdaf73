"""Commands that give something back, and what must have come back: blocks, slots, keys."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from kvledger.testing import promises
from kvledger.testing.commands import Evict, ReleaseOutOfWindow, Reset, Truncate
from kvledger.testing.lookups import Lookups
from kvledger.testing.view import AllocatorView


class Releases(Lookups):
    """A trial's judgement of what is freed, preempted, truncated, released, evicted and reset."""

    def _release_out_of_window(self, command: ReleaseOutOfWindow) -> None:
        request = self.requests[command.request]
        computed = request.num_valid
        if not request.is_live:
            self._misuse(lambda: self.manager.release_out_of_window(request.name, computed))
            return
        answer = self._ask(lambda: self.manager.release_out_of_window(request.name, computed))
        promises.JUSTIFIED_REFUSAL.require(not isinstance(answer, Exception), f"refused a release: {answer}")
        self.num_changes += 1
        self._check_tail_goes_first(request.name)
        promises.check_out_of_window(self.scenario, request.name, computed, self.view)
        promises.check_tables_only_grow(self._earlier(), self.view, None)
        promises.check_keys_stay(self._earlier(), self.view, set())

    def _truncate(self, command: Truncate) -> None:
        request, num_tokens = self.requests[command.request], command.num_tokens
        if not request.is_live or num_tokens > len(request.placed):
            self._misuse(lambda: self.manager.truncate(request.name, num_tokens))
            return
        answer = self._ask(lambda: self.manager.truncate(request.name, num_tokens))
        if isinstance(answer, Exception):
            self._unchanged()
            promises.JUSTIFIED_REFUSAL.require(self._has_lost(request, num_tokens), f"refused a truncation: {answer}")
            return
        self.num_changes += 1
        request.placed = request.placed[:num_tokens]
        request.slots_asked = request.states_asked = num_tokens
        if command.forget:
            request.tokens = request.tokens[: max(num_tokens, 1)]
            request.found, request.num_prompt, request.junction = None, 0, 0
        self._check_tail_goes_first(request.name)
        self._check_slots(request)
        promises.check_tables_only_grow(self._earlier(), self.view, request.name)
        promises.check_keys_stay(self._earlier(), self.view, set())

    def _end(self, name: str, action: Callable[[str], Any]) -> None:
        request = self.requests[name]
        if not request.is_live:
            self._misuse(lambda: action(name))
            return
        answer = self._ask(lambda: action(name))
        promises.JUSTIFIED_REFUSAL.require(not isinstance(answer, Exception), f"refused an end: {answer}")
        self.num_changes += 1
        request.end()
        promises.EVERYTHING_COMES_BACK.require(
            name not in self.view.tables, f"request {name!r} has ended and holds {self.view.tables.get(name)}"
        )
        self._check_tail_goes_first(name)
        if self._queues_tail_first():
            deferred = self.scenario.release == "deferred"
            promises.check_groups_go_in_order(self._earlier(), self.view, name, deferred)
        promises.check_tables_only_grow(self._earlier(), self.view, None)
        promises.check_keys_stay(self._earlier(), self.view, set())

    def _queues_tail_first(self) -> bool:
        return {"ordered", "tail_first"} <= self.supports.options and self.scenario.eviction == "lru"

    def _check_tail_goes_first(self, name: str) -> None:
        if self._queues_tail_first():
            promises.check_tail_goes_first(self._earlier(), self.view, name)

    def _evict(self, command: Evict) -> None:
        if any(not 0 <= block < self.scenario.num_blocks for block in command.blocks):
            self._misuse(lambda: self.manager.evict(command.blocks))
            return
        answer = self._ask(lambda: self.manager.evict(command.blocks))
        promises.JUSTIFIED_REFUSAL.require(not isinstance(answer, Exception), f"refused an eviction: {answer}")
        self.num_changes += 1
        before, keyed = self._earlier(), self.view.keyed
        if keyed is None or before.keyed is None:
            return
        lost = set(before.keyed) - set(keyed)
        for request in self.requests.values():
            tables = self.view.tables.get(request.name, ())
            # Where nothing at all can be found any more, all content may be outdated.
            request.lost_a_key |= (bool(lost) and not keyed) or any(not lost.isdisjoint(table) for table in tables)
        still = [block for block in command.blocks if block in keyed]
        promises.EVICTION_IS_EXACT.require(not still, f"blocks {still} can still be found")
        more = lost.difference(command.blocks)
        reachable = sorted(more & self._reachable_without(before, command.blocks)) if more else ()
        promises.EVICTION_IS_EXACT.require(not reachable, f"blocks {reachable} can no longer be found either")
        if self._checks_orphans():
            already = set(self.model.unreachable(before))
            orphans = sorted(set(self.model.unreachable(self.view)) - already)
            promises.NO_ORPHANS.require(
                not orphans, f"block {orphans[0][0] if orphans else ''} is findable behind an evicted one"
            )

    def _reachable_without(self, before: AllocatorView, evicted: Sequence[int]) -> set[int]:
        """Blocks that were findable and stay so without the evicted ones: all others, if orphans are to be kept."""
        keyed = {block: key for block, key in (before.keyed or {}).items() if block not in evicted}
        while self._drops_orphans():
            orphans = {block for block, _ in self.model.unreachable(attrs.evolve(before, keyed=keyed))}
            if not orphans:
                break
            keyed = {block: key for block, key in keyed.items() if block not in orphans}
        return set(keyed)

    def _reset(self, command: Reset) -> None:
        in_use = bool(self.view.uses.any())
        answer = self._ask(self.manager.reset)
        if in_use:
            self._unchanged()
            promises.RESET_FORGETS.require(isinstance(answer, Exception), "a reset was ignored silently")
            return
        promises.RESET_FORGETS.require(
            not isinstance(answer, Exception) and not self.view.keyed, f"an idle pool was not reset: {answer}"
        )
        self.num_changes += 1

    def _drops_orphans(self) -> bool:
        """Whether what an eviction strands is to go as well: where the manager has no choice, or is told to."""
        return "drop_orphans" not in self.supports.options or self.scenario.orphans == "drop"

    def _checks_orphans(self) -> bool:
        """Managers that can drop orphans are not told off for keeping them when the scenario says so."""
        return self._drops_orphans() and promises.NO_ORPHANS.name not in self.supports.waived
