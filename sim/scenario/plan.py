"""Plan a scenario: how many KV blocks, tokens and users fit, and where every byte of a GPU goes."""

from collections.abc import Sequence
from typing import Any

import attrs

from ...core.deployment.deployment import DEFAULT_BLOCK_SIZE
from ...core.deployment.diagnosis import (
    Diagnosis,
    ModelStack,
    PoolExplanation,
    explain_pool,
    free_memory_but_startup_fails,
    model_stacks,
    one_request_does_not_fit,
    pool_smaller_than_expected,
    raising_utilization_gained_little,
)
from ...core.deployment.plan import DeploymentPlan, StagePlan, plan_deployment
from ...core.deployment.remedies import FittingValues, Remedy, fitting_values
from ...core.deployment.startup_log import GibFigure, StartupLog, log_lines
from ...core.errors import DoesNotFitError, InputError
from ...core.memory.budget import MemoryCondition, MemoryShortfallError, neighbour_warnings
from ...core.memory.ledger import LedgerRow, RowRole
from ...core.models.geometry import ModelGeometry, load_geometry, served_cache_dtype
from ...core.planner.parallel import tensor_parallel_layers
from ...core.planner.report import CapacityRow, capacity_mix, explain_plan, plan_as_dict
from ...core.planner.verdict import PlanRefusedError
from ..figures import Document
from .deployment import PlanQuestion, read_log, read_question
from .options import HARDWARE, OUTPUT, TRAFFIC, option, options, spelled, whole_numbers
from .results import Table
from .scenario import Scenario

_PARAMETERS = tuple(field.name for field in attrs.fields(Scenario))


@options
class PlanOptions:
    """What is asked beside the plan itself."""

    neighbour_utilization: tuple[float, ...] = option(
        (), HARDWARE, "Utilization of another engine on the same GPU; repeatable.", metavar="FRACTION"
    )
    logged_memory: str | None = option(
        None, HARDWARE, "Explain a log's 'Available KV cache memory', e.g. 41.73.", metavar="GIB"
    )
    logged_tokens: str | None = option(
        None, HARDWARE, "... together with its 'GPU KV cache size', e.g. 261,648.", metavar="TOKENS"
    )
    expect_num_gpu_blocks: int | None = option(
        None, OUTPUT, "Explain why the pool is smaller than this.", metavar="BLOCKS"
    )
    compare_utilization: float | None = option(None, OUTPUT, "Explain what this utilization would gain.")
    context_lengths: str = option(
        "2048,8192,32768,131072", OUTPUT, "Context lengths of the table of users.", metavar="TOKENS,..."
    )
    context_mix: str | None = option(
        None, TRAFFIC, "Count the users of a mix of context lengths, e.g. 2048:0.8,32768:0.2."
    )


@attrs.frozen(kw_only=True)
class PlanResult:
    """A plan, and what is said beside it.

    `capacity` counts users at each context length. `diagnoses` say why the answer is not what was hoped for, each with
    remedies. `mix` has shares and users of a mix of context lengths, if one was asked about.
    """

    question: PlanQuestion
    plan: DeploymentPlan
    capacity: Sequence[CapacityRow]
    diagnoses: Sequence[Diagnosis]
    warnings: Sequence[str]
    mix: Document | None = None

    @property
    def fits(self) -> bool:
        """Whether the engine starts and serves one request of the longest length."""
        return self.plan.fits

    def to_dict(self) -> Document:
        """The document of `kvledger plan --json`."""
        document = _plan_as_dict(self)
        return document if self.mix is None else {**document, "context_mix": self.mix}

    def to_frame(self) -> Any:
        """The ledger as a data frame: a row for each use of memory."""
        return Table.of_rows(self.to_dict()["ledger"]).to_frame()

    def __repr__(self) -> str:
        """The pool in one line."""
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"<PlanResult: {verdict}, {self.plan.num_blocks:,} blocks, {self.plan.pool.kv_cache_size_tokens:,} tokens>"
        )


