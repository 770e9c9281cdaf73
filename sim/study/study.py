"""Runs a study: plan, curve, compare and replay of one trace on one deployment, as one document.

The parts run one after another, the longest one last. If the run ends early (Ctrl-C, or nothing fits), the document
keeps the finished parts and gives the reason why the others are missing.
"""

import time
from collections.abc import Callable
from itertools import count

import attrs
import numpy as np

from ...core.deployment.plan import DeploymentPlan
from ...core.errors import DoesNotFitError, InputError
from ..cache.capacity_curve import CapacityCurve, capacity_curve
from ..engine.metrics import RequestRecord
from ..figures import Document, millions
from ..latency.devices import find_device
from ..scenario.compare import compare_on, compare_sentences, model_of, read_lengths
from ..scenario.curve import CurveOptions, bytes_per_block
from ..scenario.defaults import served
from ..scenario.deployment import read_question
from ..scenario.engine import Pool, allocator_of_plan, engine_of
from ..scenario.plan import plan_scenario
from ..scenario.replay import latency_distributions, replay_scenario
from ..scenario.scenario import Scenario
from ..scenario.traffic import counted, open_traffic
from ..traces.trace import format_and_unit
from .answer import answer_as_dict, command_line, derived_figures, next_steps, what_if
from .sentences import answer_sentences

# Called with the current activity, how much of it is done, and the total if known.
Progress = Callable[[str, int, int | None], None]

EXAMPLE = {"model": "llama-3.1-8b", "gpu": "H100"}
POLICIES = ("lru", "optimum")
# Sizes of the curve, as multiples of the deployment's pool.
POOLS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
PAGED_WATERMARK = 0.01  # share of blocks that vLLM kept free at admission, in the PagedAttention paper
LINE_POINTS = 64
PARTS = ("plan", "curve", "compare", "replay")
INTERRUPTED = "interrupted before it finished"


