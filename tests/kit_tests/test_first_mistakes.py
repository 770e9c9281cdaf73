"""What goes wrong at first with a manager of one's own is said in words, not as a traceback out of the kit."""

import pytest
from kvledger.testing import (
    Allocate,
    AllocatorView,
    FactoryError,
    FoundPrefix,
    GroupShape,
    KitFailure,
    Limits,
    New,
    Placement,
    Scenario,
    Supports,
    Trial,
    explore,
    shorten,
    supporting,
)
from kvledger.testing.shorten import failure_of


class Slabs:
    """As many blocks as a request asks for, never shared; its view hands out its own lists."""

    def __init__(self, scenario: Scenario) -> None:
        self.size = scenario.block_size
        self.num_blocks = scenario.num_blocks
        self.unused = list(range(1, scenario.num_blocks))
        self.tables: dict[str, list[list[int]]] = {}

    def allocate(self, placement: Placement, found: FoundPrefix | None, limits: Limits) -> bool:
        (table,) = self.tables.get(placement.request_id, [[]])
        missing = -(-(placement.start + placement.num_new_tokens) // self.size) - len(table)
        if missing > len(self.unused):
            return False
        self.tables.setdefault(placement.request_id, [table])
        table += [self.unused.pop(0) for _ in range(missing)]
        return True

    def free(self, request_id: str) -> None:
        self.unused += self.tables.pop(request_id, [[]])[0]

    def view(self) -> AllocatorView:
        return AllocatorView(self.num_blocks, self.tables, self.unused)


def played_on(manager: type[Slabs]) -> Trial:
    trial = Trial(manager, Scenario(num_blocks=3))
    trial.do(New("a", ((0, 9),)))
    trial.do(Allocate("a", 9))
    return trial


def test_a_manager_that_makes_none_of_these_mistakes_passes() -> None:
    assert explore(Slabs, 20).commands


def test_an_answer_that_is_neither_yes_nor_no_is_named() -> None:
    class GivesBlocks(Slabs):
        def allocate(self, placement, found, limits):
            return self.tables[placement.request_id] if super().allocate(placement, found, limits) else None

    with pytest.raises(KitFailure, match="the answer is None, neither True"):
        played_on(GivesBlocks)


def test_a_table_that_stands_where_a_list_of_tables_belongs_is_named() -> None:
    class OneTable(Slabs):
        def view(self) -> AllocatorView:
            return AllocatorView(self.num_blocks, {name: table for name, (table,) in self.tables.items()}, self.unused)

    trial = Trial(OneTable, Scenario(num_blocks=9))
    trial.do(New("a", ((0, 9),)))
    with pytest.raises(KitFailure, match=r"view\(\).tables\['a'\] is \[1, 2, 3\], but a request has one table a group"):
        trial.do(Allocate("a", 9))


def test_a_block_that_is_handed_out_for_two_places_is_named() -> None:
    class HandsOneOutTwice(Slabs):
        def allocate(self, placement, found, limits):
            is_done = super().allocate(placement, found, limits)
            (table,) = self.tables[placement.request_id]
            self.unused.append(table[1])
            table[1] = table[0]
            return is_done

    trial = Trial(HandsOneOutTwice, Scenario(num_blocks=9))
    trial.do(New("a", ((0, 9),)))
    with pytest.raises(KitFailure, match=r"taken_once: .*\n.*found: blocks \[1\] were free and stand at more than one"):
        trial.do(Allocate("a", 9))


def test_a_view_of_live_lists_is_a_snapshot_all_the_same() -> None:
    class TakesWhatItCan(Slabs):
        def allocate(self, placement, found, limits):
            if super().allocate(placement, found, limits):
                return True
            self.tables.setdefault(placement.request_id, [[]])[0].extend(self.unused)
            self.unused.clear()
            return False

    with pytest.raises(KitFailure, match="refusal_changes_nothing"):
        played_on(TakesWhatItCan)


def test_a_free_null_block_is_pointed_at() -> None:
    class UsesBlock0(Slabs):
        def __init__(self, scenario: Scenario) -> None:
            super().__init__(scenario)
            self.unused = [0, *self.unused]

    with pytest.raises(KitFailure, match="the null block 0 is free"):
        played_on(UsesBlock0)


def test_a_scenario_that_the_factory_cannot_serve_is_told_apart_from_a_fault() -> None:
    def make(scenario: Scenario) -> Slabs:
        if scenario.block_size != 16:
            raise ValueError("pages have 16 tokens")
        return Slabs(scenario)

    with pytest.raises(FactoryError, match=r"pages have 16 tokens\nSay on the factory what it is made for"):
        explore(make, 20)
    assert explore(supporting(Supports(block_sizes=(16,)))(make), 20).commands


def test_a_failure_is_shortened_within_what_the_factory_supports() -> None:
    class Loses(Slabs):
        def free(self, request_id: str) -> None:
            self.tables.pop(request_id, None)

    @supporting(Supports(block_sizes=(8,)))
    def make(scenario: Scenario) -> Loses:
        return Loses(scenario)

    with pytest.raises(KitFailure) as found:
        explore(make, 50, shorten_s=0)
    short = shorten(found.value, make)
    assert short.history.scenario.groups == (GroupShape("full", 8),)
    assert len(short.history.commands) <= 3
    assert failure_of(short.history, make) is not None
