"""Decode throughput of contenders in turn, and step times against calibrated predictions; figures need a card.

The time for n output tokens less the time for one is what n - 1 decode steps took, whoever serves: prompts, queues and
set-up are in both.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs

from bench.live_contenders import Contender, Prompts


class SecondsClock(Protocol):
    """Seconds of the host's clock, read when the device has nothing left to do."""

    def now_s(self) -> float:
        """Seconds from any beginning."""
        ...


@attrs.frozen(eq=False)
class CardClock:
    """The host's clock behind a wait for the card."""

    torch: Any

    def now_s(self) -> float:
        """See `SecondsClock`."""
        self.torch.cuda.synchronize()
        return time.perf_counter()


@attrs.frozen(kw_only=True)
class Decoding:
    """What one contender did.

    Attributes:
        name: of the contender.
        num_reqs: requests side by side.
        num_tokens: output tokens of each.
        one_s, all_s: seconds for one token of each request, and for all of them, a round each.
        outputs: of the last round, `[num_reqs][num_tokens]`.
    """

    name: str
    num_reqs: int
    num_tokens: int
    one_s: tuple[float, ...]
    all_s: tuple[float, ...]
    outputs: list[list[int]] = attrs.field(repr=False)

    @property
    def step_s(self) -> float:
        """Seconds of one decode step, by the medians.

        Raises:
            ValueError: more tokens took no longer than one.
        """
        seconds = statistics.median(self.all_s) - statistics.median(self.one_s)
        if seconds <= 0:
            raise ValueError(f"{self.name}: {self.num_tokens} tokens took {seconds} s more than one: nothing to divide")
        return seconds / (self.num_tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of all requests together, prompts left out."""
        return self.num_reqs / self.step_s

    def agreement(self, other: "Decoding") -> float:
        """Share of output tokens that are the other contender's, up to the first difference of each request."""
        alike = 0
        for mine, theirs in zip(self.outputs, other.outputs, strict=True):
            alike += next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), len(mine))
        return alike / (self.num_reqs * self.num_tokens)


def decode_in_turn(
    clock: SecondsClock, contenders: Sequence[Contender], prompts: Prompts, *, num_tokens: int, rounds: int
) -> list[Decoding]:
    """Every contender once a round, in the order given; a round before the first is not counted.

    Args:
        clock: what times them.
        contenders: started.
        prompts: of the requests that run side by side.
        num_tokens: output tokens of each, at least 2.
        rounds: that are counted.

    Raises:
        ValueError: another number of output tokens than was asked for.
    """
    ones: dict[int, list[float]] = {place: [] for place in range(len(contenders))}
    alls: dict[int, list[float]] = {place: [] for place in range(len(contenders))}
    outputs: dict[int, list[list[int]]] = {}
    for _ in range(rounds + 1):
        for place, contender in enumerate(contenders):
            ones[place].append(_timed(clock, lambda each=contender: each.generate(prompts, 1))[0])
            seconds, outputs[place] = _timed(clock, lambda each=contender: each.generate(prompts, num_tokens))
            alls[place].append(seconds)
            if any(len(output) != num_tokens for output in outputs[place]):
                raise ValueError(f"{contender.name} did not produce {num_tokens} tokens of each request")
    return [
        Decoding(
            name=contender.name,
            num_reqs=len(prompts),
            num_tokens=num_tokens,
            one_s=tuple(ones[place][1:]),
            all_s=tuple(alls[place][1:]),
            outputs=outputs[place],
        )
        for place, contender in enumerate(contenders)
    ]


def _timed(clock: SecondsClock, run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    began = clock.now_s()
    outputs = run()
    return clock.now_s() - began, outputs


HEADINGS = ("decode", "requests", "tokens/s", "ms a step", "of the first", "same tokens as the first")


def throughput_table(decodings: Sequence[Decoding]) -> str:
    """The figures; the first contender is what the others are held to."""
    first = decodings[0]
    lines: list[tuple[str, ...]] = [HEADINGS]
    lines += [
        (
            each.name,
            str(each.num_reqs),
            f"{each.tokens_per_s:,.0f}",
            f"{each.step_s * 1e3:.3f}",
            f"{each.tokens_per_s / first.tokens_per_s:.2f} x",
            f"{each.agreement(first):.0%}",
        )
        for each in decodings
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (tuple(zip(line, widths, strict=True)) for line in lines)
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])