def plan_scenario(scenario: Scenario, asked: PlanOptions | None = None) -> PlanResult:
    """Plan a scenario's deployment. Raises InputError: something is missing, unknown or contradictory."""
    asked = asked or PlanOptions()
    question = read_question(scenario)
    lengths = whole_numbers(asked.context_lengths, "--context-lengths", "tokens", "2048,8192", least=0)
    plan = plan_deployment(question.deployment)
    others = asked.neighbour_utilization
    warnings = neighbour_warnings([question.deployment.utilization, *others]) if others else ()
    return PlanResult(
        question=question,
        plan=plan,
        capacity=capacity_mix(plan.pool, lengths).rows,
        diagnoses=_diagnoses(question, plan, asked),
        warnings=(*question.warnings, *plan.warnings, *warnings),
        mix=None if asked.context_mix is None else _mix_as_dict(plan, asked.context_mix),
    )


def _mix_as_dict(plan: DeploymentPlan, text: str) -> Document:
    shares: dict[int, float] = {}
    for part in text.split(","):
        length, _, share = part.strip().partition(":")
        try:
            shares[int(length)] = float(share)
        except ValueError as error:
            raise InputError(f"--context-mix {part!r}: give tokens:share, e.g. 2048:0.8,32768:0.2") from error
    too_long = [length for length in shares if length > plan.pool.max_model_len]
    if too_long:
        raise InputError(
            f"--context-mix: a context of {max(too_long):,} tokens is longer than max_model_len"
            f" {plan.pool.max_model_len:,}"
        )
    users = capacity_mix(plan.pool, sorted(shares), shares).users_in_mix or 0
    return {"shares": [list(pair) for pair in shares.items()], "users": users * plan.deployment.data_parallel_size}


def _diagnoses(question: PlanQuestion, plan: DeploymentPlan, asked: PlanOptions) -> tuple[Diagnosis, ...]:
    out: list[Diagnosis] = []
    if asked.expect_num_gpu_blocks is not None and asked.expect_num_gpu_blocks > plan.num_blocks:
        out.append(pool_smaller_than_expected(plan, asked.expect_num_gpu_blocks))
    if asked.compare_utilization is not None:
        higher = plan_deployment(attrs.evolve(question.deployment, utilization=asked.compare_utilization))
        out.append(raising_utilization_gained_little(plan, higher))
    if plan.startup_refusal is not None and plan.startup_refusal.condition is MemoryCondition.FREE_BELOW_REQUESTED:
        out.append(free_memory_but_startup_fails(question.deployment))
    elif plan.refusal is not None:
        out.append(one_request_does_not_fit(plan))
    return tuple(out)


def _logged_lines(scenario: Scenario, asked: PlanOptions) -> StartupLog:
    if scenario.startup_log is not None:
        return read_log(scenario.startup_log)
    memory, tokens = asked.logged_memory or "", asked.logged_tokens or ""
    figure = memory.lower().removesuffix("gib").removesuffix("gb").strip()
    count = tokens.lower().removesuffix("tokens").replace(",", "").strip()
    if not figure.replace(".", "", 1).isdigit():
        raise InputError(f"--logged-memory {memory!r}: give the GiB figure as it was printed, e.g. 41.73")
    if not count.isdigit():
        raise InputError(f"--logged-tokens {tokens!r}: give the tokens as they were printed, e.g. 261,648")
    return attrs.evolve(StartupLog(), available=GibFigure(text=figure), kv_cache_tokens=int(count))


