"""Whether a refusal has a reason that the trial can see: what fits and breaks no rule must be carried out."""

from collections.abc import Sequence
from typing import Any

from kvledger.testing import promises
from kvledger.testing.commands import Allocate, Append
from kvledger.testing.protocol import FoundPrefix, Limits, NeverFitsError, RefusedError
from kvledger.testing.trial_state import Step, TrialRequest, TrialState


class Refusals(TrialState):
    """A trial's judgement of what a manager does not carry out."""

    def _blocks_needed(self, request: TrialRequest, end: int, num_slots: int, found: FoundPrefix | None) -> int:
        """Blocks that must be free at most: the missing ones, and hit blocks that leave the free queue."""
        free = set(self._earlier().free.tolist())
        tables = self._earlier().tables.get(request.name, [[] for _ in self.scenario.groups])
        needed = 0
        for group, shape in enumerate(self.scenario.groups):
            num_hits = found.num_hit_tokens // shape.block_size if found else 0
            # External tokens bring a state of their own, in another block than the one that the step leaves.
            brought = isinstance(self.commands[-1], Allocate) and self.commands[-1].external > 0
            first = 0 if brought else shape.first_taken(min(end, len(request.tokens)))
            wanted = -(-(end if shape.kind == "state" else num_slots) // shape.block_size)
            needed += max(wanted - max(len(tables[group]) + num_hits, first), 0)
            if found is not None:
                needed += num_hits if found.blocks is None else sum([block in free for block in found.blocks[group]])
        return needed

    def _blocks_needed_to_admit(self, request: TrialRequest, num_tokens: int, found: FoundPrefix | None) -> int:
        """Blocks that a whole sequence needs now, exactly; what its first new token does not attend to takes none."""
        free = set(self.view.free.tolist())
        tables = self.view.tables.get(request.name)
        needed = 0
        for group, shape in enumerate(self.scenario.groups):
            wanted = -(-num_tokens // shape.block_size)
            if tables is not None:
                needed += max(wanted - max(len(tables[group]), shape.first_taken(num_tokens)), 0)
                continue
            hits = found.blocks[group] if found and found.blocks else ()
            skipped = shape.attends_from(found.num_hit_tokens if found else 0) // shape.block_size
            needed += max(wanted - max(skipped, len(hits), shape.first_taken(num_tokens)), 0)
            needed += sum([block in free for block in hits[skipped:]])
        return needed

    def _copies_needed(self, request: TrialRequest, start: int, num_slots: int) -> int:
        """Blocks that the new tokens would be written into although others read them."""
        uses, tables = self._earlier().uses, self._earlier().tables.get(request.name, ())
        return sum(
            [
                int(uses[block]) > 1 and block != self._earlier().null_block
                for shape, table in zip(self.scenario.groups, tables, strict=False)
                for block in table[start // shape.block_size : -(-num_slots // shape.block_size)]
            ]
        )

    def _check_refusal(
        self, answer: Any, steps: Sequence[Step], limits: Limits, kept_free: int, found: FoundPrefix | None
    ) -> None:
        """Whether there is a reason for a refusal that the trial can see."""
        self._unchanged()
        needed = copies = 0
        for request, total, new in steps:
            num_slots = self._slots(total + new, limits)
            needed += self._blocks_needed(request, total + new, num_slots, found)
            copies += self._copies_needed(request, total, num_slots)
        if isinstance(answer, RefusedError):
            promises.JUSTIFIED_REFUSAL.require(
                self._breaks_a_rule(steps, found), f"refused, though no rule is broken: {answer}"
            )
        elif isinstance(answer, NeverFitsError):
            in_all = needed + sum([self._num_held(request) for request, *_ in steps])
            promises.JUSTIFIED_REFUSAL.require(
                in_all > self.scenario.num_usable_blocks,
                f"refused for good, though {in_all} blocks in all fit into {self.scenario.num_usable_blocks}: {answer}",
            )
        else:
            free = len(self._earlier().free)
            in_all = needed + sum([self._num_held(request) for request, *_ in steps])
            promises.REFUSED_FOR_GOOD.require(
                not isinstance(self.commands[-1], Allocate)
                or self.commands[-1].external > 0  # a windowed group needs no blocks for what it skips
                or "refuses_for_good" not in self.supports.options
                or in_all <= self.scenario.num_usable_blocks,
                f"told to wait, though it needs {in_all} blocks in all of {self.scenario.num_usable_blocks}",
            )
            promises.JUSTIFIED_REFUSAL.require(
                needed + copies > free - kept_free,
                f"not carried out, though {needed + copies} blocks are needed, {free} are free and {kept_free} of them "
                "must stay free",
            )

    def _breaks_a_rule(self, steps: Sequence[Step], found: FoundPrefix | None) -> bool:
        request = steps[0][0]
        names = [step[0].name for step in steps]
        is_append = isinstance(self.commands[-1], Append)
        return (
            len(set(names)) < len(names)
            or (is_append and not all(step[0].is_live for step in steps))
            or (found is not None and (request.is_live or not self._is_fresh(request)))
            or (not request.is_live and len(self.live()) >= self.scenario.max_num_reqs)
            or any(self._has_lost(step[0], step[1]) for step in steps)
        )

    def _num_held(self, request: TrialRequest) -> int:
        view = self._earlier()
        return sum([block != view.null_block for table in view.tables.get(request.name, ()) for block in table])

    def _has_lost(self, request: TrialRequest, start: int) -> bool:
        """Whether something that the token at `start` attends to has been given back."""
        tables = self._earlier().tables.get(request.name, ())
        for shape, table in zip(self.scenario.groups, tables, strict=False):
            index = shape.attends_from(start) // shape.block_size
            if index < len(table) and table[index] == self._earlier().null_block:
                return True
        return False
