"""What field reports share: a ledger, a scheduler and a simulated engine of a given size, and `kvledger follow`."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kvledger.core import AllocatorConfig, CacheKind, EventLog, FullAttention, KVCacheAllocator, PrefixMatch, Request
from kvledger.core.keys.block_hash import block_hasher
from kvledger.core.keys.extra_keys import ExtraKeys
from kvledger.core.keys.token_keys import TokenKeySource
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler
from kvledger.core.types import StepLoad

from tests.field.kv_streams import Followed


class DrivenLedger:
    """An allocator with a log, and requests made from tokens."""

    def __init__(
        self, num_usable_blocks: int, block_size: int = 16, groups: Sequence[CacheKind] = (), **config: Any
    ) -> None:
        self.log = EventLog()
        settings = {
            "groups": groups or [FullAttention(block_size)],
            "max_model_len": 1 << 16,
            "max_num_reqs": 64,
        } | config
        self.allocator = KVCacheAllocator(AllocatorConfig(num_blocks=num_usable_blocks + 1, **settings), [self.log])
        self.pool = self.allocator.pool

    def request(self, request_id: str, tokens: Sequence[int], extra_keys: ExtraKeys | None = None) -> Request:
        size = self.allocator.config.hash_block_size
        keys = TokenKeySource(list(tokens), block_hasher(), size, extra_keys or ExtraKeys())
        return Request(request_id, len(tokens), max_tokens=1 << 16, keys=keys)

    def admit(self, request: Request) -> PrefixMatch:
        """Look up and allocate the whole prompt."""
        match = self.allocator.match_prefix(request)
        taken = self.allocator.allocate(request, request.num_tokens - match.num_hit_tokens, match)
        assert taken is not None
        return match

    def serve(self, request_id: str, tokens: Sequence[int], extra_keys: ExtraKeys | None = None) -> int:
        """Admit a request and finish it. Returns the tokens that hit."""
        hit = self.admit(self.request(request_id, tokens, extra_keys)).num_hit_tokens
        self.allocator.free(request_id)
        return hit

    def table(self, request_id: str) -> list[int]:
        return self.allocator.block_ids(request_id)[0]

    def snapshot(self) -> dict[str, Any]:
        """Everything: the state, and how long the log is."""
        return {"state": self.allocator.state.snapshot(), "commits": len(self.log)}


@pytest.fixture
def ledger_of() -> Callable[..., DrivenLedger]:
    return DrivenLedger


class DrivenScheduler(Scheduler):
    """A scheduler over a pool of `num_blocks`, the null block among them, and requests made from lengths."""

    def __init__(self, num_blocks: int, *, caching: bool = True, **limits: Any) -> None:
        allocator = KVCacheAllocator(
            AllocatorConfig(
                num_blocks=num_blocks,
                groups=[FullAttention(16)],
                max_model_len=1 << 16,
                max_num_reqs=64,
                enable_caching=caching,
            )
        )
        super().__init__(SchedulerConfig(**{"max_num_seqs": 64, **limits}), allocator)

    def submit_new(self, name: str, prompt: int, output: int, ordinal: int | None = None, **more: Any) -> None:
        """A request of so many tokens; with an ordinal it has keys, and shares no content with any other ordinal."""
        from kvledger.sim.engine.arrivals import TraceKeySource  # needs simpy, which a machine with a GPU may lack

        keys = None if ordinal is None else TraceKeySource(None, prompt, ordinal, 16, None)
        self.submit(Request(name, prompt, output, keys, **more))

    def num_preemptions_of(self, request_id: str) -> int:
        """How often a request has been preempted so far; 0 for one that is not being served."""
        request = self._requests.get(request_id)
        return request.num_preemptions if request is not None else 0

    def run_to_the_end(self, max_steps: int = 10_000) -> int:
        """Steps until nothing is left; every step computes something, or the scheduler is stuck."""
        steps = 0
        while self.has_unfinished:
            step = self.schedule()
            assert step is not None and step.batch.num_tokens > 0
            self.complete(step)
            steps += 1
            assert steps < max_steps
        return steps


@pytest.fixture
def scheduler_of() -> Callable[..., DrivenScheduler]:
    return DrivenScheduler


class Scripted:
    """Steps that take the seconds they are told to, one after the other, then 0.1."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def step_seconds(self, load: StepLoad) -> float:
        return self.seconds.pop(0) if self.seconds else 0.1

    def assumptions(self) -> dict[str, Any]:
        return {}


def simulate(
    *requests: tuple[float, int, int],
    num_blocks: int = 100,
    step_seconds: Sequence[float] | None = None,
    macro_steps: bool = True,
) -> dict[str, Any]:
    """The report of a replay of (arrival in seconds, prompt tokens, output tokens); a step takes 0.1 s unless told."""
    from kvledger.sim.engine.replay import replay
    from kvledger.sim.latency.linear import LinearLatency
    from kvledger.sim.traces import TraceRequest

    trace = [TraceRequest(*request, None, place) for place, request in enumerate(requests, 1)]
    return replay(
        trace,
        allocator=AllocatorConfig(
            num_blocks=num_blocks, groups=[FullAttention(16)], max_model_len=4096, max_num_reqs=16, retention_interval=0
        ),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
        latency=LinearLatency(0.1, 0.0, 0.0) if step_seconds is None else Scripted(*step_seconds),
        trace_block_size=32,
        macro_steps=macro_steps,
    ).to_json()


@pytest.fixture
def simulated() -> Callable[..., dict[str, Any]]:
    return simulate


class HoldsAllButTheLast:
    """Another engine that has the content of every prompt but its last token."""

    def num_tokens_after(self, request: Request, num_hit_tokens: int) -> int:
        return request.num_prompt_tokens - 1 - num_hit_tokens

    def admitted(self, request: Request, num_tokens: int) -> None:
        pass


@pytest.fixture
def copying() -> tuple[DrivenLedger, Scheduler]:
    """A ledger of 8 blocks of 4 tokens, and a scheduler with one request, "d", whose content is being copied in."""
    ledger = DrivenLedger(8, block_size=4)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(limits, ledger.allocator, remote=HoldsAllButTheLast())
    request = ledger.request("d", range(17))
    request.max_tokens = 4
    scheduler.submit(request)
    assert scheduler.schedule() is None
    return ledger, scheduler


@pytest.fixture
def follow(tmp_path, monkeypatch, capsys) -> Callable[..., Followed]:
    """Record payloads, or (time, events) batches in msgpack, and follow them on the command line: 8 usable blocks."""
    from kvledger.sim.commands.cli import main

    msgpack = pytest.importorskip("msgspec").msgpack
    from kvledger.backends.sinks.kv_events.file import KVEventFileWriter

    def run(*messages: Any, options: Sequence[str] = ("--num-gpu-blocks", "9")) -> Followed:
        path, trace = tmp_path / "stream.kve", tmp_path / "seen.jsonl"
        path.unlink(missing_ok=True)
        trace.unlink(missing_ok=True)
        writer = KVEventFileWriter(path)
        for sequence, message in enumerate(messages):
            writer.write(sequence, message if isinstance(message, bytes) else msgpack.encode(list(message)))
        writer.close()
        arguments = ["follow", str(path), "--json", "--trace-out", str(trace), *options]
        monkeypatch.setattr(sys, "argv", ["kvledger", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        rows = [json.loads(line) for line in trace.read_text().splitlines()]
        return Followed(int(ended.value.code or 0), out, err, rows)

    return run
