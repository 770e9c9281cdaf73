"""What a command may do to the state, each promise as a named object with a sentence. Needs no Hypothesis.

The invariants of `invariants.py` look at one state; these look at a command and the states around it.
"""

from collections.abc import Sequence

import attrs
import numpy as np
from kvledger.testing.invariants import InvariantViolation
from kvledger.testing.scenario import Scenario
from kvledger.testing.view import AllocatorView


@attrs.frozen
class Promise:
    """A promise about commands."""

    name: str
    sentence: str

    def broken(self, detail: str) -> InvariantViolation:
        """The violation to raise."""
        return InvariantViolation(self.name, self.sentence, detail)

    def require(self, holds: bool, detail: str) -> None:
        """Raise unless it holds."""
        if not holds:
            raise self.broken(detail)


NO_CRASH = Promise("no_crash", "A manager carries a command out or refuses it; it does not fall over.")
LOOKUP_CHANGES_NOTHING = Promise("lookup_changes_nothing", "A question changes nothing.")
REFUSAL_CHANGES_NOTHING = Promise(
    "refusal_changes_nothing", "A command that is not carried out, or that breaks a rule, changes nothing."
)
HIT_BOUNDS = Promise("hit_bounds", "A hit is a multiple of the alignment and leaves at least one token to compute.")
LONGEST_HIT = Promise("longest_hit", "A hit is as long as the findable blocks allow, and no longer.")
OWN_CONTENT = Promise(
    "own_content", "Whatever a request's next token attends to is the content of that request's own tokens."
)
WRITES_ARE_PRIVATE = Promise(
    "writes_are_private", "A block that new tokens are written into is held by their request alone."
)
SLOTS_EXIST = Promise(
    "slots_exist",
    "Every placed token has a slot, and so has every lookahead token asked for; of states, the last one of a step.",
)
NO_WASTE = Promise("no_waste", "A request holds no more blocks than its slots need: at most block_size - 1 are unused.")
TABLES_ONLY_GROW = Promise(
    "tables_only_grow",
    "A table entry changes only to the null block or to a private copy; entries leave only by truncation.",
)
HEADROOM = Promise("headroom", "What is reserved, and the watermark where it applies, stays free.")
JUSTIFIED_REFUSAL = Promise(
    "justified_refusal", "What fits and breaks no rule is carried out; only what can never fit is refused for good."
)
REFUSED_FOR_GOOD = Promise(
    "refused_for_good", "What could not be carried out in an idle pool is refused at once; nobody waits for ever."
)
TAKEN_FROM_THE_HEAD = Promise("taken_from_the_head", "New blocks are those that the eviction order names first.")
TAKEN_ONCE = Promise(
    "taken_once",
    "A block that was free, and that no lookup found, is given to one request, at one place; only what was found or "
    "forked may stand at several.",
)
TAIL_GOES_FIRST = Promise(
    "tail_goes_first", "Of the blocks that a request gives back, a later one is taken before an earlier one."
)
GROUPS_GO_IN_ORDER = Promise(
    "groups_go_in_order",
    "What a request gives back with a key is queued group by group, the first group first; the last one where the "
    "release is deferred.",
)
KEYS_TELL_THE_TRUTH = Promise("keys_tell_the_truth", "A findable block holds the content that its key names.")
KEYS_STAY = Promise(
    "keys_stay", "A block stays findable until it is taken, overwritten or evicted by id, or the cache is reset."
)
COMPLETE_BLOCKS_ARE_FOUND = Promise(
    "complete_blocks_are_found", "A complete block of known tokens can be found from its command on."
)
PROMPTS_ARE_FOUND_AGAIN = Promise(
    "prompts_are_found_again",
    "What the token at a prompt's last aligned boundary attends to can be found once the prompt has its slots.",
)
JUNCTIONS_ARE_FOUND_AGAIN = Promise(
    "junctions_are_found_again",
    "Where full attention alone could have served a longer hit than all groups together, that prefix can be found once "
    "the request that met it has its slots.",
)
DRAFTS_ARE_NOT_FOUND = Promise("drafts_are_not_found", "Nothing that holds a draft token can be found.")
NO_ORPHANS = Promise("no_orphans", "No block is findable whose predecessor is not: no lookup could ever reach it.")
OUT_OF_WINDOW_IS_GONE = Promise(
    "out_of_window_is_gone",
    "After a release, and where a hit is adopted, no block is held that the next token does not attend to.",
)
EVERYTHING_COMES_BACK = Promise("everything_comes_back", "A request that has ended holds nothing.")
EVICTION_IS_EXACT = Promise(
    "eviction_is_exact",
    "Evicting by id takes the keys of those blocks, and besides of none that a lookup could still reach.",
)
RESET_FORGETS = Promise("reset_forgets", "After a reset nothing can be found; while blocks are in use it is refused.")
EVENTS_REBUILD_STATE = Promise("events_rebuild_state", "Replaying the events so far gives the state, exactly.")
PROGRESS = Promise("progress", "Once every request has ended, the longest request that fits is served.")

