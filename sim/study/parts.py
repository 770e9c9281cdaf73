"""The four parts of a study: each runs one of the package's jobs and gives the JSON of the command of its name."""

from itertools import count
from typing import Any

import attrs
import numpy as np

from ...core.deployment.diagnosis import Diagnosis, free_memory_but_startup_fails, one_request_does_not_fit
from ...core.deployment.plan import DeploymentPlan, plan_deployment
from ...core.errors import InputError
from ...core.memory.budget import MemoryCondition
from ...core.planner.report import capacity_mix
from ..baselines.baselines import compare_allocators
from ..cache.capacity_curve import CapacityCurve, capacity_curve
from ..engine.metrics import RequestRecord
from ..engine.replay import replay
from ..engine.vllm_metrics import HistogramCounts, Snapshot
from ..latency.devices import Device
from ..report.compare import compare_payload, compare_sentences
from ..report.console import progress
from ..report.curve import CountedTrace
from ..report.plan import plan_payload
from ..report.replay import trace_as_dict
from ..scenario.compare_setup import read_lengths, token_bytes
from ..scenario.model_bytes import bytes_per_block
from ..scenario.plan_question import PlanQuestion
from ..traces import Trace
from .engine import engine_of_plan

POLICIES = ("lru", "optimum")
# Sizes of the curve in pools of the deployment, so that a point reads as so many of them.
POOLS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
PAGED_WATERMARK = 0.01  # share of its blocks that the paper's vLLM kept free at admission
LINE_POINTS = 64
HISTOGRAMS = {
    "ttft_s": "vllm:time_to_first_token_seconds",
    "itl_s": "vllm:inter_token_latency_seconds",
    "tpot_s": "vllm:request_time_per_output_token_seconds",
    "e2e_s": "vllm:e2e_request_latency_seconds",
}


@attrs.frozen(kw_only=True)
class StudyQuestion:
    """What a study is about.

    Attributes:
        trace: the requests; every part reads them anew.
        model: as it was given, a built-in name or the path of a config.json.
        kv_cache_dtype: of keys and values; `auto` is the model's.
        plan_question: the deployment, with what was assumed about it.
        device: datasheet figures of each GPU.
        weights_dtype: a quantisation scheme, a dtype, or `auto`: what the model's config says.
        capacities: sizes of the curve in blocks of the trace; None: multiples of the deployment's pool.
        command: the command line that reproduces the study.
        title: `heading` and `subtitle` of the report.
        given: the options, by name, as they were given.
    """

    trace: Trace
    model: str
    kv_cache_dtype: str
    plan_question: PlanQuestion
    device: Device
    weights_dtype: str
    capacities: tuple[int, ...] | None
    command: str
    title: dict[str, str]
    given: dict[str, Any]


def usable_tokens(plan: DeploymentPlan) -> int:
    """Tokens that requests can hold at once: the null block holds none."""
    pool = plan.pool
    return max(pool.kv_cache_size_tokens, 0) * max(pool.num_usable_blocks, 0) // max(pool.num_blocks, 1)


def plan_part(question: StudyQuestion) -> tuple[DeploymentPlan, dict[str, Any]]:
    """The plan and the JSON of `kvledger plan`."""
    deployment = question.plan_question.deployment
    plan = plan_deployment(deployment)
    diagnoses: list[Diagnosis] = []
    if plan.startup_refusal is not None and plan.startup_refusal.condition is MemoryCondition.FREE_BELOW_REQUESTED:
        diagnoses = [free_memory_but_startup_fails(deployment)]
    elif plan.refusal is not None:
        diagnoses = [one_request_does_not_fit(plan)]
    capacity = capacity_mix(plan.pool).rows
    return plan, plan_payload(question.plan_question, plan, capacity, diagnoses, plan.warnings)


def curve_part(question: StudyQuestion, plan: DeploymentPlan | None) -> tuple[CapacityCurve, dict[str, Any]]:
    """The curve, and the JSON of `kvledger curve` with three more keys.

    `at_pool`: one point a policy at the plan's capacity, None without a pool. `at_90_percent`: the LRU point that
    serves 90 % of the ceiling. `lru_line`: LRU at sizes close to each other, up to its ceiling.
    """
    trace, deployment = question.trace, question.plan_question.deployment
    block_size = trace.info.trace_block_size or deployment.resolved_block_size()[0]
    pool_blocks = usable_tokens(plan) // block_size if plan is not None and plan.fits else 0
    capacities = _capacities(question.capacities, pool_blocks)
    bar, task = progress("curve: reading the trace")
    with bar:
        replays = count(1)

        def on_point(name: str, num_blocks: int) -> None:
            total = None if capacities is None else len(capacities)
            bar.update(task, description=f"curve: {name} replayed", completed=next(replays), total=total)

        curve = capacity_curve(
            CountedTrace(trace, lambda num_requests: bar.update(task, completed=num_requests)),
            capacities=capacities,
            policies=POLICIES,
            block_size=block_size,
            on_point=on_point,
        )
    try:
        size_bytes = bytes_per_block(question.model, question.kv_cache_dtype, block_size)
    except InputError:  # some layers keep a window or a state: blocks are no fixed number of bytes
        size_bytes = None
    payload = curve.as_dict(size_bytes)
    at_pool = {
        policy: [each for each in curve.policies[policy] if each.num_blocks == pool_blocks] for policy in POLICIES
    }
    payload["at_pool"] = (
        {policy: curve.point_as_dict(points[0], size_bytes) for policy, points in at_pool.items()}
        if pool_blocks
        else None
    )
    payload["at_90_percent"] = curve.point_as_dict(curve.lru.at(curve.lru.smallest_for(0.9)), size_bytes)
    payload["lru_line"] = [curve.point_as_dict(curve.lru.at(size), size_bytes) for size in _line_sizes(curve)]
    return curve, payload


