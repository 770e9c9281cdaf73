"""Decode throughput of contenders in turn, and step times against calibrated predictions; figures need a card.

The time for n output tokens less the time for one is what n - 1 decode steps took, whoever serves: prompts, queues and
set-up are in both.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import attrs

from bench.live_contenders import Contender, Prompts

T = TypeVar("T")


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


class Contest:
    """Contenders side by side. One that fails is left out from there on, so that the others are measured all the same.

    Attributes:
        failures: name -> what a contender failed with.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Contender]]) -> None:
        """Start every contender, in the order given.

        Args:
            makers: name, in case it fails -> what starts it.
        """
        self.failures: dict[str, str] = {}
        self._contenders: dict[str, Contender] = {}
        for name, make in makers.items():
            contender = self._tried(name, make)
            if contender is not None:
                self._contenders[name] = contender

    def _tried(self, name: str, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except Exception as error:
            self.failures[name] = f"{type(error).__name__}: {error}"
            return None

    def decode_in_turn(self, clock: SecondsClock, prompts: Prompts, *, num_tokens: int, rounds: int) -> list[Decoding]:
        """Every contender once a round, in the order given; a round before the first is not counted.

        Args:
            clock: what times them.
            prompts: of the requests that run side by side.
            num_tokens: output tokens of each, at least 2.
            rounds: that are counted.

        Returns:
            What those did that did not fail; another number of output tokens than was asked for is a failure.
        """
        timed: dict[str, list[_Round]] = {name: [] for name in self._contenders}
        for _ in range(rounds + 1):
            for name, contender in self._contenders.items():
                if name not in self.failures:
                    found = self._tried(name, partial(_decode_once, clock, contender, prompts, num_tokens))
                    timed[name] += [] if found is None else [found]
        return [
            Decoding(
                name=contender.name,
                num_reqs=len(prompts),
                num_tokens=num_tokens,
                one_s=tuple(each.one_s for each in timed[name][1:]),
                all_s=tuple(each.all_s for each in timed[name][1:]),
                outputs=timed[name][-1].outputs,
            )
            for name, contender in self._contenders.items()
            if name not in self.failures
        ]

    def close(self) -> None:
        """Free what the contenders kept."""
        for name, contender in self._contenders.items():
            self._tried(name, contender.close)


@attrs.frozen
class _Round:
    """One contender in one round."""

    one_s: float
    all_s: float
    outputs: list[list[int]]


def _decode_once(clock: SecondsClock, contender: Contender, prompts: Prompts, num_tokens: int) -> _Round:
    one_s, _ = _timed(clock, lambda: contender.generate(prompts, 1))
    all_s, outputs = _timed(clock, lambda: contender.generate(prompts, num_tokens))
    if any(len(output) != num_tokens for output in outputs):
        raise ValueError(f"{contender.name} did not produce {num_tokens} tokens of each request")
    return _Round(one_s, all_s, outputs)


def _timed(clock: SecondsClock, run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    began = clock.now_s()
    outputs = run()
    return clock.now_s() - began, outputs


HEADINGS = ("decode", "requests", "tokens/s", "ms a step", "of the first", "same tokens as the first")


def throughput_table(decodings: Sequence[Decoding], failures: Mapping[str, str]) -> str:
    """The figures, with the first contender as what the others are held to; and who failed, with what."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    lines += [
        (
            each.name,
            str(each.num_reqs),
            f"{each.tokens_per_s:,.0f}",
            f"{each.step_s * 1e3:.3f}",
            f"{each.tokens_per_s / decodings[0].tokens_per_s:.2f} x",
            f"{each.agreement(decodings[0]):.0%}",
        )
        for each in decodings
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (tuple(zip(line, widths, strict=True)) for line in lines)
    ]
    told = [f"{name} failed: {error}" for name, error in failures.items()]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], *told])
