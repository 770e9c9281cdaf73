"""Requests drawn from a fitted workload: the same shape as the trace it was fitted to, under ids of its own."""

from collections.abc import Iterator

import numpy as np

from ..random_draws import Draws
from ..traces.sessions import TurnRecord
from .fit import BRANCHES, CONTINUES, FRESH, REPEATS, UNKNOWN_S, FittedParameters, IntArray
from .stream import BlockIds, TurnRequest

# How far around the age that was drawn the best earlier request is looked for: this many requests and this share of
# the age. A longer prompt is rarer, so that it takes a wider look to find one.
SEARCH_WINDOW = 32
SEARCH_SHARE = 4
# Worse than any difference in length: an earlier request that was continued already.
_CONTINUED = 1 << 40


def fitted_requests(parameters: FittedParameters, seed: int) -> Iterator[TurnRequest]:
    """Requests for ever, in order of arrival from 0 s on."""
    draws = Draws(seed)
    generator = _Generator(parameters)
    for now in parameters.arrivals.times(draws):
        yield (now, *generator.next_request(draws))


class _Generator:
    """Holds the requests that later ones may build on: as many as the largest age."""

    def __init__(self, parameters: FittedParameters) -> None:
        self._parameters = parameters
        self._samples = parameters.samples
        self._block_size = parameters.block_size
        self._new_ids = BlockIds()
        largest_age = int(max(self._samples.age.max(), self._samples.turn_age.max()))
        self._held = largest_age + _search_window(largest_age) + 1
        self._lengths: IntArray = np.zeros(self._held, dtype=np.int64)
        self._penalties: IntArray = np.zeros(self._held, dtype=np.int64)
        self._ids: list[list[int]] = [[]] * self._held
        self._num_made = 0

    def next_request(self, draws: Draws) -> tuple[int, int, tuple[int, ...] | None, TurnRecord | None]:
        """(input length, output length, hash ids, session facts) of one more request."""
        sample = self._draw_sample(draws)
        samples = self._samples
        kind = int(samples.kind[sample])
        if kind == FRESH:
            earlier, length, ids = None, int(samples.new_tokens[sample]), []
        else:
            earlier = self._find_earlier(sample, kind)
            length, ids = self._built_on(earlier, sample, kind)
        if self._block_size is not None and kind != REPEATS:
            ids = ids + self._new_ids.new(-(-length // self._block_size) - len(ids))
        record = self._turn(sample, earlier)
        self._hold(length, ids)
        return length, int(samples.output_length[sample]), self._known(ids, length), record

    def _draw_sample(self, draws: Draws) -> int:
        """One whose earlier request can have been made by now."""
        while True:
            sample = int(draws.uniform() * len(self._samples))
            if self._samples.age[sample] <= self._num_made and self._samples.turn_age[sample] <= self._num_made:
                return sample
            if not self._num_made and not (self._samples.kind == FRESH).any():
                return sample

    def _find_earlier(self, sample: int, kind: int) -> int:
        """The number of the earlier request that is most like the one described, about as many requests ago."""
        samples = self._samples
        age = int(samples.age[sample])
        target = self._num_made - age
        window = _search_window(age)
        numbers = np.arange(max(target - window, 0), min(target + window + 1, self._num_made))
        at = numbers % self._held
        distance = np.abs(numbers - target)
        if kind == BRANCHES:
            too_short = self._lengths[at] < samples.shared_blocks[sample] * (self._block_size or 1)
            costs = distance + too_short * _CONTINUED
        else:
            wanted = int(samples.earlier_length[sample])
            costs = np.abs(self._lengths[at] - wanted) + wanted * distance // (8 * window)
            if kind == CONTINUES:
                costs = costs + self._penalties[at]
        return int(numbers[int(costs.argmin())])

    def _built_on(self, earlier: int, sample: int, kind: int) -> tuple[int, list[int]]:
        """The length of the new prompt, and the ids that it has from the earlier one."""
        samples, block_size = self._samples, self._block_size or 1
        at = earlier % self._held
        earlier_length, earlier_ids = int(self._lengths[at]), self._ids[at]
        new_tokens = int(samples.new_tokens[sample])
        if kind == REPEATS:
            return earlier_length, earlier_ids
        if kind == CONTINUES:
            self._penalties[at] = _CONTINUED
            return earlier_length + new_tokens, earlier_ids[: earlier_length // block_size]
        kept = min(int(samples.shared_blocks[sample]), earlier_length // block_size)
        return kept * block_size + new_tokens, earlier_ids[:kept]

    def _turn(self, sample: int, earlier: int | None) -> TurnRecord | None:
        """The request as a turn after the one it builds on, or after one about as far back as its turn was."""
        samples, number = self._samples, self._num_made
        if not self._parameters.links_turns:
            return None
        turn_age = int(samples.turn_age[sample])
        if not turn_age:
            after = None
        elif earlier is not None and turn_age == samples.age[sample]:
            after = earlier
        else:
            after = number - turn_age
        return TurnRecord(
            key=number,
            after=() if after is None else (after,),
            think_s=_seconds(samples.think_s[sample]),
            keeps_own_gap=samples.think_s[sample] == UNKNOWN_S,
            answered_s=_seconds(samples.answered_s[sample]),
        )

    def _hold(self, length: int, ids: list[int]) -> None:
        at = self._num_made % self._held
        self._lengths[at], self._penalties[at], self._ids[at] = length, 0, ids
        self._num_made += 1

    def _known(self, ids: list[int], length: int) -> tuple[int, ...] | None:
        """The ids as the trace would name them: none, one for every block, or one for every full block."""
        if self._block_size is None:
            return None
        return tuple(ids[: length // self._block_size] if self._parameters.full_blocks_only else ids)


def _search_window(age: int) -> int:
    return SEARCH_WINDOW + age // SEARCH_SHARE


def _seconds(value: float) -> float | None:
    return None if value == UNKNOWN_S else float(value)
