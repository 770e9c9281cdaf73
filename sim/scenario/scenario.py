"""`Scenario`: one typed description of a question about traffic, a model, hardware and an engine.

    s = Scenario(model="llama-3.1-8b", gpu="H100", tensor_parallel_size=4, block_size=64)
    s.plan()
    s.curve("trace.jsonl").to_frame()
    s.replay("trace.jsonl").requests.to_frame()

Its fields are the options of the command line, under the same names. A command line, a row of a sweep, a recorded run
and a notebook all make the same `Scenario` and call the same functions with it.
"""

import difflib
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import attrs

from ...core.errors import InputError
from ..figures import Document
from .options import ENGINE, HARDWARE, LATENCY, MODEL, TRAFFIC, Amount, given_values, option, options

if TYPE_CHECKING:
    from ..traces import Trace
    from .curve import CurveResult
    from .fleet import FleetOptions
    from .plan import PlanResult
    from .replay import ReplayResult

    TraceLike = str | Trace | None

# What the HTTP server adds to TTFT and E2E on the measured servers of docs/latency.md, in ms.
DEFAULT_HTTP_MS = 8.0
# Bounds of what a machine that simulates can hold: each engine takes megabytes, each block of a pool 60 bytes.
MOST_RANKS = 1_024
MOST_BLOCKS = 1 << 24