@attrs.frozen
class LogExplanation:
    """What two lines of a server's log imply about its blocks; `num_layers` is None without a model."""

    found: PoolExplanation
    num_layers: int | None
    log: StartupLog

    def sentences(self) -> tuple[str, ...]:
        """What the lines say, in words."""
        said = list(self.found.sentences())
        if self.log.engine == "SGLang":
            said.insert(0, "these are SGLang's lines; its GB are GiB, and its pool counts tokens")
        elif self.log.engine != "vLLM":
            said.insert(0, f"these are {self.log.engine}'s lines, of the pool that it serves with")
        if self.log.free_after is not None:
            said.append(f"{self.log.free_after.text} GiB stay free beside the pool")
        return (*said, *self.log.warnings)

    def to_dict(self) -> Document:
        """The document of `kvledger plan --logged-memory ... --json`."""
        found = self.found
        return {
            "num_gpu_blocks": found.num_blocks,
            "block_size": found.block_size,
            "bytes_per_block_range": [found.low_bytes_per_block, found.high_bytes_per_block],
            "is_whole_number_of_layers": found.is_whole,
            "page_size_bytes": found.page_size_bytes,
            "num_layers_of_model": self.num_layers,
            "candidates": [str(candidate) for candidate in found.candidates],
            "model_candidates": [str(candidate) for candidate in found.model_candidates],
            "engine": self.log.engine,
            "kv_cache_tokens": self.log.kv_cache_tokens,
            "kv_cache_bytes": None if self.log.available is None else self.log.available.num_bytes,
            "free_bytes_after": None if self.log.free_after is None else self.log.free_after.num_bytes,
            "warnings": list(self.log.warnings),
            "sentences": list(self.sentences()),
        }


def plan_or_explain(scenario: Scenario, asked: PlanOptions) -> "PlanResult | LogExplanation":
    """Explain a log rather than use it if no device is named, so that nothing can be planned; plan otherwise."""
    if (asked.logged_memory is None) != (asked.logged_tokens is None):
        raise InputError("--logged-memory and --logged-tokens belong together; give both")
    is_only_a_log = scenario.startup_log is not None and scenario.gpu is None and scenario.total_memory is None
    explains = asked.logged_memory is not None or is_only_a_log
    return explain_log(scenario, asked) if explains else plan_scenario(scenario, asked)


def explain_log(scenario: Scenario, asked: PlanOptions) -> LogExplanation:
    """Explain the pool of a start-up log, or of its two lines.

    Raises InputError: a line is missing or cannot be read.
    """
    log = _logged_lines(scenario, asked)
    if log.available is None or log.kv_cache_tokens is None:
        raise InputError(
            "the log lacks 'Available KV cache memory' or 'GPU KV cache size', which an explanation needs; to calibrate"
            " a plan with the rest of it, give --model and --gpu as well"
        )
    block_size = scenario.block_size or log.block_size or DEFAULT_BLOCK_SIZE
    if log.engine == "SGLang" and scenario.block_size is None and log.kv_cache_tokens % block_size:
        block_size = 1  # SGLang's pages have one token unless --page-size says otherwise
    geometry = None if scenario.model is None else load_geometry(scenario.model)
    found = explain_pool(
        log.available,
        log.kv_cache_tokens,
        block_size,
        None if geometry is None else _page_of_model(geometry, scenario, block_size),
        () if geometry is None else _stacks_of_model(geometry, scenario, block_size),
    )
    return LogExplanation(found, None if geometry is None else geometry.num_hidden_layers, log)


def _page_of_model(geometry: ModelGeometry, scenario: Scenario, block_size: int) -> int | None:
    """The page of one layer of the model asked about, on one rank; None if its pages differ."""
    dtype = served_cache_dtype(geometry, scenario.kv_cache_dtype)
    specs = tensor_parallel_layers(geometry.layer_specs(block_size, dtype), scenario.tensor_parallel_size)
    pages = {spec.page_size_bytes for spec in specs.values()}
    return pages.pop() if len(pages) == 1 else None


def _stacks_of_model(geometry: ModelGeometry, scenario: Scenario, block_size: int) -> tuple[ModelStack, ...]:
    """Its layers under the dtype that was given, or under every dtype that they could have."""
    dtypes = () if scenario.kv_cache_dtype == "auto" else (served_cache_dtype(geometry, scenario.kv_cache_dtype),)
    return model_stacks(geometry, block_size, scenario.tensor_parallel_size, dtypes)