def _capacities(given: tuple[int, ...] | None, pool_blocks: int) -> list[int] | None:
    if given is None and not pool_blocks:
        return None
    sizes = {int(pool_blocks * pools) for pools in POOLS} if given is None else {*given, pool_blocks}
    return sorted(sizes - {0})


def _line_sizes(curve: CapacityCurve) -> list[int]:
    """From the smallest size asked for to a little beyond what LRU needs for its ceiling, evenly on a log scale."""
    smallest = min(point.num_blocks or 1 for point in curve.policies["lru"])
    ceiling = max(curve.lru.smallest_for(1.0), 2 * smallest)
    sizes = np.geomspace(smallest, ceiling * 1.5, LINE_POINTS)
    return sorted(set(sizes.astype(int).tolist()))


def compare_part(question: StudyQuestion, plan: DeploymentPlan) -> dict[str, Any]:
    """The JSON of `kvledger compare` with `sentences`: five allocators on the pool's memory.

    Raises:
        InputError: not every token of the model takes the same memory.
        DoesNotFitError: no allocator serves a single request.
    """
    dtype = None if question.kv_cache_dtype == "auto" else question.kv_cache_dtype
    tokens = token_bytes(question.model, dtype)
    deployment, num_slots = plan.deployment, plan.pool.kv_cache_size_tokens
    block_size, _ = deployment.resolved_block_size()
    lengths = read_lengths(question.trace)
    usages = compare_allocators(
        lengths,
        num_slots=num_slots,
        max_model_len=plan.pool.max_model_len,
        block_size=block_size,
        max_num_seqs=deployment.max_num_seqs,
        watermark=PAGED_WATERMARK,
        kv_bytes_per_token=None if tokens is None else tokens.kv_bytes_per_token,
    )
    info = question.trace.info
    setup = {
        "trace": info.as_dict(),
        "window": info.window_as_dict(),
        "num_slots": num_slots,
        "num_slots_source": "the plan's kv_cache_tokens",
        "kv_bytes_per_token": None if tokens is None else tokens.kv_bytes_per_token,
        "max_model_len": plan.pool.max_model_len,
        "max_model_len_source": "the plan's",
        "block_size": block_size,
        "max_num_seqs": deployment.max_num_seqs,
        "watermark": PAGED_WATERMARK,
    }
    return {**compare_payload(usages, setup), "sentences": compare_sentences(usages, setup)}


def replay_part(question: StudyQuestion, plan: DeploymentPlan, num_requests: int | None) -> dict[str, Any]:
    """The JSON of `kvledger replay` with two more keys.

    `last_arrival_s`: of a finished request, in simulated time. `distributions`: of the latencies, see
    `latency_distributions`.
    """
    trace, engine = question.trace, engine_of_plan(plan, question.device, question.weights_dtype)
    last_arrival_s = 0.0

    def on_finished(record: RequestRecord) -> None:
        nonlocal last_arrival_s
        last_arrival_s = max(last_arrival_s, record.arrival_s)

    bar, task = progress("replay: requests submitted", total=num_requests)
    with bar:
        report = replay(
            trace,
            allocator=engine.allocator,
            scheduler=engine.scheduler,
            latency=engine.latency,
            trace_block_size=trace.info.trace_block_size,
            on_finished=on_finished,
            on_progress=lambda count: bar.update(task, completed=count),
        )
    report.assumptions = {**engine.facts, **report.assumptions}
    document = {"trace": trace_as_dict(trace.info, trace.info.trace_block_size), **report.to_json()}
    return {**document, "last_arrival_s": last_arrival_s, "distributions": latency_distributions(report.snapshot or {})}


def latency_distributions(snapshot: Snapshot) -> dict[str, dict[str, list[float]]]:
    """By latency: `up_to_s`, boundaries in seconds, and `share`, the part of all samples within each."""
    out: dict[str, dict[str, list[float]]] = {}
    for name, metric in HISTOGRAMS.items():
        counts: HistogramCounts | None = snapshot.get(metric)
        if counts is None or not counts.buckets[-1][1]:
            continue
        *finite, (_, num_samples) = counts.buckets
        out[name] = {
            "up_to_s": [boundary for boundary, _ in finite],
            "share": [within / num_samples for _, within in finite],
        }
    return out
