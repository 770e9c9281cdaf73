"""Random workloads for two schedulers that run side by side: vLLM's (record_schedules.py) and ours (scheduler_runs.py).

Pure Python, so that both sides can import it. A workload is a dict of JSON values: "kind", "seed", "config" (limits of
the engine, under vLLM's names), "requests". A request has an "id", a "prompt" and an "out" (lists of [first token,
count]), "max_tokens", the "step" in which it arrives, an "arrival" time and a "priority".
"""

import hashlib
import random
from typing import Any

Workload = dict[str, Any]

KINDS = (
    "plain",
    "no-chunking",
    "watermark",
    "no-caching",
    "priority",
    "long-prefill",
    "unreserved",
    "hybrid-2",
    "hybrid-3",
    "states",
    "ngram",
    "eagle",
    "async",
)


def make_workload(kind: str, seed: int, num_requests: int = 40) -> Workload:
    """Make one random workload: multi-turn sessions that share system prompts, in a pool that is too small for all."""
    rng = random.Random(f"{kind}/{seed}")
    block_size = rng.choice((4, 8, 16, 32))
    max_model_len = rng.choice((256, 512, 1024))
    config: dict[str, Any] = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": rng.choice((2, 4, 8, 16, 64)),
        "max_num_batched_tokens": rng.choice((64, 128, 512)),
    }
    config["groups"] = [["full", block_size]]
    _change_for_kind(kind, rng, config)
    requests = _sessions(rng, max_model_len, num_requests, prioritized=config.get("policy") == "priority")
    longest = max(_count(r["prompt"]) + r["max_tokens"] for r in requests) + 2 * config.get("num_speculative_tokens", 0)
    alone = sum(_blocks_alone(group, min(longest, max_model_len), config) for group in config["groups"])
    config["num_blocks"] = int(alone * rng.choice((1.0, 1.1, 1.5, 2.5, 5.0))) + 2
    return {"kind": kind, "seed": seed, "config": config, "requests": requests}


def _blocks_alone(group: list[Any], num_tokens: int, config: dict[str, Any]) -> int:
    """Count the blocks that the longest request needs in a group when it runs alone."""
    if group[0] == "sliding":
        num_steps = 2 if config.get("async_scheduling") else 1
        num_tokens = min(num_tokens, group[2] - 1 + num_steps * config["max_num_batched_tokens"] + 2 * group[1])
    return -(-num_tokens // group[1])


def _change_for_kind(kind: str, rng: random.Random, config: dict[str, Any]) -> None:
    size, longest = config["block_size"], config["max_model_len"]
    if kind == "no-chunking":
        config.update(enable_chunked_prefill=False, max_num_batched_tokens=longest * rng.choice((1, 2)))
    elif kind == "watermark":
        config["watermark"] = rng.choice((0.01, 0.05, 0.2))
    elif kind == "no-caching":
        config["enable_prefix_caching"] = False
    elif kind == "priority":
        config["policy"] = "priority"
    elif kind == "long-prefill":
        config["long_prefill_token_threshold"] = rng.choice((10, 32, 100))
    elif kind == "unreserved":
        config["scheduler_reserve_full_isl"] = False
    elif kind in ("hybrid-2", "hybrid-3"):
        windows = [rng.choice((size, 9, 33, 64, 100)) for _ in range(int(kind[-1]) - 1)]
        config["groups"] += [["sliding", size, window] for window in windows]
    elif kind == "states":
        config["groups"].append(["state", size])
    elif kind in ("ngram", "eagle"):
        config.update(num_speculative_tokens=rng.choice((1, 2, 3, 5)), method=kind)
        config["max_num_batched_tokens"] = rng.choice((config["max_num_seqs"], 64, 128, 512))
    elif kind == "async":
        config["async_scheduling"] = True
        also = rng.choice(("plain", "plain", "priority", "long-prefill", "unreserved", "hybrid-2", "no-caching"))
        _change_for_kind(also, rng, config)
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["max_num_seqs"])


def _sessions(rng: random.Random, max_model_len: int, num_requests: int, prioritized: bool) -> list[dict[str, Any]]:
    next_token = 1000

    def fresh(count: int) -> list[int]:
        nonlocal next_token
        next_token += count
        return [next_token - count, count]

    scale = max_model_len / 512
    systems = [fresh(rng.randint(8, int(100 * scale))) for _ in range(4)]
    requests: list[dict[str, Any]] = []
    session, start, rate = 0, 0.0, rng.choice((0.1, 0.3, 1.0))
    while len(requests) < num_requests:
        context, step = [rng.choice(systems)], start
        for turn in range(rng.randint(1, 4)):
            context = [*context, fresh(rng.randint(1, int(80 * scale)))]
            out = fresh(rng.randint(1, int(80 * scale)))
            if _count(context) + out[1] >= max_model_len - 1:
                break
            requests.append(
                {"id": f"s{session}t{turn}", "prompt": context, "out": out, "max_tokens": out[1], "step": int(step)}
            )
            context = [*context, out]
            step += out[1] + rng.randint(1, 60)
        session += 1
        start += rng.expovariate(rate)
    requests = sorted(requests[:num_requests], key=lambda request: request["step"])
    for place, request in enumerate(requests):
        request.update(arrival=float(place), priority=rng.randint(0, 3) if prioritized else 0)
    return requests


def _count(parts: list[list[int]]) -> int:
    return sum(count for _, count in parts)


def tokens_of(parts: list[list[int]]) -> list[int]:
    """Spell out the tokens of a prompt."""
    return [token for first, count in parts for token in range(first, first + count)]


def num_accepted(workload: Workload, request_id: str, num_outputs: int, num_drafts: int) -> int:
    """Say how many of the drafts of a request with `num_outputs` output tokens are right: the same on both sides."""
    if not num_drafts:
        return 0
    digest = hashlib.sha256(f"{workload['seed']}/{request_id}/{num_outputs}".encode()).digest()
    return min(num_drafts, digest[0] % (workload["config"]["num_speculative_tokens"] + 1))


def digest_of(tables: dict[str, list[list[int]]], free_queue: list[int]) -> str:
    """Shorten the block tables of the running requests and the order of the free queue to a few letters."""
    return hashlib.sha256(f"{sorted(tables.items())}/{free_queue}".encode()).hexdigest()[:12]