def _plan_as_dict(result: PlanResult) -> Document:
    """The ledger of the stage that decides the pool, the pool, and everything beside them."""
    question, plan = result.question, result.plan
    deployment = plan.deployment
    pool = plan_as_dict(plan.pool)
    low, high = plan.blocks_range
    return {
        "model": deployment.geometry.name,
        "architecture": deployment.geometry.architecture,
        "device": {
            "name": question.device_name,
            "total_bytes": deployment.total_bytes,
            "free_bytes": deployment.free_bytes,
            "requested_bytes": plan.bottleneck_stage.ledger.budget.requested_bytes,
            "utilization": deployment.utilization,
            "semantics": str(deployment.semantics),
        },
        "ledger": [_row_as_dict(row, deployment.total_bytes) for row in plan.rows(plan.bottleneck_stage)],
        "available_bytes": plan.bottleneck_stage.ledger.available_bytes,
        **pool,
        "num_gpu_blocks": plan.num_blocks,
        "kv_cache_tokens": max(pool["kv_cache_tokens"], 0),
        "max_concurrency": max(pool["max_concurrency"], 0),
        "num_gpu_blocks_range": [low, high],
        "stages": [_stage_as_dict(plan, stage) for stage in plan.stages],
        "totals": totals(plan),
        "capacity": [_capacity_as_dict(plan, row) for row in result.capacity],
        "suggestions": _suggestions_as_dict(fitting_values(plan)),
        "log_lines": list(log_lines(plan)),
        "diagnoses": [_diagnosis_as_dict(diagnosis) for diagnosis in result.diagnoses],
        "assumptions": list(question.assumptions),
        "warnings": [with_options(warning) for warning in result.warnings],
        "fits": plan.fits,
        "refusal": None if plan.refusal is None else _refusal_as_dict(plan.refusal),
    }


def _row_as_dict(row: LedgerRow, total_bytes: int) -> Document:
    return {
        "name": row.name,
        "bytes": row.num_bytes,
        "source": str(row.source),
        "share": row.num_bytes / total_bytes,
        "role": str(row.role),
        "low_bytes": row.low_bytes,
        "high_bytes": row.high_bytes,
        "formula": row.formula,
    }


def _stage_as_dict(plan: DeploymentPlan, stage: StagePlan) -> Document:
    return {
        "stage": stage.stage,
        "layers": [stage.layers.start, stage.layers.stop - 1],
        "ranks": list(stage.ranks),
        "available_bytes": stage.ledger.available_bytes,
        "ledger": [_row_as_dict(row, plan.deployment.total_bytes) for row in plan.rows(stage)],
    }


def totals(plan: DeploymentPlan) -> Document:
    """What all GPUs hold together: bytes multiply with every kind of parallelism, tokens with data parallelism only."""
    deployment = plan.deployment
    engine_bytes = sum(max(rank.bytes_used, 0) for rank in plan.pool.ranks)
    tokens = max(plan.pool.kv_cache_size_tokens, 0)
    return {
        "gpus": deployment.num_gpus,
        "kv_cache_bytes": engine_bytes * deployment.data_parallel_size,
        "kv_cache_tokens": tokens * deployment.data_parallel_size,
        "max_concurrency": max(plan.pool.max_concurrency, 0) * deployment.data_parallel_size,
        "engines": deployment.data_parallel_size,
    }


def _capacity_as_dict(plan: DeploymentPlan, row: CapacityRow) -> Document:
    """Users of one length, over all data-parallel engines; blocks and bytes are of one user on the tightest rank."""
    counts = {name: max(getattr(row, name), 0) for name in ("users", "decode_users", "floor_users")}
    return {
        "context_tokens": row.context_tokens,
        "blocks_per_user": row.peak_blocks,
        "bytes_per_user": row.peak_blocks * plan.bytes_per_block,
        "floor_bytes_per_user": row.floor_bytes,
        **{name: count * plan.deployment.data_parallel_size for name, count in counts.items()},
        "exceeds_max_model_len": row.exceeds_max_model_len,
    }