@options
class Scenario:
    """Traffic, model, hardware, engine and latency model; None where something was not given.

    Numbers of tokens and blocks may be written as `32K`, amounts of memory as `12GiB`.

    Raises InputError: a value of the wrong type; the field and the value are named.
    """

    # Traffic
    trace: tuple[str, ...] = option(
        (),
        TRAFFIC,
        "Trace file, gz or plain, in one of these formats: {trace formats}. Coding-assistant conversations and "
        "spans may be several files or a folder.",
        is_argument=True,
    )
    workload: str | None = option(
        None,
        TRAFFIC,
        "Built-in workload instead of a file: {workloads}; or a mix of workloads and files, such as "
        "conversation*0.5+code@2 (half its rate, 2 requests per second).",
    )
    fit: str | None = option(
        None,
        TRAFFIC,
        "Seeded workload fitted to this trace file, instead of the file itself. --limit and --rate-scale apply to the "
        "workload.",
    )
    input_len: int | None = option(
        None,
        TRAFFIC,
        "Tokens per prompt of a benchmark without a trace, as vllm bench serve sends it; with --output-len, and "
        "--max-concurrency or --request-rate.",
        "--input-len",
        "--isl",
        metavar="TOKENS",
    )
    output_len: int | None = option(
        None, TRAFFIC, "Tokens per answer of the benchmark.", "--output-len", "--osl", metavar="TOKENS"
    )
    max_concurrency: int | None = option(
        None,
        TRAFFIC,
        "Users of the benchmark: requests under way at most; the next is sent when one ends.",
        "--max-concurrency",
        "--concurrency",
        metavar="USERS",
    )
    range_ratio: float | None = option(
        None, TRAFFIC, "Draw the benchmark's lengths from len*(1-r) to len*(1+r); 0 unless given."
    )
    num_prompts: int | None = option(
        None,
        TRAFFIC,
        "Requests of the benchmark. Unless given: 1,000, or 10 per user where that is more.",
        metavar="REQUESTS",
    )
    prefix_len: int | None = option(
        None, TRAFFIC, "Tokens that all prompts of the benchmark share, before --input-len.", metavar="TOKENS"
    )
    model: str | None = option(
        None, MODEL, "Built-in model name, or path of a config.json.", "--model", "--config", metavar="MODEL"
    )
    gpu: str | None = option(
        None, HARDWARE, "GPU preset: {gpus}; or a TOML file with the figures of any other device.", metavar="GPU"
    )
    num_gpu_blocks_override: int | None = option(
        None,
        HARDWARE,
        "Blocks in the pool, null block included, whatever would fit.",
        metavar="BLOCKS",
        most=MOST_BLOCKS,
    )
    block_size: int | None = option(
        None, ENGINE, "Tokens per block. Unless given: 16, or what the model or trace needs.", metavar="TOKENS"
    )
    gpu_memory_utilization: float | None = option(
        None,
        HARDWARE,
        "Fraction of the GPU's total memory for this engine. Unless given: vLLM's (0.92; 0.9 before 0.21).",
    )
    tensor_parallel_size: int = option(
        1, HARDWARE, "GPUs that share each layer.", "--tensor-parallel-size", "-tp", least=1, most=MOST_RANKS
    )
    enable_expert_parallel: bool = option(
        False, HARDWARE, "Give each GPU whole experts instead of a slice of each; changes step times only."
    )
    pipeline_parallel_size: int = option(
        1,
        HARDWARE,
        "Pipeline stages that the layers are divided into.",
        "--pipeline-parallel-size",
        "-pp",
        least=1,
        most=MOST_RANKS,
    )
    decode_context_parallel_size: int = option(
        1,
        HARDWARE,
        "Ranks that share each request's tokens.",
        "--decode-context-parallel-size",
        "-dcp",
        least=1,
        most=MOST_RANKS,
    )
    quantization: str | None = option(
        None, MODEL, "Weight format: none, fp8, fp8_block, int8, int4, mxfp4 or nvfp4. Unless given: the model's own."
    )
    kv_cache_dtype: str = option("auto", ENGINE, "Format of the KV cache: {KV cache dtypes}.")
    kv_cache_memory_bytes: int | None = option(
        None, HARDWARE, "KV cache memory per GPU, instead of a utilization (12GiB).", unit="bytes"
    )
    trace_block_size: int | None = option(
        None, TRAFFIC, "Tokens that one block id of the trace represents. Unless given: the format's.", metavar="TOKENS"
    )
    max_model_len: int | None = option(
        None,
        ENGINE,
        "Longest request in tokens (8192, 32K); auto or -1: the longest that fits. Unless given: the model's in plan, "
        "else the longest that fits.",
        metavar="TOKENS",
    )
    max_num_seqs: int | None = option(
        None,
        ENGINE,
        "Requests that run at the same time. Unless given: vLLM's for the GPU (1,024 from 70 GiB on but on A100, else "
        "256; serve: 256).",
        metavar="REQUESTS",
    )
    max_num_batched_tokens: int | None = option(
        None,
        ENGINE,
        "Tokens that one step computes at most. Unless given: vLLM's server's for the GPU (16,384 from 160 GiB on, "
        "8,192 from 70 GiB on but on A100, else 2,048; serve: 2,048).",
        metavar="TOKENS",
    )
    enable_prefix_caching: bool = option(True, ENGINE, "Reuse cached prefixes.")
    enable_chunked_prefill: bool = option(True, ENGINE, "Split long prompts over several steps.")
    long_prefill_token_threshold: int = option(
        0, ENGINE, "Prompt tokens of one request per step at most; 0: no limit.", metavar="TOKENS"
    )
    scheduling_policy: str = option("fcfs", ENGINE, "Order of waiting requests: fcfs or priority (lowest value first).")
    preemption_victim: str = option(
        "last-admitted", ENGINE, "Request to preempt when blocks run out: last-admitted or least-computed."
    )
    protect_preempted: bool = option(
        False, ENGINE, "Leave a preempted request alone, once it is back, until it has produced a token. vLLM does not."
    )
    scheduler_reserve_full_isl: bool = option(
        True, ENGINE, "Admit a request only when its whole prompt fits, not just the first chunk."
    )
    watermark_blocks: int = option(0, ENGINE, "Blocks that an admission leaves free.", metavar="BLOCKS")
    eviction: str = option("lru", ENGINE, "Eviction policy of cached blocks: {eviction policies}.")
    preemption_mode: str = option(
        "recompute", ENGINE, "What preemption does: recompute (vLLM V1), or swap blocks to host memory."
    )
    swap_space_blocks: int = option(
        0, ENGINE, "Host memory for swapped blocks; with --preemption-mode swap.", metavar="BLOCKS"
    )
    swap_link_gb_s: float | None = option(
        None, ENGINE, "Bandwidth between a GPU and host memory in GB/s; needed to swap."
    )
    swap_bytes_per_block: int | None = option(
        None, ENGINE, "Bytes of a swapped block on one GPU. Unless given: the model's.", unit="bytes"
    )
    num_speculative_tokens: int = option(
        0, ENGINE, "Draft tokens verified per request and decode step; 0 turns drafts off.", metavar="TOKENS"
    )
    speculative_method: str | None = option(
        None,
        ENGINE,
        "Who makes the drafts: mtp, eagle, draft_model or ngram. Unless given: mtp where the model's config has "
        "predictor layers, else eagle. With mtp and eagle a cache hit gives its last block back.",
    )
    num_draft_layers: int | None = option(
        None, ENGINE, "Draft layers that store keys and values. Unless given: as the config says, or 1.", least=1
    )
    draft_model: str | None = option(
        None, ENGINE, "Model that makes the drafts: a built-in name or a config.json.", metavar="MODEL"
    )
    engine_version: str | None = option(
        None,
        ENGINE,
        "vLLM version whose rules hold, e.g. 0.32. Before 0.21 no graph memory was reserved; from 0.33 on keys look "
        "ahead with mtp and eagle, and no block of a hit is given back.",
    )
    draft_acceptance_rate: float | None = option(
        None, ENGINE, "Probability that a draft is accepted if the one before it was; needed with drafts."
    )
    async_scheduling: bool | None = option(
        None,
        ENGINE,
        "Schedule each step while the step before it runs. Unless given: as vLLM does, always but with n-gram drafts.",
    )
    http_ms: float = option(
        DEFAULT_HTTP_MS,
        LATENCY,
        "Time between a client and the engine per request (HTTP, tokenizer): part of TTFT and E2E.",
        least=0,
    )
    latency: str | None = option(
        None,
        LATENCY,
        "Model of a step's duration: {latency models}. Unless given: linear without --model; with one, kernels where "
        "kernel times of the GPU are installed or given, else roofline.",
    )
    base_ms: float | None = option(None, LATENCY, "Linear model: fixed time of a step, ms; 5 unless given.")
    us_per_prefill_token: float | None = option(
        None, LATENCY, "Linear model: time per prefill token, us; 25 unless given."
    )
    us_per_decoding_sequence: float | None = option(
        None, LATENCY, "Linear model: time per decoding request, us; 20 unless given."
    )
    latency_table: str | None = option(None, LATENCY, "Table model: CSV file of measured steps.", metavar="FILE")
    kernel_profile: str | None = option(
        None, LATENCY, "Kernels model: folder of kernel times that were profiled on the server.", metavar="FOLDER"
    )
    calibration: str | None = option(
        None,
        LATENCY,
        "Factors on step times, fitted to measured servers (validate --fit) or to a run of one (explain-run).",
        metavar="FILE",
    )
    closed_loop: bool | None = option(
        None,
        TRAFFIC,
        "Send each turn of a session a think time after the answer before it, or at its recorded time. Unless given: "
        "closed where the trace has think times.",
        "--closed-loop/--open-loop",
    )
    n: int = option(1, TRAFFIC, "Parallel samples per request, as n requests with one prompt.", "--n", metavar="N")
    trace_format: str | None = option(
        None,
        TRAFFIC,
        "Trace format: {trace formats}. Unless given: detected from the content.",
        "--format",
        "--trace-format",
    )
    timestamp_unit: str | None = option(
        None, TRAFFIC, "Unit of the trace's timestamps: s, ms, us or ns. Unless given: the format's."
    )
    tokenizer: str | None = option(
        None, TRAFFIC, "Token counts for a trace of text: a Hugging Face tokenizer.json, or chars:4 for an estimate."
    )
    request_rate: float | None = option(
        None,
        TRAFFIC,
        "Requests per second (Poisson) of --input-len, or of a trace that records no arrival times. Unless given, "
        "--input-len sends all at once (inf), as vllm bench serve does.",
    )
    on_bad_row: str | None = option(
        None, TRAFFIC, "What to do with a bad row: refuse (stop; the default) or skip (leave out and count)."
    )
    skip_first: int = option(0, TRAFFIC, "Requests to leave out at the start.", metavar="REQUESTS")
    limit: int | None = option(None, TRAFFIC, "Requests to use after the skipped ones.", metavar="REQUESTS")
    rate_scale: float = option(1.0, TRAFFIC, "Factor on the arrival rate; think times shrink by the same factor.")
    seed: int | None = option(None, TRAFFIC, "Seed of everything random; 0 unless given.", metavar="SEED")

    # Memory of a deployment in more detail, and engines other than vLLM
    total_memory: int | None = option(
        None, HARDWARE, "Total memory that the driver reports, e.g. 79.19GiB.", unit="bytes"
    )
    free_memory: int | None = option(None, HARDWARE, "Free memory before start; all of it unless given.", unit="bytes")
    mem_fraction_static: float | None = option(
        None, HARDWARE, "SGLang: fraction of total memory for weights and KV cache, without activations."
    )
    free_gpu_memory_fraction: float | None = option(
        None, HARDWARE, "TensorRT-LLM: fraction of the memory that is free once everything else is loaded."
    )
    max_total_tokens: int | None = option(
        None, HARDWARE, "Tokens that the pool holds at most, whatever would fit.", metavar="TOKENS"
    )
    kv_cache_layout: str | None = option(
        None,
        ENGINE,
        "Physical order of the cache's axes, e.g. LBNHC or BLNHC. Unless given: LBNHC, or BLNHC where some pages fit "
        "no other.",
    )
    mamba_cache_mode: str | None = option(
        None, ENGINE, "Cached snapshots of state layers: none, align or all. Unless given: by prefix caching."
    )
    disable_hybrid_kv_cache_manager: bool | None = option(
        None, ENGINE, "Size windowed layers like full attention. Unless given: as vLLM does for the model."
    )
    dtype: str | None = option(None, MODEL, "Element type of unquantized weights. Unless given: the model's.")
    data_parallel_size: int = option(
        1, HARDWARE, "Independent engine replicas.", "--data-parallel-size", "-dp", least=1, most=MOST_RANKS
    )
    enforce_eager: bool = option(False, ENGINE, "Run without CUDA graphs.", "--enforce-eager")
    reserve_graph_memory: bool | None = option(
        None, HARDWARE, "Reserve CUDA graph memory when the pool is sized. Unless given: as --engine-version does."
    )
    weights_bytes: int | None = option(
        None, HARDWARE, "Weights per GPU, instead of the estimate (14.96GiB).", unit="bytes"
    )
    non_torch_bytes: int | None = option(
        None, HARDWARE, "Non-torch memory per GPU, instead of the estimate.", unit="bytes"
    )
    workspace_bytes: int | None = option(
        None, HARDWARE, "Sampler and other persistent workspaces per GPU.", unit="bytes"
    )
    encoder_bytes: int | None = option(None, HARDWARE, "Multimodal encoder per GPU; 0 for text only.", unit="bytes")
    activation_bytes: int | None = option(
        None, HARDWARE, "Peak activation memory per GPU, instead of the estimate.", unit="bytes"
    )
    graph_bytes: int | None = option(None, HARDWARE, "CUDA graphs per GPU, instead of the estimate.", unit="bytes")
    externally_held_bytes: int | None = option(
        None, HARDWARE, "Weights that another process holds for this engine.", unit="bytes"
    )
    frontend_reservation_bytes: int | None = option(
        None, HARDWARE, "Memory reserved for multimodal inputs, taken off the pool.", unit="bytes"
    )
    startup_log: str | None = option(
        None, HARDWARE, "Start-up log of a real server (- for standard input); calibrates the plan.", metavar="FILE"
    )
    assume: tuple[str, ...] = option(
        (), HARDWARE, "Another constant of the memory estimates, name=value; repeatable.", metavar="NAME=VALUE"
    )
    strict_startup: bool = option(
        False, HARDWARE, "Demand utilization * total as free memory even with an override.", "--strict-startup"
    )
    validate: bool = option(True, HARDWARE, "Check pinned KV cache bytes against free memory.")

    def evolve(self, **changes: Any) -> "Scenario":
        """The same scenario with some fields changed; values may be written as on the command line.

        Raises InputError: an unknown field or a wrong value.
        """
        _check_names(changes)
        return attrs.evolve(self, **changes)

    def to_dict(self) -> Document:
        """Every field that is not at its default, as plain JSON values; `from_dict` reads it."""
        as_text = {
            name: str(value) for name, value in given_values(self).items() if isinstance(value, Amount) or value == inf
        }
        return {name: list(v) if isinstance(v, tuple) else v for name, v in given_values(self).items()} | as_text

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Scenario":
        """The scenario that `to_dict` described. Raises InputError: an unknown field or a wrong value."""
        _check_names(values)
        return cls(**values)

    def plan(self) -> "PlanResult":
        """How many KV blocks, tokens and users fit, and where every byte of a GPU goes; see `plan_scenario`."""
        from .plan import plan_scenario

        return plan_scenario(self)

    def curve(self, trace: "TraceLike" = None, **asked: Any) -> "CurveResult":
        """The prefix-cache hit rate of this scenario's traffic, or of a trace (file or open), at every capacity.

        `asked` are `capacities` (blocks) and `policy`, see `CurveOptions`.
        """
        from .curve import CurveOptions, curve_of_scenario

        scenario, source = self._with_traffic(trace)
        return curve_of_scenario(scenario, CurveOptions(**asked), trace=source)

    def replay(self, trace: "TraceLike" = None) -> "ReplayResult":
        """Latency, hits, preemptions and occupancy of this scenario's traffic, or of `trace`, on one engine."""
        from .replay import replay_scenario

        scenario, source = self._with_traffic(trace)
        return replay_scenario(scenario, trace=source, keep_requests=True)

    def fleet(self, fleet: "FleetOptions | None" = None, trace: "TraceLike" = None, **shape: Any) -> "ReplayResult":
        """The same over several engines behind a router: `s.fleet(replicas=4)`; see `FleetOptions`."""
        from .fleet import FleetOptions, replay_fleet_scenario

        scenario, source = self._with_traffic(trace)
        return replay_fleet_scenario(scenario, fleet or FleetOptions(**shape), trace=source)

    def _with_traffic(self, trace: "TraceLike") -> "tuple[Scenario, Trace | None]":
        if trace is None:
            return self, None
        if isinstance(trace, str):
            return self.evolve(trace=(trace,), workload=None, fit=None), None
        return self, trace


def _check_names(values: Mapping[str, Any]) -> None:
    known = attrs.fields_dict(Scenario)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise InputError(f"a scenario has no field {name!r}{f'; did you mean {near[0]}?' if near else ''}")
