"""What the simulator says a measured server would have done, beside what its client measured."""

from collections.abc import Iterator
from typing import Any

import attrs
import simpy

from ...backends.sim_backend import SimBackend
from ...core.allocator.allocator import KVCacheAllocator
from ...core.allocator.config import AllocatorConfig
from ...core.cache_kinds import FullAttention
from ...core.errors import InputError
from ...core.models.catalog import catalogue_name
from ...core.models.geometry import ModelGeometry, builtin_geometry
from ...core.scheduler.config import SchedulerConfig
from ...core.scheduler.scheduler import Scheduler
from ...core.types import Request, StepLoad
from ..engine.distributions import QuantileSketch
from ..engine.engine import NANOSECONDS, AsyncSchedulingEngine
from ..engine.metrics import Recorder
from ..engine.trace_keys import TraceKeySource
from ..latency.calibration import MeasuredStep
from ..latency.devices import DeviceFactors, find_device
from ..latency.roofline import RooflineLatency
from ..workloads.multi_turn import multi_turn_requests
from .measured_serving import MeasuredServer

MS = 1_000_000
_QUANTISED_CHECKPOINT = frozenset({"fp8", "dynamic", "static", "w8a8", "int8", "awq", "gptq", "int4", "w4a16", "nvfp4"})


@attrs.frozen(kw_only=True)
class ClientTerms:
    """What stands between an engine and the clock of its client.

    Attributes:
        http_ms: from the client's send to the engine's queue and back from the engine to the client's first chunk:
            connection, tokenization, detokenization, the way of a chunk. Part of TTFT and of E2E. What the measured
            H100 servers' TTFT holds besides the steps that a request waits for and its own.
    """

    http_ms: float = 8.0

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.http_ms < float("inf"):
            raise InputError(f"http_ms is {self.http_ms}; it must be 0 or more")


@attrs.frozen(kw_only=True)
class ServedRun:
    """Predicted latencies of one server as its client would measure them, ms, under the names of the measured ones.

    Attributes:
        latencies: `e2e_mean`, `e2e_p90`, `e2e_p99`, `ttft_mean`, `ttft_p90`, `ttft_p99`, `itl_mean`.
        prefix_hit_rate: of prompt tokens.
        num_preemptions: of the whole run.
        num_finished: requests.
        assumptions: of latency model, engine and client.
    """

    latencies: dict[str, float]
    prefix_hit_rate: float
    num_preemptions: int
    num_finished: int
    assumptions: dict[str, Any]


def served_geometry(server: MeasuredServer) -> ModelGeometry:
    """The built-in model behind the server's checkpoint; a quantised checkpoint has the geometry of its original.

    Raises:
        InputError: no such built-in model.
    """
    words = server.model.split("-")
    while len(words) > 1 and words[-1].lower() in _QUANTISED_CHECKPOINT:
        words.pop()
    original = "-".join(words)
    return builtin_geometry(original if catalogue_name(original) else server.model)


def served_latency(server: MeasuredServer, factors: DeviceFactors | None = None) -> RooflineLatency:
    """The roofline of a measured server; the device's own factors unless others are given."""
    return RooflineLatency.for_model(
        served_geometry(server),
        find_device(server.gpu),
        tensor_parallel_size=server.tensor_parallel_size,
        weights_dtype=server.weights_dtype,
        max_num_seqs=server.max_num_seqs,
        factors=factors,
    )


