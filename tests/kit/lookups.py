"""What a lookup must and must not find, and what the admission gate must say."""

from kvledger.testing import promises
from kvledger.testing.commands import Gate, Match
from kvledger.testing.protocol import Limits
from kvledger.testing.refusals import Refusals
from kvledger.testing.trial_state import TrialRequest


class Lookups(Refusals):
    """A trial's judgement of what a manager answers without changing anything."""

    def _match(self, command: Match) -> None:
        request = self.requests[command.request]
        found = self._ask(lambda: self.manager.match(request.name, list(request.tokens)))
        if isinstance(found, Exception):
            raise promises.NO_CRASH.broken(f"a lookup was refused: {found}")
        self._unchanged(promises.LOOKUP_CHANGES_NOTHING)
        hit, longest = found.num_hit_tokens, len(request.tokens) - 1
        promises.HIT_BOUNDS.require(
            0 <= hit <= longest and hit % self.scenario.alignment == 0,
            f"a request of {len(request.tokens)} tokens hits {hit}; alignment {self.scenario.alignment}",
        )
        self._check_longest_hit(request, hit)
        self._check_hit_at_the_boundary(request, hit)
        request.found, request.found_after = found, self.num_changes
        request.junction = self._longest_of_full_attention(request, hit) or request.junction

    def _longest_of_full_attention(self, request: TrialRequest, hit: int) -> int:
        """The hit, in aligned tokens, that the groups of full attention alone could serve, if it is longer, else 0.

        Only where they are all alike: of several sorts it is the longest of any, which need not be of use to all.
        """
        whole = [(group, shape) for group, shape in enumerate(self.scenario.groups) if shape.attends_to_all]
        if len({shape for _, shape in whole}) != 1 or self.view.keyed is None or self.scenario.use_eagle:
            return 0
        size, alignment, blocks = whole[0][1].block_size, self.scenario.alignment, 0
        while (blocks + 1) * size < len(request.tokens) and all(
            self.model.find(request.tokens[: (blocks + 1) * size], group, self.view) for group, _ in whole
        ):
            blocks += 1
        longest = blocks * size // alignment * alignment
        return longest if longest > hit else 0

    def _check_longest_hit(self, request: TrialRequest, hit: int) -> None:
        group = self.scenario.groups[0]
        if self.scenario.use_eagle:
            self._check_eagle_gives_a_block_back(request, hit)
        if len(self.scenario.groups) > 1 or not group.attends_to_all or self.view.keyed is None:
            return
        size, blocks = group.block_size, 0
        while (blocks + 1) * size < len(request.tokens) and self.model.find(
            request.tokens[: (blocks + 1) * size], 0, self.view
        ):
            blocks += 1
        expected = max(blocks - self.scenario.use_eagle, 0) * size
        promises.LONGEST_HIT.require(hit == expected, f"a hit of {hit} tokens where {expected} can be found")

    def _check_eagle_gives_a_block_back(self, request: TrialRequest, hit: int) -> None:
        """The block behind a hit was found too; of several groups it may be the last one of the request."""
        length = len(request.tokens) - (len(self.scenario.groups) == 1)
        for size in [group.block_size for group in self.scenario.groups if group.kind != "state"]:
            room = max(length // size - 1, 0) * size
            promises.LONGEST_HIT.require(
                hit <= room, f"a hit of {hit} tokens; at most {room} may hit, as EAGLE needs the block of {size} behind"
            )

    def _check_hit_at_the_boundary(self, request: TrialRequest, hit: int) -> None:
        """Whether a hit reaches the last boundary of all groups, if all that the token there attends to is findable."""
        groups, alignment = self.scenario.groups, self.scenario.alignment
        boundary = (len(request.tokens) - 1) // alignment * alignment
        # A chunk's lookup begins at the last token's chunk, which may lie behind the boundary that all groups share.
        reaches = len(groups) == 1 or all(group.kind != "chunked" for group in groups)
        if boundary and reaches and self.scenario.enable_caching and not self.scenario.use_eagle:
            promises.LONGEST_HIT.require(
                hit >= boundary or not self._is_findable_up_to(request, boundary),
                f"a hit of {hit} tokens, though all that the token at {boundary} attends to can be found",
            )

    def _is_findable_up_to(self, request: TrialRequest, position: int) -> bool:
        """Whether the token at `position` attends to blocks before it in every group, and each of them is findable."""
        return self.view.keyed is not None and all(
            shape.attends_from(position) < position
            and all(
                self.model.find(request.tokens[: (index + 1) * shape.block_size], group, self.view)
                for index in range(shape.attends_from(position) // shape.block_size, position // shape.block_size)
            )
            for group, shape in enumerate(self.scenario.groups)
        )

    def _gate(self, command: Gate) -> None:
        request = self.requests[command.request]
        found = request.found if command.adopt and not request.is_live and self._is_fresh(request) else None
        limits = Limits(reserved_blocks=command.reserved, use_watermark=command.use_watermark)
        answer = self._ask(lambda: self.manager.can_admit(request.name, list(request.tokens), found, limits))
        self._unchanged(promises.LOOKUP_CHANGES_NOTHING)
        if not found or found.blocks is not None:
            num_tokens = min(len(request.tokens), self.scenario.max_model_len)
            kept_free = command.reserved + (self.scenario.watermark_blocks if command.use_watermark else 0)
            needed = self._blocks_needed_to_admit(request, num_tokens, found)
            promises.JUSTIFIED_REFUSAL.require(
                bool(answer) == (needed <= len(self.view.free) - kept_free),
                f"{num_tokens} tokens need {needed} blocks of {len(self.view.free)} free ones, {kept_free} of which "
                f"must stay free; the gate says {answer}",
            )
