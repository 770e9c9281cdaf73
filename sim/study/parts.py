"""Runs the four parts of a study; each returns the JSON document of the command with its name."""

from collections.abc import Callable
from itertools import count

import attrs
import numpy as np

from ...core.deployment.plan import DeploymentPlan
from ...core.errors import InputError
from ..cache.capacity_curve import CapacityCurve, capacity_curve
from ..engine.metrics import RequestRecord
from ..figures import Document
from ..latency.devices import find_device
from ..scenario.compare import compare_on, compare_sentences, model_of, read_lengths
from ..scenario.curve import CurveOptions, bytes_per_block
from ..scenario.deployment import PlanQuestion, read_question
from ..scenario.engine import Pool, allocator_of_plan, engine_of
from ..scenario.plan import plan_scenario
from ..scenario.replay import latency_distributions, replay_scenario
from ..scenario.scenario import Scenario
from ..scenario.traffic import counted, open_traffic
from ..traces import Trace

# Called with the current activity, how much of it is done, and the total if known.
Progress = Callable[[str, int, int | None], None]

EXAMPLE = {"model": "llama-3.1-8b", "gpu": "H100"}
POLICIES = ("lru", "optimum")
# Sizes of the curve, as multiples of the deployment's pool.
POOLS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
PAGED_WATERMARK = 0.01  # share of blocks that vLLM kept free at admission, in the PagedAttention paper
LINE_POINTS = 64


@attrs.frozen(kw_only=True)
class StudyQuestion:
    """A checked study question; each part reads the trace again. The curve's sizes default to multiples of the pool."""

    scenario: Scenario
    curve: CurveOptions
    trace: Trace
    plan_question: PlanQuestion

    @classmethod
    def of(cls, scenario: Scenario, curve: CurveOptions) -> "StudyQuestion":
        """Checks the options; without model and GPU, an example deployment is used.

        Raises InputError: something is missing, unknown or contradictory.
        """
        trace = open_traffic(scenario)
        note: tuple[str, ...] = ()
        missing = [name for name in EXAMPLE if getattr(scenario, name) is None]
        if missing and len(missing) < len(EXAMPLE):
            there = next(name for name in EXAMPLE if name not in missing)
            raise InputError(
                f"--{there} {getattr(scenario, there)} is given and --{missing[0]} is not: a study needs both, such as "
                f"--model {EXAMPLE['model']} --gpu {EXAMPLE['gpu']}"
            )
        if missing:
            scenario = scenario.evolve(**EXAMPLE)
            note = (
                f"EXAMPLE: no deployment was given, so this study uses {EXAMPLE['model']} on one {EXAMPLE['gpu']}; "
                "choose yours with --model and --gpu",
            )
        question = read_question(scenario)
        question = attrs.evolve(question, assumptions=(*note, *question.assumptions))
        _ = curve.sizes  # refuses what is no number, before a part has run
        return cls(scenario=scenario, curve=curve, trace=trace, plan_question=question)

    @property
    def title(self) -> dict[str, str]:
        """`heading` and `subtitle` of the report."""
        info, deployment = self.trace.info, self.plan_question.deployment
        source = f"the {info.name} workload" if info.workload else info.name
        parallel = {
            "tensor-parallel": deployment.tensor_parallel_size,
            "pipeline-parallel": deployment.pipeline_parallel_size,
        }
        sizes = [f"{size} {name}" for name, size in parallel.items() if size > 1]
        gpus = f"{deployment.num_gpus} x {self.plan_question.device_name}"
        layout = f" ({', '.join(sizes)})" if sizes else ""
        origin = f", seed {info.workload['seed']}, resembles {info.workload['resembles']}" if info.workload else ""
        return {
            "heading": f"{deployment.geometry.name} on {gpus}{layout}, serving {source}",
            "subtitle": f"KV-cache study of {info.name} ({info.format}{origin})",
        }


def usable_tokens(plan: DeploymentPlan) -> int:
    """Tokens that requests can hold at once, without the null block's."""
    pool = plan.pool
    return max(pool.kv_cache_size_tokens, 0) * max(pool.num_usable_blocks, 0) // max(pool.num_blocks, 1)


def plan_part(question: StudyQuestion) -> tuple[DeploymentPlan, Document]:
    """Returns the plan and the JSON of `kvledger plan`."""
    found = attrs.evolve(plan_scenario(question.scenario), question=question.plan_question)
    return found.plan, found.to_dict()