PROMISES: tuple[Promise, ...] = (
    NO_CRASH,
    LOOKUP_CHANGES_NOTHING,
    REFUSAL_CHANGES_NOTHING,
    HIT_BOUNDS,
    LONGEST_HIT,
    OWN_CONTENT,
    WRITES_ARE_PRIVATE,
    SLOTS_EXIST,
    NO_WASTE,
    TABLES_ONLY_GROW,
    HEADROOM,
    JUSTIFIED_REFUSAL,
    REFUSED_FOR_GOOD,
    TAKEN_FROM_THE_HEAD,
    TAKEN_ONCE,
    TAIL_GOES_FIRST,
    GROUPS_GO_IN_ORDER,
    KEYS_TELL_THE_TRUTH,
    KEYS_STAY,
    COMPLETE_BLOCKS_ARE_FOUND,
    PROMPTS_ARE_FOUND_AGAIN,
    JUNCTIONS_ARE_FOUND_AGAIN,
    DRAFTS_ARE_NOT_FOUND,
    NO_ORPHANS,
    OUT_OF_WINDOW_IS_GONE,
    EVERYTHING_COMES_BACK,
    EVICTION_IS_EXACT,
    RESET_FORGETS,
    EVENTS_REBUILD_STATE,
    PROGRESS,
)


def first_difference(before: AllocatorView, after: AllocatorView) -> str | None:
    """What differs between two views, in words, or None."""
    old, new = before.comparable(), after.comparable()
    for part, value in old.items():
        if new[part] != value:
            return f"{part}: {value} became {new[part]}"
    return None


def check_tables_only_grow(before: AllocatorView, after: AllocatorView, truncated: str | None) -> None:
    """Compare every table that is there before and after, the truncated request's from its start only."""
    for name, groups in after.tables.items():
        for group, (old, new) in enumerate(zip(before.tables.get(name, ()), groups, strict=False)):
            place = f"the table of request {name!r} in group {group}"
            TABLES_ONLY_GROW.require(name == truncated or len(new) >= len(old), f"{place} went from {old} to {new}")
            for index, (was, is_now) in enumerate(zip(old, new, strict=False)):
                copied = _is_private_copy(before, after, was, is_now)
                TABLES_ONLY_GROW.require(
                    was == is_now or is_now == after.null_block or copied,
                    f"entry {index} of {place} changed from block {was} to block {is_now}",
                )


def _is_private_copy(before: AllocatorView, after: AllocatorView, was: int, is_now: int) -> bool:
    shared = int(before.uses[was]) > 1 and was != before.null_block
    return shared and int(before.uses[is_now]) == 0 and int(after.uses[is_now]) == 1


def check_taken_from_the_head(before: AllocatorView, after: AllocatorView, adopted: Sequence[Sequence[int]]) -> None:
    """The blocks that were free and are held now are the first of the free queue, adopted ones aside."""
    given = {block for blocks in adopted for block in blocks}
    queue = [block for block in before.free.tolist() if block not in given]
    uses = after.uses
    taken = {block for block in queue if uses[block]}
    expected = set(queue[: len(taken)])
    TAKEN_FROM_THE_HEAD.require(
        taken == expected, f"blocks {sorted(taken)} were taken from the queue {queue[:12]}, not {sorted(expected)}"
    )


def check_taken_once(before: AllocatorView, after: AllocatorView, adopted: Sequence[Sequence[int]]) -> None:
    """Of the blocks that were free, adopted ones aside, none stands at two places of the tables now."""
    given = {block for blocks in adopted for block in blocks}
    twice = [block for block in before.free.tolist() if block not in given and after.uses[block] > 1]
    TAKEN_ONCE.require(not twice, f"blocks {twice} were free and stand at more than one place of the tables now")