def measured_steps(server: MeasuredServer) -> list[MeasuredStep]:
    """The mean decode step of each stage, to calibrate with.

    Its duration is the measured time after the first token over the tokens after it. By Little's law as many
    sequences decode as arrive in the time that a request decodes, and half of each one's output is there.
    """
    workload, latency = server.workload, served_latency(server)
    context = workload.system_prompt_tokens + workload.question_tokens + workload.output_tokens / 2
    steps: list[MeasuredStep] = []
    for stage, measured in zip(workload.stages, server.stages, strict=True):
        decoding = stage.requests_per_s * (measured.e2e_mean - measured.ttft_mean) / 1e3
        # A mean over steps: its counts are fractions.
        load = StepLoad(0, decoding, 0, decoding * context, decoding)  # pyright: ignore[reportArgumentType]
        seconds = measured.ms_per_token(workload.output_tokens) / 1e3
        steps.append(MeasuredStep(latency=latency, load=load, seconds=seconds, label=server.name))
    return steps


def simulate_server(
    server: MeasuredServer, *, client: ClientTerms, seed: int, factors: DeviceFactors | None = None
) -> ServedRun:
    """Run the server's whole workload through allocator, scheduler and roofline, under asynchronous scheduling.

    Assumed where the record is silent: turns and arrivals as the workload's parameters say; a longest request of
    what the workload needs; every layer keeps every token (full attention).

    Raises:
        InputError: the model or the device is not built in, or a recorded option contradicts another.
    """
    workload = server.workload
    latency = served_latency(server, factors)
    longest = workload.max_input_length if workload.turns == "resent" else 0
    first = workload.system_prompt_tokens + workload.question_tokens
    allocator_config = AllocatorConfig(
        num_blocks=server.num_gpu_blocks,
        groups=[FullAttention(server.block_size)],
        max_model_len=max(longest, first) + workload.output_tokens,
        max_num_reqs=server.max_num_seqs,
        key_algorithm="trace ids",
    )
    env = simpy.Environment()
    recorder = Recorder(lambda: int(env.now), server.max_num_seqs)
    backend = SimBackend(latency)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=server.max_num_seqs, max_num_batched_tokens=server.max_num_batched_tokens),
        KVCacheAllocator(allocator_config, sinks=[backend, recorder]),
    )
    engine = AsyncSchedulingEngine(env, scheduler, backend, recorder)
    env.process(engine.arrivals(_requests(server, seed)))
    env.run()
    stats = scheduler.stats
    return ServedRun(
        latencies={
            **_shifted("e2e", recorder.e2e_ns, client.http_ms),
            **_shifted("ttft", recorder.ttft_ns, client.http_ms),
            "itl_mean": _mean_ms(recorder.itl_ns),
        },
        prefix_hit_rate=stats.prefix_hits_tokens / stats.prefix_queries_tokens,
        num_preemptions=stats.num_preemptions,
        num_finished=stats.num_finished,
        assumptions={
            "engine": server.engine,
            "num_gpu_blocks": f"{server.num_gpu_blocks:,}, as recorded",
            "scheduling": "asynchronous: a request joins the step after the next",
            "kv_cache_groups": f"one of full attention, blocks of {server.block_size} tokens",
            "turns": workload.turns,
            "arrivals": f"{workload.arrivals} within a stage, seed {seed}",
            "http_ms": f"{client.http_ms:g}, part of TTFT and E2E",
            **latency.assumptions(),
        },
    )


def _requests(server: MeasuredServer, seed: int) -> Iterator[Request]:
    workload, block_size = server.workload, server.block_size
    for ordinal, (arrival_s, num_input, num_output, hash_ids) in enumerate(multi_turn_requests(workload, seed)):
        yield Request(
            request_id=str(ordinal),
            num_prompt_tokens=num_input,
            max_tokens=num_output,
            keys=TraceKeySource(hash_ids, num_input, ordinal, block_size, workload.block_size),
            arrival=arrival_s,
        )


def _mean_ms(sketch: QuantileSketch) -> float:
    return sketch.total / sketch.count / MS


def _shifted(name: str, sketch: QuantileSketch, shift_ms: float) -> dict[str, float]:
    summary = sketch.summary(NANOSECONDS / 1_000)
    return {f"{name}_{figure}": float(summary[figure] or 0.0) + shift_ms for figure in ("mean", "p90", "p99")}
