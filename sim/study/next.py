"""Command lines: the one that reproduces a study, and those that are worth trying next."""

import shlex
from collections.abc import Callable
from typing import Any

from ..scenario.curve import CurveOptions
from ..scenario.options import texts_of
from ..scenario.scenario import Scenario
from ..search.jobs import STUDY, TRACE

NOT_OF_A_PLAN = (*TRACE, "fit")
POLICIES = "lru,fifo,lfu,s3fifo,sieve,optimum"
MAX_REMEDIES = 3


def command_line(command: str, *asked: Any, **flags: bool) -> str:
    """`kvledger study trace.jsonl --model ...` with every option that is not at its default, quoted for a shell.

    Args:
        command: its name.
        asked: a scenario, then options of the command's own.
        flags: further switches, such as `explain=True`.
    """
    words = ["kvledger", command]
    for options in asked:
        words += getattr(options, "trace", ())
        for name, text in texts_of(options).items():
            words += {"yes": [f"--{name}"], "no": [f"--no-{name}"]}.get(text, [f"--{name}", text])
    return shlex.join([*words, *(f"--{name}" for name, given in flags.items() if given)])


def next_steps(scenario: Scenario, capacities: CurveOptions, document: dict[str, Any]) -> list[dict[str, str]]:
    """What to try after a study: each a `question` and the `command` that answers it.

    Args:
        scenario: the study's.
        capacities: sizes of its curve, if they were given.
        document: the study's, as far as it is done.
    """
    plan = document["plan"]
    of_plan = _only(scenario, lambda name: name not in NOT_OF_A_PLAN)
    explain = {"question": "Why this many blocks?", "command": command_line("plan", of_plan, explain=True)}
    if plan is not None and not plan["fits"]:
        return [*_remedies(scenario, capacities, plan), explain]
    if document["derived"].get("falls_behind") is None:
        return [{"question": "To finish this study", "command": command_line("study", scenario, capacities)}, explain]
    ranks = 2 * scenario.tensor_parallel_size
    of_curve = _only(scenario, lambda name: name in (*TRACE, "model"))
    return [
        {
            "question": f"What would {ranks * scenario.pipeline_parallel_size} GPUs do?",
            "command": command_line("study", scenario.evolve(tensor_parallel_size=ranks), capacities),
        },
        _other_traffic(scenario, capacities, document),
        {
            "question": "Which eviction policy serves more?",
            "command": command_line("curve", of_curve, CurveOptions(policy=POLICIES)),
        },
        explain,
    ]


def _only(scenario: Scenario, is_wanted: Callable[[str], bool]) -> Scenario:
    return Scenario.from_dict({name: value for name, value in scenario.to_dict().items() if is_wanted(name)})


def _other_traffic(scenario: Scenario, capacities: CurveOptions, document: dict[str, Any]) -> dict[str, str]:
    falls_behind = document["derived"]["falls_behind"]
    question, factor = ("Would half the traffic keep up?", 0.5) if falls_behind else ("And twice the traffic?", 2.0)
    changed = scenario.evolve(rate_scale=scenario.rate_scale * factor)
    return {"question": question, "command": command_line("study", changed, capacities)}


def _remedies(scenario: Scenario, capacities: CurveOptions, plan: dict[str, Any]) -> list[dict[str, str]]:
    """The study again, with what was found to make the deployment fit."""
    out: list[dict[str, str]] = []
    for diagnosis in plan["diagnoses"]:
        for remedy in diagnosis["remedies"]:
            name = remedy["option"].removeprefix("--").replace("-", "_")
            if name in STUDY:
                changed = scenario.evolve(**{name: True if remedy["value"] is None else remedy["value"]})
                command = command_line("study", changed, capacities)
                out.append({"question": f"And with {remedy['option']}? ({remedy['cost']})", "command": command})
    return out[:MAX_REMEDIES]
