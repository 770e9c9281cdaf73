"""Service-level objectives, and whether a run met them."""

import math
from typing import Any

import attrs

from ...core.errors import InputError
from ..engine.metrics import RequestRecord

PERCENT = 99


def _positive(_: object, attribute: "attrs.Attribute[float | None]", value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise InputError(f"{attribute.name} is {value}; it must be a number of seconds above 0")


@attrs.frozen(kw_only=True)
class Slo:
    """What a service promises; every given part must hold. None: not promised.

    Attributes:
        ttft_p99_s: the 99th percentile (nearest rank) of TTFT, queueing included, over all requests.
        tpot_p99_s: the same of TPOT, over requests of two tokens and more.
        goodput_share: share of requests that keep both limits below; needs one of them at least.
        ttft_s: limit of a single request, for the goodput.
        tpot_s: the same of TPOT; a request of one token keeps it.
    """

    ttft_p99_s: float | None = attrs.field(default=None, validator=_positive)
    tpot_p99_s: float | None = attrs.field(default=None, validator=_positive)
    goodput_share: float | None = None
    ttft_s: float | None = attrs.field(default=None, validator=_positive)
    tpot_s: float | None = attrs.field(default=None, validator=_positive)

    def __attrs_post_init__(self) -> None:
        has_limits = self.ttft_s is not None or self.tpot_s is not None
        if self.ttft_p99_s is None and self.tpot_p99_s is None and self.goodput_share is None:
            raise InputError(
                "what must the service keep? Give --slo-ttft-p99 SECONDS, --slo-tpot-p99 SECONDS, or --slo-goodput "
                "SHARE with --slo-ttft or --slo-tpot"
            )
        if (self.goodput_share is not None) != has_limits:
            raise InputError("--slo-goodput SHARE and a limit for each request (--slo-ttft, --slo-tpot) go together")
        if self.goodput_share is not None and not 0 < self.goodput_share <= 1:
            raise InputError(f"--slo-goodput is {self.goodput_share}; it must be a share above 0 and at most 1")

    def as_dict(self) -> dict[str, float]:
        """The promises made."""
        return {name: value for name, value in attrs.asdict(self).items() if value is not None}


@attrs.frozen(kw_only=True)
class Verdict:
    """Whether a run met an SLO.

    Attributes:
        met: whether every promise held.
        figures: for each promise: `limit`, `value` (None: no sample, or never, where more requests were refused than
            the promise leaves room for) and `met`.
    """

    met: bool
    figures: dict[str, dict[str, Any]]


class SloTally:
    """Collects the times of the finished requests of one run: `tally.finished` is its `on_finished`."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._num_good = 0
        self._num_late = {"ttft_p99_s": 0, "tpot_p99_s": 0, "goodput_share": 0}

    def finished(self, record: RequestRecord) -> None:
        """A request finished."""
        slo = self._slo
        self._ttft_s.append(record.ttft_s)
        if record.tpot_s is not None:
            self._tpot_s.append(record.tpot_s)
        in_time = slo.ttft_s is None or record.ttft_s <= slo.ttft_s
        is_good = in_time and (slo.tpot_s is None or record.tpot_s is None or record.tpot_s <= slo.tpot_s)
        self._num_good += is_good
        late = self._num_late
        late["goodput_share"] += not is_good
        late["ttft_p99_s"] += slo.ttft_p99_s is not None and record.ttft_s > slo.ttft_p99_s
        late["tpot_p99_s"] += slo.tpot_p99_s is not None and (record.tpot_s or 0.0) > slo.tpot_p99_s

    def is_lost(self, num_requests: int) -> bool:
        """Whether the promises are broken already, however the rest of `num_requests` requests fares."""
        return any(count > room for count, room in self._rooms(num_requests).values())

    def _rooms(self, num_requests: int) -> dict[str, tuple[int, int]]:
        """For each promise: how many requests were late, and how many may be of `num_requests`.

        Fewer requests have a TPOT than there are, so its room is an upper bound.
        """
        room = num_requests - max(1, -(-PERCENT * num_requests // 100))
        rooms = {name: (self._num_late[name], room) for name in ("ttft_p99_s", "tpot_p99_s")}
        if self._slo.goodput_share is not None:
            good = math.ceil(self._slo.goodput_share * num_requests - 1e-9)
            rooms["goodput_share"] = (self._num_late["goodput_share"], num_requests - good)
        return rooms

    def lost(self) -> Verdict:
        """The run was ended because the SLO could not be met any more: no figure is final."""
        limits = self._slo.as_dict()
        named = [name for name in self._num_late if name in limits]
        return Verdict(
            met=False,
            figures={
                name: {"limit": limits[name], "value": None, "met": None, "num_late": self._num_late[name]}
                for name in named
            },
        )

    def verdict(self, num_requests: int) -> Verdict:
        """The run of `num_requests` requests is over; those that did not finish never got a token."""
        slo = self._slo
        num_lost = num_requests - len(self._ttft_s)
        figures: dict[str, dict[str, Any]] = {}
        if slo.ttft_p99_s is not None:
            figures["ttft_p99_s"] = _within(slo.ttft_p99_s, _percentile(self._ttft_s, num_lost))
        if slo.tpot_p99_s is not None:
            figures["tpot_p99_s"] = _within(slo.tpot_p99_s, _percentile(self._tpot_s, num_lost))
        if slo.goodput_share is not None:
            share = self._num_good / num_requests if num_requests else 1.0
            figures["goodput_share"] = {"limit": slo.goodput_share, "value": share, "met": share >= slo.goodput_share}
        return Verdict(met=all(figure["met"] for figure in figures.values()), figures=figures)


def _within(limit: float, value: float | None) -> dict[str, Any]:
    is_finite = value is not None and math.isfinite(value)
    return {"limit": limit, "value": value if is_finite else None, "met": value is None or value <= limit}


def _percentile(samples: list[float], num_lost: int) -> float | None:
    """Nearest rank over the samples and as many infinite ones as requests were lost."""
    count = len(samples) + num_lost
    if not count:
        return None
    rank = max(1, -(-PERCENT * count // 100))
    return sorted(samples)[rank - 1] if rank <= len(samples) else math.inf
