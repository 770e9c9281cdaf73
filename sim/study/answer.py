"""The answer of a study, what would change it, and what to try next.

The answer is a few sentences; each figure in them has its unit, its source and its main assumption.

The `source` of a figure names its place in the study's JSON document, or the formula by which it is computed from
several such places. The terminal, the JSON and the page show the same sentences.
"""

import math
import shlex
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import attrs

from ...core.deployment.deployment import Deployment
from ...core.deployment.plan import DeploymentPlan
from ...core.deployment.remedies import try_plan
from ...core.models.weights import quantization_schemes
from ...core.planner.report import capacity_mix
from ..cache.capacity_curve import CapacityCurve
from ..figures import Document
from ..scenario.curve import CurveOptions
from ..scenario.defaults import served
from ..scenario.options import texts_of
from ..scenario.scenario import Scenario
from ..search.jobs import STUDY, TRACE


@attrs.frozen(kw_only=True)
class Figure:
    """One figure of the answer: its value as in the JSON (None if there was nothing to measure) and as shown to people.

    `source` is a path into the document, or a formula of such paths; `assumption` is what the value depends on most.
    """

    name: str
    value: float | int | str | None
    shown: str
    unit: str
    source: str
    assumption: str

    def __str__(self) -> str:
        """The value formatted for people."""
        return self.shown