class Study:
    """Runs all parts. `to_dict` may be called at any time and holds the parts finished so far."""

    def __init__(self, scenario: Scenario, curve: CurveOptions | None = None, progress: Progress | None = None) -> None:
        """Check the options; without model and GPU, an example deployment is used.

        Sizes of the curve default to multiples of the pool.

        Raises InputError: something is missing, unknown or contradictory.
        """
        self._trace = open_traffic(scenario)  # each part reads it again
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
        question = read_question(served(scenario))
        self._scenario, self._curve_options = scenario, curve or CurveOptions()
        self._plan_question = attrs.evolve(question, assumptions=(*note, *question.assumptions))
        _ = self._curve_options.sizes  # refuses what is no number, before a part has run
        self._progress: Progress = progress or (lambda text, completed, total: None)
        self._plan: DeploymentPlan | None = None
        self._curve: CapacityCurve | None = None
        self._serves_none = False
        self._parts: dict[str, Document] = {}
        self._timing: dict[str, dict[str, float]] = {}
        self.not_done: dict[str, str] = dict.fromkeys(PARTS, INTERRUPTED)

    @property
    def done(self) -> tuple[str, ...]:
        """The finished parts."""
        return tuple(part for part in PARTS if part in self._parts)

    @property
    def fits(self) -> bool:
        """Whether the deployment fits and serves any request; True until the parts that know have run."""
        return (self._plan is None or self._plan.fits) and not self._serves_none

    def run(self, on_part: Callable[[str, str | None], None] = lambda part, reason: None) -> None:
        """Run every part; `on_part` is called when one ends, with its name and why it was skipped (None: it finished).

        Raises:
            KeyboardInterrupt: passed on; `to_dict` has the parts finished by then.
            InputError: the trace or an option is wrong.
        """
        for part in PARTS:
            started = time.perf_counter()
            reason = self._run_part(part)
            self._timing.setdefault(part, {})["wall_seconds"] = round(time.perf_counter() - started, 4)
            if reason is None:
                del self.not_done[part]
            else:
                self.not_done[part] = reason
            on_part(part, reason)

    def to_dict(self) -> Document:
        """The JSON document; two runs differ only in `timing`."""
        scenario, options, plan, curve = self._scenario, self._curve_options, self._plan, self._curve
        derived = derived_figures(self._parts, plan)
        document: Document = {
            "title": self._title(),
            "command": command_line("study", scenario, options),
            "answer": None,
            "derived": derived,
            **{part: self._parts.get(part) for part in ("plan", "curve", "replay", "compare")},
            "what_if": [] if plan is None or curve is None else what_if(plan, curve, derived["mean_request_tokens"]),
            "next": [],
            "not_done": dict(self.not_done),
            "timing": {**self._timing, "total_seconds": sum(part["wall_seconds"] for part in self._timing.values())},
        }
        document["next"] = next_steps(scenario, options, document)
        document["answer"] = answer_as_dict(answer_sentences(document))
        return document

    def _title(self) -> dict[str, str]:
        """`heading` and `subtitle` of the report, and the measured `window` of the trace once it is read."""
        info, deployment = self._trace.info, self._plan_question.deployment
        source = f"the {info.name} workload" if info.workload else info.name
        parallel = {
            "tensor-parallel": deployment.tensor_parallel_size,
            "pipeline-parallel": deployment.pipeline_parallel_size,
        }
        sizes = [f"{size} {name}" for name, size in parallel.items() if size > 1]
        gpus = f"{deployment.num_gpus} x {self._plan_question.device_name}"
        layout = f" ({', '.join(sizes)})" if sizes else ""
        origin = f", seed {info.workload['seed']}, resembles {info.workload['resembles']}" if info.workload else ""
        out = {
            "heading": f"{deployment.geometry.name} on {gpus}{layout}, serving {source}",
            "subtitle": f"KV-cache study of {info.name} ({format_and_unit(info.format, info.timestamp_unit)}{origin})",
        }
        if "curve" in self._parts:
            trace, window = self._parts["curve"]["trace"], self._parts["curve"]["window"]
            out["window"] = (
                f"{window['num_requests']:,} requests ({window['first_place']:,} to {window['last_place']:,} of the "
                f"trace) over {window['duration_s']:,.0f} s; {millions(trace['input_tokens'])} prompt and "
                f"{millions(trace['output_tokens'])} output tokens"
            )
        return out

    def _run_part(self, part: str) -> str | None:
        """Run and keep one part; returns the reason if it was skipped."""
        if part == "plan":
            found = attrs.evolve(plan_scenario(served(self._scenario)), question=self._plan_question)
            self._plan, self._parts[part] = found.plan, found.to_dict()
            return None
        if part == "curve":
            payload = self._curve_part()
        elif self._plan is None or not self._plan.fits:
            return "the deployment does not fit, so it has no pool to run on"
        else:
            try:
                payload = self._compare_part(self._plan) if part == "compare" else self._replay_part(self._plan)
            except (DoesNotFitError, InputError) as error:  # about the model: the trace was read before
                self._serves_none = isinstance(error, DoesNotFitError)
                return str(error)
        # Measured times are kept apart, so that all else is the same in every run.
        self._timing[part] = payload.pop("timing", {})
        self._parts[part] = payload
        return None

    def _curve_part(self) -> Document:
        """The JSON of `kvledger curve` with three more keys.

        `at_pool`: a point per policy at the plan's capacity, None without a pool. `at_90_percent`: the smallest LRU
        size that serves 90 % of what an unlimited cache serves. `lru_line`: LRU at many sizes, up to that ceiling.
        """
        trace, plan, scenario, progress = self._trace, self._plan, self._scenario, self._progress
        block_size = trace.info.trace_block_size or self._plan_question.deployment.resolved_block_size()[0]
        pool_blocks = usable_tokens(plan) // block_size if plan is not None and plan.fits else 0
        capacities = self._capacities(pool_blocks)
        replays = count(1)
        progress("curve: reading the trace", 0, None)
        curve = self._curve = capacity_curve(
            counted(trace, lambda num_requests: progress("curve: reading the trace", num_requests, None)),
            capacities=capacities,
            policies=POLICIES,
            block_size=block_size,
            on_point=lambda name, _: progress(
                f"curve: {name} replayed", next(replays), None if capacities is None else len(capacities)
            ),
        )
        try:
            size_bytes = bytes_per_block(str(scenario.model), scenario.kv_cache_dtype, block_size)
        except InputError:  # windowed or state layers: a block has no fixed size in bytes
            size_bytes = None
        at_pool: Document = {}
        for policy in POLICIES if pool_blocks else ():
            point = next(each for each in curve.policies[policy] if each.num_blocks == pool_blocks)
            at_pool[policy] = curve.point_as_dict(point, size_bytes)
        return {
            **curve.as_dict(size_bytes),
            "at_pool": at_pool or None,
            "at_90_percent": curve.point_as_dict(curve.lru.at(curve.lru.smallest_for(0.9)), size_bytes),
            "lru_line": [curve.point_as_dict(curve.lru.at(size), size_bytes) for size in _line_sizes(curve)],
        }

    def _capacities(self, pool_blocks: int) -> list[int] | None:
        given = self._curve_options.sizes
        if given is None and not pool_blocks:
            return None
        sizes = {int(pool_blocks * pools) for pools in POOLS} if given is None else {*given, pool_blocks}
        return sorted(sizes - {0})

    def _compare_part(self, plan: DeploymentPlan) -> Document:
        """The JSON of `kvledger compare` with `sentences`: five allocators on the pool's memory."""
        result = compare_on(
            self._trace,
            read_lengths(self._trace, lambda count: self._progress("compare: reading the trace", count, None)),
            slots=(plan.pool.kv_cache_size_tokens, "the plan's kv_cache_tokens"),
            longest=(plan.pool.max_model_len, "the plan's"),
            model=model_of(self._scenario),
            block_size=plan.deployment.resolved_block_size()[0],
            max_num_seqs=plan.deployment.max_num_seqs,
            watermark=PAGED_WATERMARK,
        )
        return {**result.to_dict(), "sentences": compare_sentences(result.usages, result.setup)}

    def _replay_part(self, plan: DeploymentPlan) -> Document:
        """The JSON of `kvledger replay` with two more keys.

        `last_arrival_s`: the last arrival among finished requests, in simulated time. `distributions`: see
        `latency_distributions`.
        """
        scenario, last_arrival_s = self._scenario, 0.0
        num_requests = None if self._curve is None else self._curve.info.num_requests

        def on_finished(record: RequestRecord) -> None:
            nonlocal last_arrival_s
            last_arrival_s = max(last_arrival_s, record.arrival_s)

        pool = Pool(
            allocator=allocator_of_plan(plan, scenario),
            plan=plan,
            device=find_device(str(scenario.gpu)),
            facts={"pool": "as planned (plan)", "engines": 1},
        )
        result = replay_scenario(
            scenario,
            engine=engine_of(scenario, pool),
            trace=self._trace,
            on_finished=on_finished,
            on_progress=lambda count: self._progress("replay: requests submitted", count, num_requests),
        )
        distributions = latency_distributions(result.report.snapshot or {})
        return {**result.to_dict(), "last_arrival_s": last_arrival_s, "distributions": distributions}


def usable_tokens(plan: DeploymentPlan) -> int:
    """Tokens that requests can hold at once, without the null block's."""
    pool = plan.pool
    return max(pool.kv_cache_size_tokens, 0) * max(pool.num_usable_blocks, 0) // max(pool.num_blocks, 1)


def _line_sizes(curve: CapacityCurve) -> list[int]:
    """Sizes spaced evenly on a log scale, from the smallest point to just beyond where LRU stops improving."""
    smallest = min(point.num_blocks or 1 for point in curve.policies["lru"])
    ceiling = max(curve.lru.smallest_for(1.0), 2 * smallest)
    sizes = np.geomspace(smallest, ceiling * 1.5, LINE_POINTS)
    return sorted(set(sizes.astype(int).tolist()))
