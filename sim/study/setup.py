"""From the options of `kvledger study` to its question."""

import inspect
from typing import Any

import attrs

from ...core.errors import InputError
from ..commands.curve import parse_capacities
from ..commands.plan import plan as plan_command
from ..latency.devices import find_device
from ..scenario.plan_question import PlanOptions, PlanQuestion, read_question
from ..scenario.trace_source import open_trace_or_workload
from ..traces import Trace
from .next import OF_THE_TRACE, command_line
from .parts import StudyQuestion

EXAMPLE = {"model": "llama-3.1-8b", "gpu": "H100"}


def read_study(given: dict[str, Any]) -> StudyQuestion:
    """The question that the options describe (`given`: option -> value as typed, None where it was not).

    Raises:
        InputError: something is missing, unknown or contradictory.
    """
    trace = open_trace_or_workload(
        given["trace"],
        given["workload"],
        **{name: given[name] for name in OF_THE_TRACE},
    )
    given, example = _with_example(given)
    question = read_question(_plan_options(given))
    question = attrs.evolve(question, assumptions=(*example, *question.assumptions))
    return StudyQuestion(
        trace=trace,
        model=given["model"],
        kv_cache_dtype=given["kv_cache_dtype"],
        plan_question=question,
        device=find_device(given["gpu"]),
        weights_dtype=given["quantization"] or "auto",
        capacities=None if given["capacities"] is None else tuple(parse_capacities(given["capacities"])),
        command=command_line("study", given),
        title=_title(trace, question),
        given=given,
    )


def _with_example(given: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Where no deployment is named at all, a well-known one stands in, and the first assumption says so."""
    missing = [name for name in EXAMPLE if given[name] is None]
    if not missing:
        return given, ()
    if len(missing) < len(EXAMPLE):
        there = next(name for name in EXAMPLE if name not in missing)
        raise InputError(
            f"--{there} {given[there]} is given and --{missing[0]} is not: a study needs both, such as "
            f"--model {EXAMPLE['model']} --gpu {EXAMPLE['gpu']}"
        )
    note = (
        f"EXAMPLE: no deployment was named, so this study is about {EXAMPLE['model']} on one {EXAMPLE['gpu']}; name "
        "yours with --model and --gpu"
    )
    return {**given, **EXAMPLE}, (note,)


def _plan_options(given: dict[str, Any]) -> PlanOptions:
    """The study's options, and for all others what `kvledger plan` takes when they are not given."""
    values: dict[str, Any] = {
        name: option.default for name, option in inspect.signature(plan_command).parameters.items()
    } | given
    values["assume"] = tuple(values["assume"] or ())
    return PlanOptions(**{field.name: values[field.name] for field in attrs.fields(PlanOptions)})


def _title(trace: Trace, question: PlanQuestion) -> dict[str, str]:
    info, deployment = trace.info, question.deployment
    source = f"the {info.name} workload" if info.workload else info.name
    sizes = [
        f"{size} {name}"
        for name, size in (
            ("tensor-parallel", deployment.tensor_parallel_size),
            ("pipeline-parallel", deployment.pipeline_parallel_size),
        )
        if size > 1
    ]
    gpus = f"{deployment.num_gpus} x {question.device_name}"
    layout = f" ({', '.join(sizes)})" if sizes else ""
    origin = f", seed {info.workload['seed']}, resembles {info.workload['resembles']}" if info.workload else ""
    return {
        "heading": f"{deployment.geometry.name} on {gpus}{layout}, serving {source}",
        "subtitle": f"KV-cache study of {info.name} ({info.format}{origin})",
    }
