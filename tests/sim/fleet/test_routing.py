"""Routers, one decision at a time, on views that events have filled."""

import pytest
from kvledger.core import Commit, FreeReason, FullAttention, InputError, Request
from kvledger.core.events import (
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksUncached,
    CacheReset,
    PoolCreated,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
)
from kvledger.sim.fleet.routing import ReplicaView, Routed, make_router

SIZE = 16


def told(view: ReplicaView, *events) -> None:
    view.apply(Commit(1, events))


def a_view(delay_ns: int = 0, clock: list[int] | None = None) -> ReplicaView:
    clock = clock if clock is not None else [0]
    view = ReplicaView(lambda: clock[0], delay_ns)
    created = PoolCreated(100, (FullAttention(SIZE),), 8, 4096, True, SIZE, SIZE, "lru", "given")
    view.apply(Commit(0, (created,)))
    return view


def cached(*keys: str) -> BlocksCached:
    n = len(keys)
    return BlocksCached(0, (0,), (0,), (n,), (n,), tuple(range(n)), tuple(range(1, n + 1)), keys, (None,))


def routed(prompt: int = 64, keys: str = "", session: str | None = None, request_id: str = "r") -> Routed:
    return Routed(request=Request(request_id, prompt), keys=tuple(keys), block_size=SIZE, session=session)


def test_round_robin_goes_round() -> None:
    router, views = make_router("round-robin"), [a_view(), a_view(), a_view()]
    assert [router.choose(routed(), views) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_outstanding_work_counts_prompt_tokens_and_not_requests() -> None:
    router, views = make_router("least-outstanding-work"), [a_view(), a_view()]
    views[0].sent(Request("long", 1000))
    for name in "abc":
        views[1].sent(Request(name, 10))
    assert router.choose(routed(), views) == 1


def test_work_that_the_events_report_as_computed_counts_no_more() -> None:
    view = a_view()
    view.sent(Request("a", 1000))
    told(view, RowsAssigned(("a",), (3,)), TokensPlaced((3,), (0,), (600,)))
    assert view.outstanding_prefill_tokens() == 400
    told(view, TokensPlaced((3,), (600,), (400,)))
    assert (view.outstanding_prefill_tokens(), view.num_outstanding_requests) == (0, 1)
    told(view, BlocksFreed(FreeReason.FINISHED, (0,), (3,), (0,), ()), RowsReleased(("a",), (3,)))
    assert view.num_outstanding_requests == 0


def test_a_preempted_request_has_its_tokens_to_compute_again() -> None:
    view = a_view()
    view.sent(Request("a", 100))
    told(view, RowsAssigned(("a",), (3,)), TokensPlaced((3,), (0,), (100,)), TokensPlaced((3,), (100,), (1,)))
    told(view, BlocksFreed(FreeReason.PREEMPTED, (0,), (3,), (0,), ()), RowsReleased(("a",), (3,)))
    assert (view.outstanding_prefill_tokens(), view.num_outstanding_requests) == (102, 1)


def test_a_key_on_two_blocks_is_known_until_both_have_lost_it() -> None:
    view = a_view()
    told(view, cached("a", "b"))
    told(view, cached("a"))
    assert view.num_matching("abc") == 2
    told(view, BlocksAllocated(0, (1,), (1,), (1,), ("a",)))
    assert view.num_matching("abc") == 2
    told(view, BlocksUncached((2,), ("a",), (0,)))
    assert view.num_matching("abc") == 0
    told(view, CacheReset())
    assert view.blocks_with_key == {}


def test_what_is_on_the_way_is_not_known_yet() -> None:
    clock = [0]
    view = a_view(5, clock)
    clock[0] = 10
    view.arrive()
    told(view, cached("a"))
    clock[0] = 14
    view.arrive()
    assert view.num_matching("a") == 0
    clock[0] = 15
    view.arrive()
    assert view.num_matching("a") == 1


def test_the_longest_prefix_wins_until_its_replica_is_busy() -> None:
    views = [a_view(), a_view(), a_view()]
    told(views[1], cached("a"))
    told(views[2], cached("a", "b", "c"))
    request = routed(64, "abc")
    assert make_router("prefix-aware").choose(request, views) == 2
    views[2].sent(Request("busy", 40))  # 16 + 40 to wait for here, 48 there
    assert make_router("prefix-aware").choose(request, views) == 1
    assert make_router("prefix-aware", 0.0).choose(request, views) == 2
    assert make_router("prefix-aware", 0.5).choose(request, views) == 2


def test_without_any_hit_the_replica_unused_for_longest_is_chosen() -> None:
    router, views = make_router("prefix-aware"), [a_view(), a_view(), a_view()]
    assert [router.choose(routed(), views) for _ in range(4)] == [0, 1, 2, 0]


def test_a_session_stays_where_it_started() -> None:
    router, views = make_router("sticky"), [a_view(), a_view()]
    first = [router.choose(routed(session=name), views) for name in ("x", "y", "z")]
    assert first == [0, 1, 0]
    views[0].sent(Request("busy", 10_000))
    assert [router.choose(routed(session=name), views) for name in ("z", "x", "y")] == [0, 0, 1]


def test_without_sessions_a_turn_follows_the_prompt_that_it_goes_beyond() -> None:
    router, views = make_router("sticky"), [a_view(), a_view()]
    assert router.choose(routed(keys="sab"), views) == 0
    assert router.choose(routed(keys="sx"), views) == 1  # shares the system prompt s only
    views[0].sent(Request("busy", 10_000))
    assert router.choose(routed(keys="sabc"), views) == 0
    assert router.choose(routed(keys="sabd"), views) == 1  # sab has had its next turn
    assert router.choose(routed(keys="sabce"), views) == 0


def test_unknown_names_and_options_without_effect_are_refused() -> None:
    with pytest.raises(InputError, match="'random'; known: round-robin, least-outstanding-work, sticky, prefix-aware"):
        make_router("random")
    with pytest.raises(InputError, match="has no effect on --routing sticky"):
        make_router("sticky", 1.0)
    with pytest.raises(InputError, match="must be 0 or more"):
        make_router("prefix-aware", -1.0)
