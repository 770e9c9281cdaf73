"""Runs our scheduler over a workload of scheduler_workloads.py and records what record_schedules.py records."""

from typing import Any

import numpy as np
from kvledger.core.allocator.allocator import KVCacheAllocator
from kvledger.core.allocator.config import AllocatorConfig
from kvledger.core.cache_kinds import CacheKind, FullAttention, SequenceState, SlidingWindow
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler
from kvledger.core.types import Request, ScheduledStep

from tests.parity.scheduler_workloads import Workload, digest_of, num_accepted, tokens_of

Step = dict[str, Any]


class TokenKeys:
    """A key source without hashing: the key of a block is all tokens up to its end."""

    def __init__(self, tokens: list[int], block_size: int) -> None:
        self.tokens = tokens
        self.block_size = block_size

    def keys(self, start: int, stop: int) -> list[tuple[int, ...]]:
        size = self.block_size
        return [tuple(self.tokens[: (i + 1) * size]) for i in range(start, min(stop, len(self.tokens) // size))]


def kind_of(group: list[Any]) -> CacheKind:
    if group[0] == "sliding":
        return SlidingWindow(group[1], group[2])
    return SequenceState(group[1]) if group[0] == "state" else FullAttention(group[1])


def scheduler_for(config: dict[str, Any]) -> Scheduler:
    num_drafts = config.get("num_speculative_tokens", 0)
    allocator = AllocatorConfig(
        num_blocks=config["num_blocks"],
        groups=[kind_of(group) for group in config["groups"]],
        max_model_len=config["max_model_len"],
        max_num_reqs=config["max_num_seqs"],
        enable_caching=config.get("enable_prefix_caching", True),
        retention_interval=config.get("retention_interval", 0),
        max_in_flight_tokens=config["max_num_batched_tokens"] * (2 if config.get("async_scheduling") else 1),
        watermark_blocks=int(config.get("watermark", 0.0) * config["num_blocks"]),
        use_eagle=config.get("method") == "eagle",
    )
    limits = SchedulerConfig(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        enable_chunked_prefill=config.get("enable_chunked_prefill", True),
        long_prefill_token_threshold=config.get("long_prefill_token_threshold", 0),
        policy=config.get("policy", "fcfs"),
        num_speculative_tokens=num_drafts,
        num_lookahead_tokens=0 if config.get("method") == "ngram" else -1,
        reserve_full_sequence=config.get("scheduler_reserve_full_isl", True),
    )
    return Scheduler(limits, KVCacheAllocator(allocator))


class Run:
    """One workload on our scheduler."""

    def __init__(self, workload: Workload, with_tables: bool = False) -> None:
        self.workload = workload
        self.scheduler = scheduler_for(workload["config"])
        self.with_tables = with_tables
        self.wanted = {request["id"]: request for request in workload["requests"]}
        self.requests: dict[str, Request] = {}
        self.steps: list[Step] = []
        self.is_async = workload["config"].get("async_scheduling", False)
        self.in_flight: list[tuple[ScheduledStep, dict[int, str], Step]] = []

    def submit(self, wanted: dict[str, Any]) -> None:
        tokens = tokens_of(wanted["prompt"])
        request = Request(
            wanted["id"],
            len(tokens),
            max_tokens=wanted["max_tokens"],
            keys=TokenKeys(tokens, self.workload["config"]["block_size"]),
            priority=wanted["priority"],
            arrival=wanted["arrival"],
        )
        self.requests[request.request_id] = request
        self.scheduler.submit(request)

    def run(self) -> list[Step]:
        pending = sorted(self.workload["requests"], key=lambda request: request["step"])
        number = 0
        while True:
            while pending and pending[0]["step"] <= number:
                self.submit(pending.pop(0))
            if not self.scheduler.has_unfinished and not self.in_flight:
                if not pending:
                    return self.steps
                number = pending[0]["step"]
                continue
            if not self.schedule(number) and not pending:
                raise RuntimeError(f"{self.workload['kind']} {self.workload['seed']} is stuck in step {number}")
            number += 1

    def schedule(self, number: int) -> bool:
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        preemptions = {name: request.num_preemptions for name, request in self.requests.items()}
        step = scheduler.schedule()
        running = [scheduler.request_in(row).request_id for row in scheduler.running_rows.tolist()]
        tables = {name: allocator.block_ids(name) for name in running}
        free_queue = allocator.pool.free_queue.order()
        entry: Step = {
            "step": number,
            "batch": {},
            "preempted": sorted(name for name, r in self.requests.items() if r.num_preemptions > preemptions[name]),
            "running": running,
            "finished": [],
            "free": allocator.num_free_blocks,
            "digest": digest_of(tables, free_queue),
        }
        if self.with_tables:
            entry |= {"tables": tables, "free_queue": free_queue}
            entry["keyed"] = [block for block, _ in allocator.pool.keyed_blocks()]
        self.steps.append(entry)
        if step is not None:
            rows = step.batch.rows.tolist()
            names = {row: scheduler.request_in(row).request_id for row in rows}
            drafts = [0] * len(rows) if step.num_draft_tokens is None else step.num_draft_tokens.tolist()
            columns = step.batch.first_positions.tolist(), step.batch.counts.tolist(), drafts
            entry["batch"] = {names[row]: list(values) for row, *values in zip(rows, *columns, strict=True)}
            self.in_flight.append((step, names, entry))
        if self.in_flight and (step is None or len(self.in_flight) == (2 if self.is_async else 1)):
            self.finish(*self.in_flight.pop(0))
            return True
        return step is not None

    def finish(self, step: ScheduledStep, names: dict[int, str], entry: Step) -> None:
        rows, scheduler = step.batch.rows.tolist(), self.scheduler
        drafts = [0] * len(rows) if step.num_draft_tokens is None else step.num_draft_tokens.tolist()
        places = {
            name: len(self.requests[name].keys.tokens) - self.requests[name].num_prompt_tokens
            for name in names.values()
        }
        accepted = [
            num_accepted(self.workload, names[row], places[names[row]], d) for row, d in zip(rows, drafts, strict=True)
        ]
        outcome = scheduler.complete(
            step, num_accepted_tokens=np.array(accepted, dtype=np.int64) if any(drafts) else None
        )
        for row, produced in zip(outcome.sampled.tolist(), outcome.produced.tolist(), strict=True):
            name = names[row]
            first = self.wanted[name]["out"][0] + places[name]
            self.requests[name].keys.tokens += range(first, first + produced)
        entry["finished"] = sorted(request.request_id for request in outcome.finished_requests)


def first_difference(ours: list[Step], theirs: list[Step]) -> str | None:
    """Describe the first step in which two runs differ; None where they are equal."""
    for place, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        for name in ("step", "preempted", "running", "batch", "finished", "free", "digest"):
            if our[name] != their[name]:
                where = f"step {their['step']} (entry {place}), {name}"
                return f"{where}: ours {_only(our, their, name)}, vLLM's {_only(their, our, name)}"
    if len(ours) != len(theirs):
        return f"ours has {len(ours)} steps, vLLM's {len(theirs)}"
    return None


def _only(one: Step, other: Step, name: str) -> Any:
    if name == "digest" and "tables" in one:
        tables = {k: v for k, v in one["tables"].items() if other["tables"].get(k) != v}
        return {"tables": tables, "free_queue": [*one["free_queue"][:12], "...", *one["free_queue"][-6:]]}
    if name == "batch":
        return {key: value for key, value in one[name].items() if other[name].get(key) != value}
    return one[name]