def curve_part(
    question: StudyQuestion, plan: DeploymentPlan | None, progress: Progress
) -> tuple[CapacityCurve, Document]:
    """Returns the curve and the JSON of `kvledger curve` with three more keys.

    `at_pool`: a point per policy at the plan's capacity, None without a pool. `at_90_percent`: the smallest LRU size
    that serves 90 % of what an unlimited cache serves. `lru_line`: LRU at many sizes, up to that ceiling.
    """
    trace, deployment = question.trace, question.plan_question.deployment
    block_size = trace.info.trace_block_size or deployment.resolved_block_size()[0]
    pool_blocks = usable_tokens(plan) // block_size if plan is not None and plan.fits else 0
    capacities = _capacities(question.curve, pool_blocks)
    replays = count(1)
    progress("curve: reading the trace", 0, None)
    curve = capacity_curve(
        counted(trace, lambda num_requests: progress("curve: reading the trace", num_requests, None)),
        capacities=capacities,
        policies=POLICIES,
        block_size=block_size,
        on_point=lambda name, _: progress(
            f"curve: {name} replayed", next(replays), None if capacities is None else len(capacities)
        ),
    )
    try:
        size_bytes = bytes_per_block(str(question.scenario.model), question.scenario.kv_cache_dtype, block_size)
    except InputError:  # windowed or state layers: a block has no fixed size in bytes
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


def _capacities(asked: CurveOptions, pool_blocks: int) -> list[int] | None:
    given = asked.sizes
    if given is None and not pool_blocks:
        return None
    sizes = {int(pool_blocks * pools) for pools in POOLS} if given is None else {*given, pool_blocks}
    return sorted(sizes - {0})


def _line_sizes(curve: CapacityCurve) -> list[int]:
    """Sizes spaced evenly on a log scale, from the smallest point to just beyond where LRU stops improving."""
    smallest = min(point.num_blocks or 1 for point in curve.policies["lru"])
    ceiling = max(curve.lru.smallest_for(1.0), 2 * smallest)
    sizes = np.geomspace(smallest, ceiling * 1.5, LINE_POINTS)
    return sorted(set(sizes.astype(int).tolist()))


def compare_part(question: StudyQuestion, plan: DeploymentPlan, progress: Progress) -> Document:
    """Returns the JSON of `kvledger compare` with `sentences`: five allocators on the pool's memory.

    Raises:
        InputError: the model's tokens do not all take the same memory.
        DoesNotFitError: no allocator serves a single request.
    """
    scenario = question.scenario
    result = compare_on(
        question.trace,
        read_lengths(question.trace, lambda count: progress("compare: reading the trace", count, None)),
        slots=(plan.pool.kv_cache_size_tokens, "the plan's kv_cache_tokens"),
        longest=(plan.pool.max_model_len, "the plan's"),
        model=model_of(scenario),
        block_size=plan.deployment.resolved_block_size()[0],
        max_num_seqs=plan.deployment.max_num_seqs,
        watermark=PAGED_WATERMARK,
    )
    return {**result.to_dict(), "sentences": compare_sentences(result.usages, result.setup)}


def replay_part(
    question: StudyQuestion, plan: DeploymentPlan, num_requests: int | None, progress: Progress
) -> Document:
    """Returns the JSON of `kvledger replay` with two more keys.

    `last_arrival_s`: the last arrival among finished requests, in simulated time. `distributions`: see
    `latency_distributions`.
    """
    last_arrival_s = 0.0

    def on_finished(record: RequestRecord) -> None:
        nonlocal last_arrival_s
        last_arrival_s = max(last_arrival_s, record.arrival_s)

    pool = Pool(
        allocator=allocator_of_plan(plan, question.scenario),
        plan=plan,
        device=find_device(str(question.scenario.gpu)),
        facts={"pool": "as planned (plan)", "engines": 1},
    )
    result = replay_scenario(
        question.scenario,
        engine=engine_of(question.scenario, pool),
        trace=question.trace,
        on_finished=on_finished,
        on_progress=lambda count: progress("replay: requests submitted", count, num_requests),
    )
    distributions = latency_distributions(result.report.snapshot or {})
    return {**result.to_dict(), "last_arrival_s": last_arrival_s, "distributions": distributions}
