"""Links between engines that copy keys and values: bandwidth, latency, and how copies share a link."""

import math
from collections.abc import Callable, Iterable

import attrs
import simpy

from ...core.errors import InputError
from ..figures import must_be, not_negative

NANOSECONDS = 1_000_000_000
SHARINGS = ("fair", "fifo")


@attrs.frozen(kw_only=True)
class TransferModel:
    """How long a copy from one engine to another takes.

    `bytes_per_s` is the bandwidth of each engine's link, out of a prefill engine and into a decode engine; infinite:
    copies take no time. `latency_s` passes before the first byte of a transfer moves. The transfers of one link share
    it: "fair" (max-min fair: no transfer gets more while another gets less than it could use) or "fifo" (the transfer
    that began first gets all that its two links have left). `bytes_per_block` move over one GPU's link: every rank of a
    replica copies its shard over its own link, side by side.
    """

    bytes_per_s: float = attrs.field(
        validator=must_be("more than 0 bytes a second (inf: no time)", lambda value: value > 0)
    )
    latency_s: float = attrs.field(default=0.0, validator=not_negative)
    sharing: str = attrs.field(default="fair", validator=attrs.validators.in_(SHARINGS))
    bytes_per_block: float | None = None

    def __attrs_post_init__(self) -> None:
        if math.isfinite(self.bytes_per_s) and not self.bytes_per_block:
            raise InputError("a finite transfer bandwidth needs the bytes of a block: give a model, or the bytes")

    def assumptions(self) -> dict[str, object]:
        """The model's parameters, for the report."""
        shared = "shared max-min fair" if self.sharing == "fair" else "first come, first served"
        speed = f"{self.bytes_per_s / 1e9:g} GB/s out of and into each engine, {shared}"
        return {
            "kv_transfer": speed if math.isfinite(self.bytes_per_s) else "no time but latency",
            "kv_transfer_latency_s": self.latency_s,
            "kv_transfer_bytes_per_block": self.bytes_per_block,
        }


@attrs.define(eq=False)
class _Copy:
    source: int
    target: int
    bytes_left: float
    done: Callable[[], None]
    bytes_per_ns: float = 0.0
    ends_ns: float = math.inf


class KVLinks:
    """Copies in progress, as fluids: the links are shared again when a copy begins or ends. Whole nanoseconds."""

    def __init__(self, env: simpy.Environment, model: TransferModel) -> None:
        self._env = env
        self._model = model
        self._latency_ns = round(model.latency_s * NANOSECONDS)
        self._capacity = model.bytes_per_s / NANOSECONDS
        self._copies: list[_Copy] = []
        self._joining: dict[_Copy, int] = {}
        self._as_of_ns = 0
        self._next_end_ns = math.inf
        self.num_bytes = 0.0

    def start(self, source: int, target: int, num_blocks: int, done: Callable[[], None]) -> None:
        """Copy blocks from a prefill engine to a decode engine; `done` is called at the end, never during this call."""
        num_bytes = num_blocks * (self._model.bytes_per_block or 0)
        self.num_bytes += num_bytes
        copy = _Copy(source, target, num_bytes, done)
        self._joining[copy] = int(self._env.now) + self._latency_ns
        self._env.timeout(self._latency_ns).callbacks.append(lambda _: self._join(copy))

    def earliest_end_ns(self) -> float:
        """The earliest time at which a copy ends; infinite without copies."""
        return min(self._next_end_ns, *self._joining.values(), math.inf)

    def _join(self, copy: _Copy) -> None:
        del self._joining[copy]
        if not math.isfinite(self._capacity) or not copy.bytes_left:
            copy.done()
            return
        self._advance()
        self._copies.append(copy)
        self._share()

    def _advance(self) -> None:
        """Account for the bytes that moved since the links were last shared."""
        elapsed = int(self._env.now) - self._as_of_ns
        self._as_of_ns += elapsed
        for copy in self._copies:
            copy.bytes_left = max(copy.bytes_left - elapsed * copy.bytes_per_ns, 0.0)

    def _share(self) -> None:
        """Set every copy's rate, and schedule the end of the first one."""
        if self._model.sharing == "fair":
            _share_fairly(self._copies, self._capacity)
        else:
            _share_in_order(self._copies, self._capacity)
        now = int(self._env.now)
        for copy in self._copies:
            copy.ends_ns = now + math.ceil(copy.bytes_left / copy.bytes_per_ns) if copy.bytes_per_ns else math.inf
        self._next_end_ns = min((copy.ends_ns for copy in self._copies), default=math.inf)
        if math.isfinite(self._next_end_ns):
            self._env.timeout(int(self._next_end_ns) - now).callbacks.append(self._end_copies)

    def _end_copies(self, _: simpy.Event) -> None:
        now = int(self._env.now)
        if now != self._next_end_ns:
            return  # the links were shared again since this was scheduled
        ended = [copy for copy in self._copies if copy.ends_ns <= now]
        self._advance()
        self._copies = [copy for copy in self._copies if copy.ends_ns > now]
        self._share()
        for copy in ended:
            copy.done()


def _share_fairly(copies: Iterable[_Copy], capacity: float) -> None:
    """Max-min fairness over both ends of each copy: raise all rates, and fix those on the link that fills up first."""
    left: dict[tuple[str, int], float] = {}
    users: dict[tuple[str, int], list[_Copy]] = {}
    for copy in copies:
        for end in _ends(copy):
            left[end] = capacity
            users.setdefault(end, []).append(copy)
    open_copies = dict.fromkeys(copies)
    while open_copies:
        tightest = min(users, key=lambda end: left[end] / len(users[end]))
        rate = left[tightest] / len(users[tightest])
        for copy in list(users[tightest]):
            copy.bytes_per_ns = rate
            del open_copies[copy]
            for end in _ends(copy):
                left[end] -= rate
                users[end].remove(copy)
        users = {end: those for end, those in users.items() if those}


def _share_in_order(copies: Iterable[_Copy], capacity: float) -> None:
    """Each copy, in the order in which they began, gets what both of its links have left."""
    left: dict[tuple[str, int], float] = {}
    for copy in copies:
        ends = _ends(copy)
        copy.bytes_per_ns = min(left.get(end, capacity) for end in ends)
        for end in ends:
            left[end] = left.get(end, capacity) - copy.bytes_per_ns


def _ends(copy: _Copy) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("out", copy.source), ("in", copy.target)