def _freed(before: AllocatorView, after: AllocatorView, name: str) -> tuple[list[list[int]], dict[int, int]]:
    """By group the blocks of a request that became free, each at its first place, the last one to be given back; and
    where each free block stands in the queue.
    """
    place_of = {block: place for place, block in enumerate(after.free.tolist())}
    was_free = set(before.free.tolist())
    tables = before.tables[name]
    freed = [
        [block for block in dict.fromkeys(table) if block in place_of and block not in was_free] for table in tables
    ]
    return freed, place_of


def check_groups_go_in_order(before: AllocatorView, after: AllocatorView, name: str, deferred: bool) -> None:
    """Of an ended request, the findable blocks of one group stand before those of the next, or behind them."""
    freed, place_of = _freed(before, after, name)
    keyed = [[place_of[block] for block in blocks if block in (after.keyed or {})] for blocks in freed]
    places = [place for group in (keyed[::-1] if deferred else keyed) for place in sorted(group)]
    GROUPS_GO_IN_ORDER.require(
        places == sorted(places), f"the findable blocks of request {name!r} stand, group by group, at {keyed}"
    )


def check_tail_goes_first(before: AllocatorView, after: AllocatorView, name: str) -> None:
    """What became free of a request's tables, with a key and without, is queued last block first."""
    groups, place_of = _freed(before, after, name)
    keyed = after.keyed or {}
    for group, freed in enumerate(groups):
        for blocks in ([b for b in freed if b in keyed], [b for b in freed if b not in keyed]):
            places = [place_of[block] for block in blocks]
            TAIL_GOES_FIRST.require(
                places == sorted(places, reverse=True),
                f"request {name!r} gave back blocks {blocks} of group {group}, in the order of their positions, and "
                f"they stand at {places} of the free queue",
            )


def check_writes_are_private(scenario: Scenario, name: str, start: int, stop: int, after: AllocatorView) -> None:
    """No block of the positions `start <= position < stop` is held by anybody else, whatever it is written."""
    for group, shape in enumerate(scenario.groups):
        written = after.tables[name][group][start // shape.block_size : -(-stop // shape.block_size)]
        shared = [block for block in written if after.uses[block] > 1 and block != after.null_block]
        WRITES_ARE_PRIVATE.require(
            not shared,
            f"tokens {start} to {stop - 1} of request {name!r} are written into blocks {shared} of group {group}, "
            "which others hold as well",
        )


def check_keys_stay(before: AllocatorView, after: AllocatorView, overwritten: set[int]) -> None:
    """Blocks lose or change their key only by being taken or overwritten."""
    if before.keyed is None or after.keyed is None:
        return
    for block, key in before.keyed.items():
        if after.keyed.get(block) == key or block in overwritten:
            continue
        KEYS_STAY.require(
            bool(_places(block, after) - _places(block, before)),
            f"block {block} was findable before the command and is not after it, though nobody took it",
        )


def _places(block: int, view: AllocatorView) -> set[tuple[str, int, int]]:
    """Where tables name the block; a new place means that it was taken."""
    return {
        (name, group, index)
        for name, groups in view.tables.items()
        for group, table in enumerate(groups)
        for index, held in enumerate(table)
        if held == block
    }


def check_headroom(before: AllocatorView, after: AllocatorView, reserved: int, watermark: int) -> None:
    """A command that took blocks left the promised ones free."""
    if len(after.free) < len(before.free):
        HEADROOM.require(
            len(after.free) >= reserved + watermark,
            f"{len(after.free)} blocks are free, but {reserved} are reserved and the watermark is {watermark}",
        )


def check_out_of_window(scenario: Scenario, name: str, num_computed_tokens: int, after: AllocatorView) -> None:
    """No entry before the block of the first attended position holds a block."""
    for group, shape in enumerate(scenario.groups):
        first = shape.attends_from(num_computed_tokens) // shape.block_size
        table = np.asarray(after.tables[name][group][:first])
        held = np.flatnonzero(table != after.null_block)
        OUT_OF_WINDOW_IS_GONE.require(
            not len(held),
            f"request {name!r} has computed {num_computed_tokens} tokens and still holds the blocks at "
            f"{held.tolist()} of group {group}",
        )
