"""Commands for many requests or steps at once leave what the single ones would have left, block id for block id."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from kvledger.testing import LedgerAdapter, Trial, make_ledger
from kvledger.testing.choices import RandomChooser, choose_scenario
from kvledger.testing.ledger_adapter import ledger_supports
from kvledger.testing.rules import RULES

SEEDS = range(200)


def twins(seed: int, kinds: tuple[str, ...]) -> tuple[LedgerAdapter, LedgerAdapter]:
    """Two allocators after the same random history."""
    chooser = RandomChooser(seed)
    scenario = choose_scenario(chooser, ledger_supports(kinds=kinds, max_groups=1))
    scenario = attrs.evolve(scenario, num_blocks=scenario.num_blocks + 12)
    first, second = Trial(make_ledger, scenario), Trial(make_ledger, scenario, checks_state=False)
    rules = [rule for rule in RULES if rule.name in ("admit", "decode", "finish", "fork", "admit_the_same_again")]

    def do(command: Any) -> None:
        first.do(command)
        second.do(command)

    for _ in range(15):
        rules[chooser.integer(0, len(rules) - 1)].act(first, chooser, do)
    return first.manager, second.manager


def state_of(adapter: LedgerAdapter) -> dict[str, Any]:
    """The state, without how many commits it took and in which order equal keys were registered."""
    state = adapter.allocator.state.snapshot()
    del state["next_sequence"]
    state["copies"] = [{key: set(blocks) for key, blocks in group} for group in state["copies"]]
    return state


def rows_of(adapter: LedgerAdapter) -> np.ndarray:
    return np.array(sorted(adapter.allocator.state.row_of.values()), dtype=np.int64)


def compare(kinds: tuple[str, ...], at_once: Callable[[Any], bool], one_by_one: Callable[[Any], None]) -> int:
    """How many of the seeds allowed the command."""
    compared = 0
    for seed in SEEDS:
        first, second = twins(seed, kinds)
        if len(rows_of(first)) and at_once(first):
            one_by_one(second)
            assert state_of(first) == state_of(second), seed
            assert first.rebuild()[0] == first.rebuild()[1]
            compared += 1
    return compared


@pytest.mark.parametrize("num_steps", [2, 5, 9])
def test_several_steps_at_once_take_the_blocks_of_single_steps(num_steps: int) -> None:
    def at_once(adapter: LedgerAdapter) -> bool:
        rows = rows_of(adapter)
        allocator = adapter.allocator
        room = allocator.config.max_model_len - int(allocator.state.num_placed[rows].max())
        if room < num_steps or allocator.state.guarded or not allocator.could_append(rows, num_steps):
            return False
        before = [allocator.pool.num_free_blocks]
        per_step = allocator.append_steps(rows, num_steps)
        assert sum(per_step) == before[0] - allocator.pool.num_free_blocks
        return True

    def one_by_one(adapter: LedgerAdapter) -> None:
        for _ in range(num_steps):
            assert adapter.allocator.append(rows_of(adapter))

    assert compare(("full",), at_once, one_by_one) >= 10


def test_a_release_of_many_requests_gives_back_what_single_ones_do() -> None:
    def at_once(adapter: LedgerAdapter) -> bool:
        adapter.allocator.release_out_of_window_among(rows_of(adapter))
        return True

    def one_by_one(adapter: LedgerAdapter) -> None:
        names = {row: name for name, row in adapter.allocator.state.row_of.items()}
        for row in rows_of(adapter).tolist():
            adapter.allocator.release_out_of_window(names[row])

    assert compare(("sliding", "chunked", "state"), at_once, one_by_one) >= 10


def test_requests_served_in_turn_release_and_take_as_single_ones_do() -> None:
    """Each releases what is out of its window just before it takes blocks, as far as the free ones reach (rule 17)."""
    served: list[int] = []

    def at_once(adapter: LedgerAdapter) -> bool:
        rows = rows_of(adapter)
        allocator = adapter.allocator
        below = allocator.state.num_placed[rows] < allocator.config.max_model_len
        if not below.all() or allocator.state.guarded:
            return False
        served[:] = [allocator.append_in_turn(rows)]
        return True

    def one_by_one(adapter: LedgerAdapter) -> None:
        names = {row: name for name, row in adapter.allocator.state.row_of.items()}
        for place, row in enumerate(rows_of(adapter).tolist()):
            adapter.allocator.release_out_of_window(names[row])
            if not adapter.allocator.append(np.array([row])):
                assert place == served[0]
                return
        assert len(rows_of(adapter)) == served[0]

    assert compare(("full", "sliding", "chunked", "state"), at_once, one_by_one) >= 10


def test_a_decode_step_of_many_requests_is_that_of_single_ones() -> None:
    def at_once(adapter: LedgerAdapter) -> bool:
        rows = rows_of(adapter)
        below = adapter.allocator.state.num_placed[rows] < adapter.allocator.config.max_model_len
        return bool(below.all()) and not adapter.allocator.state.guarded and adapter.allocator.append(rows)

    def one_by_one(adapter: LedgerAdapter) -> None:
        for row in rows_of(adapter):
            assert adapter.allocator.append(np.array([row]))

    assert compare(("full", "sliding", "state"), at_once, one_by_one) >= 10


def test_blocks_registered_after_their_step_are_those_that_the_append_would_have_registered() -> None:
    """What an asynchronous loop does: a step fills blocks whose last tokens are known only when it has run."""
    registered: list[int] = []

    def at_once(adapter: LedgerAdapter) -> bool:
        rows, allocator = rows_of(adapter), adapter.allocator
        placed = allocator.state.num_placed[rows].copy()
        if (placed >= allocator.config.max_model_len).any() or allocator.state.guarded:
            return False
        if not allocator.append(rows, num_known_tokens=placed):
            return False
        before = allocator.pool.num_keyed_blocks
        allocator.register(rows, placed + 1)
        registered.append(allocator.pool.num_keyed_blocks - before)
        return True

    def one_by_one(adapter: LedgerAdapter) -> None:
        assert adapter.allocator.append(rows_of(adapter))

    assert compare(("full", "sliding", "chunked"), at_once, one_by_one) >= 10
    assert sum(registered) > 0
