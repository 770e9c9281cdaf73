"""D04: a preempted request that finds its own blocks again is no prefix hit; that reuse is shown apart."""


def test_d04_a_preempted_request_that_finds_its_own_blocks_is_no_prefix_hit(scheduler_of) -> None:
    scheduler = scheduler_of(20)
    for i in range(4):
        scheduler.submit_new(f"r{i}", 60, 60, ordinal=i)
    scheduler.run_to_the_end()
    assert scheduler.stats.num_preemptions > 0
    assert scheduler.stats.prefix_hits_tokens == 0
    assert scheduler.stats.readmission_hits_tokens > 0
    assert scheduler.stats.prefix_queries_tokens == 4 * 60


def test_d04_the_report_of_a_simulation_keeps_them_apart_too(simulated) -> None:
    report = simulated(*[(0.0, 60, 60)] * 4, num_blocks=20)
    assert report["preemptions"]["total"] > 0
    cache = report["prefix_cache"]
    assert (cache["hits_tokens"], cache["hit_rate"], cache["queries_tokens"]) == (0, 0, 4 * 60)
    assert cache["readmission_hits_tokens"] > 0
