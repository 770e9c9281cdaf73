"""Command lines: the one that reproduces a study, and those that are worth trying next."""

import shlex
from typing import Any

# These say where the report goes, not what is in it.
NOT_REPEATED = ("output", "plots", "json")
# Options whose default is a value: leaving them out changes nothing.
DEFAULTS = (
    ("kv_cache_dtype", "auto"),
    ("tensor_parallel_size", 1),
    ("pipeline_parallel_size", 1),
    ("skip_first", 0),
    ("rate_scale", 1.0),
)
# Options that `open_trace_or_workload` takes by the same names.
OF_THE_TRACE = (
    *("trace_format", "timestamp_unit", "trace_block_size", "tokenizer", "request_rate", "on_bad_row"),
    *("seed", "skip_first", "limit", "rate_scale"),
)
NOT_OF_A_PLAN = ("trace", "workload", *OF_THE_TRACE, "capacities")
POLICIES = "lru,fifo,lfu,s3fifo,sieve,optimum"
MAX_REMEDIES = 3


def command_line(command: str, given: dict[str, Any]) -> str:
    """`kvledger study trace.jsonl --model ...` with every option that was given, quoted for a shell."""
    words = ["kvledger", command]
    for name, value in given.items():
        option = "--format" if name == "trace_format" else f"--{name.replace('_', '-')}"
        if name in NOT_REPEATED or value is None:
            continue
        if name == "trace":
            words += value
        elif isinstance(value, bool):
            words += _switch(name, option, value)
        elif (name, value) not in DEFAULTS:
            words += [option, str(value)]
    return shlex.join(words)


def _switch(name: str, option: str, value: bool) -> list[str]:
    if name == "enforce_eager":
        return [option] if value else []
    return [] if value else [option.replace("--", "--no-", 1)]


def next_steps(given: dict[str, Any], document: dict[str, Any]) -> list[dict[str, str]]:
    """What to try after a study: each a `question` and the `command` that answers it.

    Args:
        given: the study's options.
        document: the study's, as far as it is done.
    """
    plan = document["plan"]
    of_plan = {name: value for name, value in given.items() if name not in NOT_OF_A_PLAN}
    explain = {"question": "Why this many blocks?", "command": command_line("plan", of_plan) + " --explain"}
    if plan is not None and not plan["fits"]:
        return [*_remedies(given, plan), explain]
    ranks = 2 * given["tensor_parallel_size"]
    of_curve = {name: given[name] for name in ("trace", "workload", *OF_THE_TRACE, "model")}
    if document["derived"].get("falls_behind") is None:
        again = {"question": "To finish this study", "command": command_line("study", given)}
        return [again, explain]
    return [
        {
            "question": f"What would {ranks * given['pipeline_parallel_size']} GPUs do?",
            "command": command_line("study", {**given, "tensor_parallel_size": ranks}),
        },
        _other_traffic(given, document),
        {
            "question": "Which eviction policy serves more?",
            "command": command_line("curve", {**of_curve, "policy": POLICIES}),
        },
        explain,
    ]


def _other_traffic(given: dict[str, Any], document: dict[str, Any]) -> dict[str, str]:
    falls_behind = document["derived"]["falls_behind"]
    question, factor = ("Would half the traffic keep up?", 0.5) if falls_behind else ("And twice the traffic?", 2.0)
    return {
        "question": question,
        "command": command_line("study", {**given, "rate_scale": given["rate_scale"] * factor}),
    }


def _remedies(given: dict[str, Any], plan: dict[str, Any]) -> list[dict[str, str]]:
    """The study again, with what was found to make the deployment fit."""
    out: list[dict[str, str]] = []
    for diagnosis in plan["diagnoses"]:
        for remedy in diagnosis["remedies"]:
            name = remedy["option"].removeprefix("--").replace("-", "_")
            if name in given:
                value = True if remedy["value"] is None else remedy["value"]
                command = command_line("study", {**given, name: value})
                out.append({"question": f"And with {remedy['option']}? ({remedy['cost']})", "command": command})
    return out[:MAX_REMEDIES]