@attrs.frozen
class Sentence:
    """A question and its answer, whose parts are text and figures."""

    question: str
    parts: tuple[str | Figure, ...]

    @property
    def text(self) -> str:
        """The answer as plain text."""
        return "".join(map(str, self.parts))

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures in the sentence."""
        return tuple(part for part in self.parts if isinstance(part, Figure))


def answer_as_dict(sentences: list[Sentence]) -> Document:
    """The JSON of the answer: `sentences` in order, and every figure in them once, by name."""
    figures = {figure.name: figure for sentence in sentences for figure in sentence.figures}
    return {
        "sentences": [
            {
                "question": sentence.question,
                "text": sentence.text,
                "figures": [figure.name for figure in sentence.figures],
            }
            for sentence in sentences
        ],
        "figures": {
            name: attrs.asdict(figure, filter=lambda field, _: field.name != "name") for name, figure in figures.items()
        },
    }


SHARE_LEFT_WAITING = 0.01
LEAST_LEFT_WAITING = 10


def derived_figures(parts: dict[str, Document], plan: DeploymentPlan | None) -> Document:
    """Figures computed from the finished parts.

    `pool_pinned_by`: the option that fixes the size of the pool; None if memory decides. `claims_reuse`: whether the
    trace says which prompts share blocks. `mean_request_tokens`: mean of prompt plus output, rounded up.
    `users_of_mean_length`: how many such requests the pool holds at once. `waiting_at_last_arrival`: requests waiting
    when the last one arrived. `seconds_after_last_arrival`: time until all were served. `most_waiting`: the longest
    sampled queue. `falls_behind`: more than 1 % of all requests, and more than 10, waited at the last arrival.
    """
    names = ("num_gpu_blocks_override", "kv_cache_memory_bytes")
    given = [name for name in names if plan is not None and getattr(plan.deployment, name) is not None]
    out: Document = {"pool_pinned_by": f"--{given[0].replace('_', '-')}" if given else None}
    curve, replay = parts.get("curve"), parts.get("replay")
    if curve is not None:
        trace = curve["trace"]
        out["claims_reuse"] = trace["num_requests"] > trace["num_requests_without_hash_ids"]
        out["mean_request_tokens"] = -(-(trace["input_tokens"] + trace["output_tokens"]) // trace["num_requests"])
        if plan is not None and plan.fits:
            (row,) = capacity_mix(plan.pool, (out["mean_request_tokens"],)).rows
            out["users_of_mean_length"] = row.users
    if replay is not None:
        out.update(_queue(replay))
    return out


def _queue(replay: Document) -> Document:
    last_arrival_s, series = replay["last_arrival_s"], replay["series"]
    waiting = series["num_requests_waiting"]
    sample = bisect_right(series["time_s"], last_arrival_s) - 1
    left = waiting[sample] if sample >= 0 else 0
    return {
        "seconds_after_last_arrival": replay["simulated_seconds"] - last_arrival_s,
        "waiting_at_last_arrival": left,
        "most_waiting": max(waiting, default=0),
        "falls_behind": left > max(LEAST_LEFT_WAITING, SHARE_LEFT_WAITING * replay["requests"]["total"]),
    }


HIGHER_UTILIZATION = 0.95


def what_if(plan: DeploymentPlan, curve: CapacityCurve, mean_request_tokens: int) -> list[Document]:
    """Changes one option at a time and returns the pool, the concurrent requests and the LRU hit rate that result.

    The first row is the unchanged deployment. Options that do not work with the model are left out.
    """
    rows = [_row("unchanged", plan, curve, mean_request_tokens)]
    for option, deployment in _changes(plan.deployment):
        changed = try_plan(deployment)
        if changed is not None:
            rows.append(_row(option, changed, curve, mean_request_tokens))
    return rows


def _changes(deployment: Deployment) -> list[tuple[str, Deployment]]:
    """Options worth trying, each with the changed deployment."""
    out: list[tuple[str, Deployment]] = []
    if deployment.kv_cache_memory_bytes is not None or deployment.num_gpu_blocks_override is not None:
        return out
    if deployment.utilization < HIGHER_UTILIZATION:
        changed = attrs.evolve(deployment, utilization=HIGHER_UTILIZATION)
        out.append((f"--gpu-memory-utilization {HIGHER_UTILIZATION}", changed))
    if deployment.kv_cache_dtype == "auto":
        out.append(("--kv-cache-dtype fp8", attrs.evolve(deployment, kv_cache_dtype="fp8")))
    ranks = 2 * deployment.tensor_parallel_size
    if deployment.given.weights_bytes is None and deployment.measured is None:
        if deployment.scheme is None:
            changed = attrs.evolve(deployment, quantization=quantization_schemes()["fp8"])
            out.append(("--quantization fp8", changed))
        out.append((f"--tensor-parallel-size {ranks}", attrs.evolve(deployment, tensor_parallel_size=ranks)))
    return out


def _row(option: str, plan: DeploymentPlan, curve: CapacityCurve, mean_request_tokens: int) -> Document:
    pool = plan.pool
    tokens = max(pool.kv_cache_size_tokens, 0) if plan.fits else 0
    point = curve.lru.at(tokens // curve.block_size)
    (users,) = capacity_mix(pool, (mean_request_tokens,)).rows
    return {
        "option": option,
        "gpus": plan.deployment.num_gpus,
        "fits": plan.fits,
        "num_gpu_blocks": plan.num_blocks if plan.fits else 0,
        "kv_cache_tokens": tokens,
        "users_of_mean_length": users.users if plan.fits else 0,
        "lru_token_hit_rate": curve.token_hit_rate(point) if curve.info.claims_reuse else None,
    }


NOT_OF_A_PLAN = (*TRACE, "http_ms")
POLICIES = "lru,fifo,lfu,s3fifo,sieve,optimum"
MAX_REMEDIES = 3


def command_line(command: str, *asked: Any, **flags: bool) -> str:
    """Writes the shell command (`kvledger study trace.jsonl --model ...`) with every option that is not at its default.

    `asked` are a scenario, then the command's own options; `flags` are further switches, such as `explain=True`.
    """
    words = ["kvledger", command]
    for options in asked:
        words += getattr(options, "trace", ())
        for name, text in texts_of(options).items():
            words += {"yes": [f"--{name}"], "no": [f"--no-{name}"]}.get(text, [f"--{name}", text])
    return shlex.join([*words, *(f"--{name}" for name, given in flags.items() if given)])


def next_steps(scenario: Scenario, capacities: CurveOptions, document: Document) -> list[dict[str, str]]:
    """What to try after a study: a list of `question` and the `command` that answers it."""
    plan = document["plan"]
    of_plan = _only(served(scenario), lambda name: name not in NOT_OF_A_PLAN)
    explain = {"question": "Why this many blocks?", "command": command_line("plan", of_plan, explain=True)}
    if plan is not None and not plan["fits"]:
        return [*_remedies(scenario, capacities, plan), explain]
    if document["derived"].get("falls_behind") is None:
        return [
            {"question": "How do I finish this study?", "command": command_line("study", scenario, capacities)},
            explain,
        ]
    ranks = 2 * scenario.tensor_parallel_size
    of_curve = _only(scenario, lambda name: name in (*TRACE, "model"))
    twice = ("What happens with twice the traffic?", 2.0)
    half = ("Does the engine keep up with half the traffic?", 0.5)
    traffic, factor = half if document["derived"]["falls_behind"] else twice
    at_once = scenario.max_concurrency if scenario.request_rate in (None, math.inf) else None
    load = {"rate_scale": scenario.rate_scale * factor}
    if at_once is not None:
        load = {"max_concurrency": max(1, int(at_once * factor))}
    questions = {
        f"What do {ranks * scenario.pipeline_parallel_size} GPUs give?": command_line(
            "study", scenario.evolve(tensor_parallel_size=ranks), capacities
        ),
        traffic: command_line("study", scenario.evolve(**load), capacities),
        "Which eviction policy serves more?": command_line("curve", of_curve, CurveOptions(policy=POLICIES)),
    }
    return [*({"question": question, "command": command} for question, command in questions.items()), explain]


def _only(scenario: Scenario, is_wanted: Callable[[str], bool]) -> Scenario:
    return Scenario.from_dict({name: value for name, value in scenario.to_dict().items() if is_wanted(name)})


def _remedies(scenario: Scenario, capacities: CurveOptions, plan: Document) -> list[dict[str, str]]:
    """The same study with each option that makes the deployment fit."""
    out: list[dict[str, str]] = []
    for diagnosis in plan["diagnoses"]:
        for remedy in diagnosis["remedies"]:
            name = remedy["option"].removeprefix("--").replace("-", "_")
            if name in STUDY:
                changed = scenario.evolve(**{name: True if remedy["value"] is None else remedy["value"]})
                command = command_line("study", changed, capacities)
                out.append(
                    {"question": f"What happens with {remedy['option']}? ({remedy['cost']})", "command": command}
                )
    return out[:MAX_REMEDIES]