def _suggestions_as_dict(values: FittingValues) -> Document:
    return {
        "kv_cache_memory_bytes_for_this_pool": values.same_pool.num_bytes,
        "largest_fitting": {
            "to_requested_limit_bytes": values.to_requested_limit.num_bytes,
            "to_requested_limit_blocks": values.to_requested_limit.num_blocks,
            "to_gpu_limit_bytes": values.to_gpu_limit.num_bytes,
            "to_gpu_limit_blocks": values.to_gpu_limit.num_blocks,
            "max_model_len": values.max_model_len,
            "gpu_memory_utilization": values.gpu_memory_utilization,
        },
        "suggested_vllm": {
            "to_requested_limit_bytes": values.suggested_vllm.to_requested_limit_bytes,
            "to_gpu_limit_bytes": values.suggested_vllm.to_gpu_limit_bytes,
        },
    }


def with_options(sentence: str) -> str:
    """A sentence from core with the parameters that it names spelled as options of the command line."""
    return spelled(sentence, _PARAMETERS)


def option_of(remedy: Remedy) -> str:
    """The option that sets a remedy's parameter, as on the command line."""
    return f"--{remedy.parameter.replace('_', '-')}"


def _diagnosis_as_dict(diagnosis: Diagnosis) -> Document:
    return {
        "complaint": diagnosis.complaint,
        "row": with_options(diagnosis.row),
        "bytes": diagnosis.row_bytes,
        "findings": [with_options(finding) for finding in diagnosis.findings],
        "remedies": [
            {"option": option_of(remedy), "value": remedy.value, "num_blocks": remedy.num_blocks, "cost": remedy.cost}
            for remedy in diagnosis.remedies
        ],
    }


def _refusal_as_dict(refusal: DoesNotFitError) -> Document:
    out: Document = {"message": with_options(str(refusal))}
    if isinstance(refusal, MemoryShortfallError | PlanRefusedError):
        sizes = ("needed_bytes", "available_bytes", "shortfall_bytes", "largest")
        out |= {"condition": str(refusal.condition), **{name: getattr(refusal, name) for name in sizes}}
    if isinstance(refusal, MemoryShortfallError):
        out["largest"] = {with_options(name): value for name, value in refusal.largest.items()}
    return out


def explanation(plan: DeploymentPlan) -> tuple[str, ...]:
    """Every formula with its numbers: what layers store, the ledger row by row, the pool, one request."""
    deployment = plan.deployment
    stage = plan.bottleneck_stage
    budget = stage.ledger.budget
    lines = ["what one token stores, over the whole model:"]
    lines += [f"  {line}" for line in deployment.geometry.bytes_per_token_formula(deployment.cache_dtype)]
    lines.append(f"the ledger of rank {stage.ranks.start} (stage {stage.stage}):")
    for row in plan.rows(stage):
        span = "" if row.low_bytes == row.high_bytes else f"; within {row.low_bytes:,} to {row.high_bytes:,} B"
        lines.append(f"  {row.name} = {row.num_bytes:,} B ({row.source}): {row.formula}{span}")
        if row.role is RowRole.GRAPHS and not deployment.reserve_graph_memory:
            lines.append("    not set aside when the pool is sized")
    if stage.unreserved_graphs is not None:
        graphs = stage.unreserved_graphs
        lines.append(f"  {graphs.name} = {graphs.num_bytes:,} B ({graphs.source}), not set aside: {graphs.formula}")
    if deployment.kv_cache_memory_bytes is not None:
        lines.append(f"  available = {deployment.kv_cache_memory_bytes:,} B, pinned")
    else:
        lines.append(f"  available = {budget.formula(stage.ledger.non_kv_rows)} = {stage.ledger.available_bytes:,} B")
    lines.append("the pool:")
    lines += [f"  {line}" for line in explain_plan(plan.pool)]
    return tuple(lines)
