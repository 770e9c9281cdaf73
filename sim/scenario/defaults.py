"""Fills in what a scenario leaves open as vLLM's own server would, for its version and its card."""

from typing import Any

from ...core.deployment.estimates import SYNCHRONOUS_DRAFTS, default_batch_limits, default_utilization
from ...core.errors import InputError
from ...core.models.geometry import load_geometry
from ..latency.devices import find_device
from .scenario import Scenario


def engine_defaults(scenario: Scenario) -> dict[str, Any]:
    """The engine's own values of options that are not given, by field.

    Raises InputError: an unknown device or version, or asynchronous scheduling with drafts that forbid it.
    """
    found: dict[str, Any] = {}
    others = (scenario.mem_fraction_static, scenario.free_gpu_memory_fraction)
    if scenario.model is not None and scenario.gpu_memory_utilization is None and others == (None, None):
        found["gpu_memory_utilization"] = default_utilization(scenario.engine_version)
    found |= _batch_limits(scenario)
    is_synchronous = scenario.speculative_method in SYNCHRONOUS_DRAFTS
    if scenario.async_scheduling is None:
        found["async_scheduling"] = not is_synchronous
    elif scenario.async_scheduling and is_synchronous:
        raise InputError(f"vLLM refuses async_scheduling with drafts by {scenario.speculative_method}; leave it out")
    return found


def described(defaults: dict[str, Any]) -> list[str]:
    """Each default as it would be typed: `--max-num-seqs 256`, `--async-scheduling`."""
    out: list[str] = []
    for name, value in defaults.items():
        option = name.replace("_", "-")
        out.append(f"--{'' if value else 'no-'}{option}" if isinstance(value, bool) else f"--{option} {value}")
    return out


def with_engine_defaults(scenario: Scenario) -> Scenario:
    """The scenario with nothing left open that its engine decides. Raises InputError as `engine_defaults`."""
    return scenario.evolve(**engine_defaults(scenario))


def served(scenario: Scenario) -> Scenario:
    """A scenario that serves requests: without a `max_model_len` they may be as long as the pool of its model holds."""
    return scenario.evolve(max_model_len=-1) if scenario.model and scenario.max_model_len is None else scenario


def _batch_limits(scenario: Scenario) -> dict[str, int]:
    seqs, tokens = scenario.max_num_seqs, scenario.max_num_batched_tokens
    if seqs is not None and tokens is not None:
        return {}
    device = None if scenario.gpu is None else find_device(scenario.gpu)
    total_bytes = scenario.total_memory or (device.total_bytes if device else 0)
    usual_seqs, usual_tokens = default_batch_limits(total_bytes, device.name if device else "")
    if tokens is None:
        longest = scenario.max_model_len if (scenario.max_model_len or 0) > 0 else None
        if longest is None and scenario.model is not None and not scenario.enable_chunked_prefill:
            longest = load_geometry(scenario.model).default_max_model_len
        if longest is not None and not scenario.enable_chunked_prefill:
            usual_tokens = max(longest, usual_tokens)
        if longest is not None:
            usual_tokens = min((usual_seqs if seqs is None else seqs) * longest, usual_tokens)
    found = {} if tokens is not None else {"max_num_batched_tokens": usual_tokens}
    return found if seqs is not None else {"max_num_seqs": min(usual_seqs, tokens or usual_tokens), **found}
