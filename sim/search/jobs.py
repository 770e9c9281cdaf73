"""Runs a command's job by name, with options as text, and returns its JSON document; used by sweeps."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ...core.errors import InputError, KVLedgerError
from ..figures import Document
from ..scenario.options import OptionSet, read_texts, spelled
from ..scenario.scenario import Scenario
from ..scenario.traffic import BENCHMARK

TRACE = (
    *("trace", "workload", "fit", "trace_block_size", "trace_format", "timestamp_unit", "tokenizer", "request_rate"),
    *(*BENCHMARK, "on_bad_row", "skip_first", "limit", "rate_scale", "seed"),
)
_NAMES = [field.name for field in attrs.fields(Scenario)]
# One engine on a trace: the fields up to the seed; those after it describe a deployment's memory in more detail.
REPLAY = tuple(_NAMES[: _NAMES.index("seed") + 1])
FLEET = (*(name for name in REPLAY if name != "n"), "data_parallel_size")
# A recorded run has its requests, so options that choose requests do not apply.
RERUN = tuple(name for name in REPLAY if name == "seed" or name not in (*TRACE, "n"))
SIZE = tuple(name for name in FLEET if name not in ("closed_loop", "tensor_parallel_size"))
BLOCK_SIZE = tuple(name for name in REPLAY if name != "block_size")
# Eviction policies are compared on prompts alone, one after the other.
OPTIMUM = (
    *TRACE,
    *("model", "gpu", "num_gpu_blocks_override", "block_size", "gpu_memory_utilization", "tensor_parallel_size"),
    *("pipeline_parallel_size", "quantization", "kv_cache_dtype", "kv_cache_memory_bytes", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "latency", "base_ms", "us_per_prefill_token"),
    *("us_per_decoding_sequence", "latency_table", "kernel_profile", "calibration", "async_scheduling"),
)
CURVE = (*TRACE, "block_size", "model", "kv_cache_dtype")
COMPARE = (
    *(name for name in TRACE if name != "rate_scale"),
    *("num_gpu_blocks_override", "kv_cache_memory_bytes", "model", "kv_cache_dtype", "max_model_len", "block_size"),
    "max_num_seqs",
)
DEPLOYMENT = (
    *("model", "gpu", "total_memory", "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype", "quantization"),
    *("tensor_parallel_size", "pipeline_parallel_size", "enable_prefix_caching", "enforce_eager", "startup_log"),
)
DRAFTS = ("num_speculative_tokens", "speculative_method", "num_draft_layers", "draft_model", "engine_version")
PLAN = (*DEPLOYMENT, *DRAFTS, "async_scheduling", *_NAMES[_NAMES.index("seed") + 1 :])
# A measured run brings its requests; what it states of its server need not be given.
EXPLAIN = tuple(name for name in RERUN if name not in ("closed_loop", "rate_scale"))
STUDY = (*DEPLOYMENT, "async_scheduling", "http_ms", *(name for name in TRACE if name != "fit"))
SAMPLING = (*(name for name in TRACE if name not in ("request_rate", "rate_scale")), "block_size")


def option_sets(command: str) -> tuple[tuple[OptionSet, ...], Callable[..., Any]]:
    """The options of a command that can be swept, and its job, which takes an instance of each set's class.

    Raises InputError: there is no such command.
    """
    from ..scenario import compare, curve, fleet, plan, replay
    from . import optimum, size_question, size_search

    jobs: dict[str, tuple[tuple[str, ...], type | None, Callable[..., Any]]] = {
        "replay": (REPLAY, None, replay.replay_scenario),
        "fleet": (FLEET, fleet.FleetOptions, fleet.replay_fleet_scenario),
        "curve": (CURVE, curve.CurveOptions, curve.curve_of_scenario),
        "compare": (COMPARE, compare.CompareOptions, compare.compare_scenario),
        "plan": (PLAN, plan.PlanOptions, plan.plan_or_explain),
        "size": (SIZE, size_question.SizeOptions, size_search.size_fleet),
        "optimum": (OPTIMUM, optimum.OptimumOptions, optimum.optimum_worth),
    }
    if command not in jobs:
        raise InputError(f"--command is {command!r}; it is one of {', '.join(jobs)}")
    names, own, run = jobs[command]
    return (OptionSet.of(Scenario, names), *(() if own is None else (OptionSet.of(own),))), run


def run_job(command: str, texts: Mapping[str, str], files: tuple[str, ...]) -> Document:
    """Run a command's job with options as typed; returns its document.

    Raises:
        InputError: an unknown option or a wrong value.
        DoesNotFitError: the planner's answer is no.
    """
    options, run = option_sets(command)
    scenario, *asked = read_texts(options, texts, command)
    return run(scenario.evolve(trace=files) if files else scenario, *asked).to_dict()


def parse_setting(text: str, option: str, example: str) -> tuple[str, str]:
    """Parse `kv-cache-dtype=fp8` to name and value. Raises InputError for any other form."""
    name, _, value = (part.strip() for part in text.partition("="))
    name = name.lstrip("-")
    if not name or not value:
        raise InputError(f"{option} is {text!r}; it must look like {example}")
    return name, value


def reason(error: KVLedgerError) -> str:
    """An error's message with the options spelled as on the command line."""
    return spelled(str(error), _NAMES)
