"""`kvledger log verify`: sound logs pass, and what is wrong with another one is named with its commit."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request
from kvledger.core.events import BlocksFreed, Commit, FreeReason, PrefixAdopted, RowsAssigned, RowsReleased
from kvledger.sim.logs.verification import verify_log

from tests.sim.recorded_logs import FLUSH, rewritten


@pytest.mark.parametrize("every", [[], ["--checked-every", "1"], ["--checked-every", "1000000"]], ids=len)
def test_a_sound_log_verifies(kvledger, recorded, every) -> None:
    code, out, err = kvledger("log", "verify", recorded[0], *every, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["sound"]
    assert answer["first_bad_commit"] is None
    assert answer["commits"] == len(list(LogReader(recorded[0]).commits()))
    assert answer["notes"] == 61
    assert {"conservation", "ref_counts", "index_points_both_ways"} <= set(answer["invariants"])
    code, out, _ = kvledger("log", "verify", recorded[0], *every)
    assert code == 0
    assert "sound: every checksum matches" in out


@pytest.mark.parametrize("every", ["1", "7", "100000"])
def test_a_leak_is_named_with_its_commit(kvledger, recorded, tmp_path, every) -> None:
    bad: list[int] = []

    def lose_a_block(commit: Commit) -> Commit:
        freed = [event for event in commit.events if isinstance(event, BlocksFreed) and event.blocks]
        if bad or commit.sequence < 50 or not freed:
            return commit
        bad.append(commit.sequence)
        event = freed[0]
        less = event._replace(blocks=tuple(event.blocks)[1:], counts=(event.counts[0] - 1,))
        return Commit(commit.sequence, tuple(less if each is event else each for each in commit.events))

    log = rewritten(recorded[0], tmp_path / "leak", lose_a_block)
    code, out, _ = kvledger("log", "verify", log, "--checked-every", every, "--json")
    answer = json.loads(out)
    assert code == 1
    assert not answer["sound"]
    assert answer["first_bad_commit"] == bad[0]
    assert answer["fault"]["kind"] == "conservation"
    assert "leak" in answer["fault"]["description"]


@pytest.mark.parametrize("every", ["1", "5", "100000"])
def test_a_block_adopted_in_place_of_another_is_found_out_when_it_is_given_back(
    kvledger, recorded, tmp_path, every
) -> None:
    """Found at two places a block may be, if ids name content alone; then each of the two is given back."""
    forged: list[str] = []
    released: list[int] = []
    request_in: dict[int, str] = {}

    def adopt_one_twice(commit: Commit) -> Commit:
        for event in commit.events:
            if isinstance(event, RowsAssigned):
                request_in.update(zip(event.rows, event.requests, strict=True))
            elif isinstance(event, RowsReleased) and forged and forged[0] in event.requests:
                released.append(commit.sequence)
        adopted = [event for event in commit.events if isinstance(event, PrefixAdopted) and len(event.blocks) > 1]
        if forged or commit.sequence < 30 or not adopted:
            return commit
        event = adopted[0]
        forged.append(request_in[event.row])
        twice = event._replace(blocks=(event.blocks[0], event.blocks[0], *event.blocks[2:]))
        return Commit(commit.sequence, tuple(twice if each is event else each for each in commit.events))

    log = rewritten(recorded[0], tmp_path / "twice", adopt_one_twice)
    code, out, _ = kvledger("log", "verify", log, "--checked-every", every, "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["first_bad_commit"] == released[0]
    assert "double free" in answer["fault"]["description"]


def repeated_ids(directory: Path) -> str:
    """The log of requests whose blocks are named by their content alone, so that one stands at several places."""
    config = AllocatorConfig(num_blocks=14, groups=[FullAttention(16)], max_model_len=256, max_num_reqs=2)
    log = DurableLog.create(directory, flush=FLUSH)
    allocator = KVCacheAllocator(config, [log])
    for number, words in enumerate(["aab", "aaab", "aabaa", "baa", "aaaaaa"] * 4):
        request = Request(str(number), 16 * len(words) + 1, keys=ContentKeys(words))
        match = allocator.match_prefix(request)
        assert allocator.allocate(request, request.num_tokens - match.num_hit_tokens, match) is not None
        if number % 3 == 1:
            allocator.fork(str(number), Request("fork", request.num_tokens, keys=ContentKeys(words)))
            allocator.truncate("fork", 16 * len(words) - 4)
            assert allocator.append(np.array([allocator.row_of("fork")]))
            allocator.free("fork")
        if number % 4 == 2:
            allocator.evict(allocator.block_ids(str(number))[0])
        allocator.free(str(number))
    log.close()
    return str(directory)


class ContentKeys:
    def __init__(self, words: str) -> None:
        self._words = words

    def keys(self, start: int, stop: int) -> str:
        return self._words[start:stop]


@pytest.mark.parametrize("every", ["1", "1000"])
def test_a_log_of_requests_that_hold_one_block_at_several_places_verifies(kvledger, tmp_path, every) -> None:
    log = repeated_ids(tmp_path / "log")
    adopted = [e.blocks for c in LogReader(log).commits() for e in c.events if isinstance(e, PrefixAdopted)]
    assert any(len(set(blocks)) < len(blocks) for blocks in adopted)
    code, out, err = kvledger("log", "verify", log, "--checked-every", every, "--json")
    assert (code, json.loads(out)["fault"], err) == (0, None, "")
    code, out, _ = kvledger("log", "diff", log, repeated_ids(tmp_path / "again"))
    assert (code, out) == (0, "the logs are equal\n")


@pytest.mark.parametrize("every", ["1", "5", "100000"])
def test_a_broken_invariant_is_traced_to_its_commit_whatever_is_sampled(kvledger, tmp_path, every) -> None:
    """Who gives back a neighbour's block in place of its own keeps the sum: only the invariants see it."""
    bad: list[int] = []

    def give_back_a_neighbours(commit: Commit) -> Commit:
        if bad or commit.sequence < 30 or not isinstance(commit.events[-1], RowsReleased):
            return commit
        state = LogReader(sound).state(commit.sequence)
        freed = commit.events[0]
        held = {block for row in state.row_of.values() for block in state.tables[0].blocks(row)}
        theirs = sorted(held.difference(freed.blocks))
        if not theirs:
            return commit
        bad.append(commit.sequence)
        return Commit(commit.sequence, (freed._replace(blocks=(theirs[0], *freed.blocks[1:])), *commit.events[1:]))

    sound = repeated_ids(tmp_path / "sound")
    log = rewritten(sound, tmp_path / "theirs", give_back_a_neighbours)
    code, out, _ = kvledger("log", "verify", log, "--checked-every", every, "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["first_bad_commit"] == bad[0]
    assert answer["fault"]["kind"] == "invariant"
    assert "ref_counts" in answer["fault"]["description"]


def test_a_block_that_is_given_back_at_one_of_its_two_places_is_a_leak(kvledger, tmp_path) -> None:
    bad: list[int] = []

    def give_back_once(commit: Commit) -> Commit:
        freed, released = commit.events[0], commit.events[-1]
        ends_alone = isinstance(released, RowsReleased) and released.requests != ("fork",)
        if bad or not ends_alone or len(set(freed.blocks)) == len(freed.blocks):
            return commit
        bad.append(commit.sequence)
        blocks = tuple(dict.fromkeys(freed.blocks))
        return Commit(commit.sequence, (freed._replace(blocks=blocks, counts=(len(blocks),)), *commit.events[1:]))

    log = rewritten(repeated_ids(tmp_path / "sound"), tmp_path / "leak", give_back_once)
    code, out, _ = kvledger("log", "verify", log, "--json")
    answer = json.loads(out)
    assert (code, answer["first_bad_commit"], answer["fault"]["kind"]) == (1, bad[0], "conservation")
    assert "leak" in answer["fault"]["description"]


def test_an_event_that_cannot_follow_is_named(kvledger, recorded, tmp_path) -> None:
    def free_twice(commit: Commit) -> Commit:
        finished = [each for each in commit.events if isinstance(each, BlocksFreed)]
        if commit.sequence != 60 and not (commit.sequence > 60 and finished):
            return commit
        return Commit(commit.sequence, (*commit.events, BlocksFreed(FreeReason.FINISHED, (0,), (0,), (1,), (39,))))

    log = rewritten(recorded[0], tmp_path / "bad", free_twice)
    code, out, _ = kvledger("log", "verify", log, "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["first_bad_commit"] == 60
    assert answer["fault"]["kind"] in ("conservation", "replay")


def test_damage_is_named_with_file_offset_and_commit(kvledger, recorded, tmp_path) -> None:
    log = rewritten(recorded[0], tmp_path / "log", lambda commit: commit)
    (path,) = Path(log).glob("*.parquet")
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)
    code, out, _ = kvledger("log", "verify", log, "--json")
    fault = json.loads(out)["fault"]
    assert code == 1
    assert (fault["kind"], fault["path"], fault["commit"], fault["offset"]) == ("damage", path.name, 0, 4)


def test_a_torn_tail_is_reported_and_no_fault(kvledger, recorded, tmp_path) -> None:
    durable = DurableLog.create(tmp_path / "log", flush=FlushPolicy(every_commits=1))
    for commit in list(LogReader(recorded[0]).commits())[:10]:
        durable.apply(commit)
    (path,) = (tmp_path / "log").glob("*.arrows")
    path.write_bytes(path.read_bytes()[:-10])
    code, out, _ = kvledger("log", "verify", str(tmp_path / "log"), "--json")
    answer = json.loads(out)
    assert (code, answer["sound"], answer["commits"]) == (0, True, 9)
    assert "no whole batch" in answer["torn"]


def test_verification_holds_no_more_of_a_longer_log(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvledger.backends.sinks.log.parquet.ROW_GROUP_ROWS", 500)
    peaks = []
    for num_requests in (200, 1600):
        directory = tmp_path / str(num_requests)
        with DurableLog.create(directory, flush=FLUSH) as log:
            config = AllocatorConfig(num_blocks=100, groups=[FullAttention(16)], max_model_len=160)
            allocator = KVCacheAllocator(config, [log])
            for number in range(num_requests):
                allocator.allocate(Request(str(number), 100), 100)
                allocator.free(str(number))
        verify_log(LogReader(directory))  # what is imported and cached is paid for before
        tracemalloc.start()
        found = verify_log(LogReader(directory))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (found.is_sound, found.commits) == (True, 2 * num_requests + 1)
    assert peaks[1] < 1.2 * peaks[0], peaks
