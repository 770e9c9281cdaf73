"""Each batch once and in order, whatever is dropped, delayed, repeated or begun anew."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.backends.sinks.kv_events.schema import BlockStored, KVEventBatch, encode_batch
from kvledger.backends.sinks.kv_events.stream_order import Gap, StreamOrder


def payload(number: int, ts: float | None = None, run: int = 0) -> bytes:
    event = BlockStored([number + 1000 * run], None, [1], 1)
    return encode_batch(KVEventBatch(number + 10_000.0 * run if ts is None else ts, [event]))


class Applied:
    """An order, and the hashes that were applied since the last clear."""

    def __init__(self) -> None:
        self.hashes: list[int] = []
        self.clears = 0
        self.order = StreamOrder(self.apply, self.clear)

    def apply(self, sequence: int, batch: KVEventBatch) -> None:
        self.hashes += [hashed for event in batch.events for hashed in event.block_hashes]

    def clear(self) -> None:
        self.hashes.clear()
        self.clears += 1

    def offer(self, *numbers: int, run: int = 0) -> "Applied":
        for number in numbers:
            self.order.offer(number, payload(number, run=run))
        return self


def test_a_gap_is_found_filled_and_what_waited_follows() -> None:
    applied = Applied().offer(0, 1, 2, 3, 7)
    assert applied.hashes == [0, 1, 2, 3]
    assert applied.order.gap == Gap(4, 6)
    applied.offer(5, 4)
    assert applied.order.gap == Gap(6, 6)
    applied.offer(6)
    assert applied.order.gap is None
    assert applied.hashes == list(range(8))
    assert (applied.order.counts.gaps, applied.order.counts.applied) == (1, 8)


def test_repetitions_and_latecomers_change_nothing() -> None:
    applied = Applied().offer(0, 1, 2, 1, 4, 4, 3, 3, 4, 0)
    assert applied.hashes == [0, 1, 2, 3, 4]
    assert applied.order.counts.duplicates == 5
    assert applied.clears == 0


def test_what_cannot_be_recovered_clears_before_it_goes_on() -> None:
    applied = Applied().offer(0, 1, 5, 6)
    applied.order.give_up()
    assert applied.hashes == [5, 6]
    assert applied.order.counts.unrecoverable == 3
    applied.offer(3, 7)
    assert applied.hashes == [5, 6, 7], "a batch that comes too late may tell of blocks that are gone since"


def test_a_new_run_of_the_producer_starts_from_nothing() -> None:
    applied = Applied().offer(0, 1, 2).offer(0, 1, run=1)
    assert applied.hashes == [1000, 1001]
    assert applied.order.counts.restarts == 1


def test_a_new_run_that_is_noticed_late_waits_for_its_beginning() -> None:
    applied = Applied().offer(0, 1, 2, 3).offer(2, run=1)
    assert applied.hashes == []
    assert applied.order.gap == Gap(0, 1)
    applied.offer(0, 1, run=1)
    assert applied.hashes == [1000, 1001, 1002]


def test_a_stream_joined_late_lacks_what_was_before() -> None:
    applied = Applied().offer(40)
    assert applied.order.gap == Gap(0, 39)
    applied.order.give_up()
    assert applied.hashes == [40]


def test_a_snapshot_replaces_everything_up_to_its_number() -> None:
    applied = Applied().offer(0, 1, 6, 7, 9)
    applied.order.take_over(7, [KVEventBatch(0.0, [BlockStored([70, 71], None, [1, 2], 1)])])
    assert applied.hashes == [70, 71]
    assert applied.order.gap == Gap(8, 8)
    applied.offer(8)
    assert applied.hashes == [70, 71, 8, 9]


def test_what_cannot_be_decoded_is_counted_and_clears_the_view() -> None:
    applied = Applied().offer(0)
    applied.order.offer(1, b"garbage")
    assert (applied.hashes, applied.clears) == ([], 1)
    applied.offer(2)
    assert applied.hashes == [2]
    assert applied.order.counts.undecodable == 1
    assert applied.order.first_error == ("message 1: 7 bytes are no batch of KV events: Expected `array`, got `int`"), (
        applied.order.first_error
    )


def test_a_new_run_whose_first_message_cannot_be_decoded_clears_the_view() -> None:
    applied = Applied().offer(0, 1, 2)
    applied.order.offer(0, b"garbage")
    assert applied.hashes == []
    assert (applied.order.counts.restarts, applied.order.counts.undecodable) == (1, 1)
    applied.offer(1, run=1)
    assert applied.hashes == [1001]


def test_messages_behind_a_gap_are_bounded() -> None:
    applied = Applied()
    applied.order = StreamOrder(applied.apply, applied.clear, max_pending=10)
    applied.offer(0, *range(2, 20))
    assert applied.order.gap is None
    assert applied.hashes == list(range(2, 20))
    assert applied.order.counts.unrecoverable == 1


@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_any_mixture_of_delay_and_repetition_applies_each_batch_once_in_order(
    count: int, chance: random.Random
) -> None:
    arrivals = sorted(range(count), key=lambda number: number + chance.uniform(0, 8))
    arrivals += [chance.randrange(count) for _ in range(count // 2)]
    repeated = [number for number in arrivals for _ in range(chance.choice([1, 1, 2]))]
    applied = Applied().offer(0, *repeated)
    assert applied.hashes == list(range(count))
    assert applied.order.counts.applied == count
    assert applied.clears == 0


@pytest.mark.parametrize("seed", range(5))
def test_losses_are_made_good_by_a_replay_from_the_gap(seed: int) -> None:
    chance = random.Random(seed)
    applied = Applied()
    for number in range(300):
        if chance.random() < 0.3 and number < 299:
            continue
        applied.offer(number)
        gap = applied.order.gap
        if gap is not None:
            for missing in range(gap.first, gap.last + 1):
                applied.order.offer(missing, payload(missing), is_replay=True)
    assert applied.hashes == list(range(300))
    assert applied.order.counts.replayed > 50
