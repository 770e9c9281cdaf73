"""One serving point from the result file of a benchmark client that kept a fixed number of requests under way."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import InputError
from ...core.models.geometry import load_geometry
from ..latency.devices import find_device
from ..scenario.scenario import Scenario
from .points import MeasuredPoint
from .runs import MeasuredRequest, read_run

SHAPE = ("model", "gpu", "tensor_parallel_size", "pipeline_parallel_size", "quantization")
"""Fields of a scenario that a result file does not state."""
# The share of requests, after the first ones, that are sent while all other places are taken.
_LEAST_SHARE = 0.9


def is_result(path: Path) -> bool:
    """Whether a file is JSON, not a table."""
    return path.suffix in (".json", ".jsonl")


def read_result(path: Path, scenario: Scenario) -> MeasuredPoint:
    """The point of a result file: of `vllm bench serve --save-result`, or of a client that `read_run` knows.

    Raises InputError: no model or GPU is given, the file is no such result, or its number of users was not fixed.
    """
    if scenario.model is None or scenario.gpu is None:
        raise InputError(f"{path}: give the --model and --gpu of the server; a result file does not state them")
    geometry, quantization = load_geometry(scenario.model), scenario.quantization or "auto"
    return MeasuredPoint(
        name=path.name,
        engine="vllm",
        engine_version="",
        geometry=geometry,
        precision=scenario.quantization or "own",
        quantization=quantization,
        is_requantized=quantization not in ("auto", "none") and geometry.quantization_config is None,
        device=find_device(scenario.gpu),
        tensor_parallel_size=scenario.tensor_parallel_size,
        pipeline_parallel_size=scenario.pipeline_parallel_size,
        data_parallel_size=1,
        expert_parallel_size=1,
        place=str(path),
        **_measured(path),
    )


def _measured(path: Path) -> Mapping[str, Any]:
    document = _summary(path)
    if document is None:
        run = read_run(path)
        of_engine = {"http_s": 0.0} if run.in_engine else {}
        return {**_of_requests(path, list(run.requests)), **of_engine}
    users = document["max_concurrency"]
    if users is None or document["request_rate"] not in ("inf", None):
        raise InputError(f"{path}: request_rate {document['request_rate']}, max_concurrency {users}: no fixed load")
    if not document["completed"]:
        raise InputError(f"{path}: no request was answered")
    return {
        "concurrency": users,
        "input_len": round(document["total_input_tokens"] / document["completed"]),
        "output_len": round(document["total_output_tokens"] / document["completed"]),
        "shortest": 1.0,
        "ttft_ms": document["mean_ttft_ms"],
        "tpot_ms": document["mean_tpot_ms"] or None,
    }


_OF_SUMMARIES = frozenset(
    {
        *("request_rate", "max_concurrency", "completed", "total_input_tokens", "total_output_tokens"),
        *("mean_ttft_ms", "mean_tpot_ms"),
    }
)


def _summary(path: Path) -> Mapping[str, Any] | None:
    """The document of a vLLM bench without its requests, or None."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except ValueError:
        return None
    is_summary = isinstance(document, dict) and set(document) >= _OF_SUMMARIES and "start_times" not in document
    return document if is_summary else None


def _of_requests(path: Path, requests: list[MeasuredRequest]) -> Mapping[str, Any]:
    sent = np.array([request.sent_s for request in requests])
    ended = np.sort(sent + [request.e2e_s for request in requests])
    # Requests under way when each one is sent, itself included; a place that has just become free counts as taken.
    under_way = np.arange(1, len(sent) + 1) - np.searchsorted(ended, sent)
    users = int(under_way.max())
    later = under_way[users:]
    if not later.size or (later >= users - 1).mean() < _LEAST_SHARE:
        raise InputError(
            f"{path}: no fixed load: up to {users:,} requests were under way; explain-run replays such runs"
        )
    inputs, outputs = ([getattr(request, name) for request in requests] for name in ("input_len", "output_len"))
    shortest = (min(inputs) / max(inputs) + min(outputs) / max(outputs)) / 2
    tpots = [request.tpot_s for request in requests if request.tpot_s is not None]
    return {
        "concurrency": users,
        "input_len": round(2 * float(np.mean(inputs)) / (1 + shortest)),
        "output_len": round(2 * float(np.mean(outputs)) / (1 + shortest)),
        "shortest": shortest,
        "ttft_ms": 1e3 * float(np.mean([request.ttft_s for request in requests])),
        "tpot_ms": 1e3 * float(np.mean(tpots)) if tpots else None,
    }
