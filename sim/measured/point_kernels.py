"""The kernels of every step of a measured point's benchmark."""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.deployment.deployment import Deployment
from ...core.deployment.plan import plan_deployment
from ...core.errors import InputError
from ...core.models.layer_cache import LatentCache
from ...core.models.weights import scheme_by_name
from ...core.types import ScheduledStep, StepLoad
from ..latency.kernel_factors import KernelFactors
from ..latency.kernels import KernelLatency
from ..latency.roofline import RooflineLatency
from .points import MeasuredPoint
from .schedules import BLOCK_SIZE, BenchmarkQuestion, blocks_of, schedule_of

Floats = NDArray[np.float64]
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 1024, 8192
UTILIZATION = 0.95


@attrs.frozen(kw_only=True, eq=False)
class PointKernels:
    """The kernels of every step of one point's benchmark.

    Attributes:
        point: what was measured.
        model: times a step.
        kernels: seconds by class of kernels of the mean step of each entry of the schedule: float64 `[num_entries]`.
        is_uncaptured, num_sampled: whether no CUDA graph holds it, and its sampled tokens.
        in_ttft, in_tpot: how often its time counts in the mean TTFT and TPOT.
    """

    point: MeasuredPoint
    model: KernelLatency | RooflineLatency
    kernels: Mapping[str, Floats]
    is_uncaptured: NDArray[np.bool_]
    num_sampled: Floats
    in_ttft: Floats
    in_tpot: Floats

    @property
    def dtypes(self) -> str:
        """What the weights are made of."""
        return self.model.dtypes if isinstance(self.model, KernelLatency) else ""

    def means_s(self, factors: KernelFactors) -> tuple[float, float]:
        """Mean TTFT and TPOT, seconds."""
        seconds = factors.seconds(self.kernels, self.is_uncaptured, self.num_sampled, self.model.num_layers)
        return float(seconds @ self.in_ttft) + self.point.http_s, float(seconds @ self.in_tpot)


def kernels_of_point(point: MeasuredPoint) -> PointKernels:
    """Run a point's benchmark.

    Raises:
        InputError: the model's kernels or storage are not known.
        DoesNotFitError: the plan says that the server does not start.
    """
    model, blocks = _model(point), _num_blocks(point)
    most = point.concurrency * blocks_of(point.input_len + point.output_len)
    schedule = schedule_of(
        BenchmarkQuestion(
            concurrency=point.concurrency,
            input_len=point.input_len,
            output_len=point.output_len,
            shortest=point.shortest,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS * point.data_parallel_size,
            num_blocks=blocks if blocks < most else None,
        )
    )
    rows: list[dict[str, float]] = []
    for step, first, last in zip(schedule.steps, schedule.first, schedule.last, strict=True):
        one = _kernels(model, step, first)
        other = one if last is first else _kernels(model, step, last)
        rows.append({name: (seconds + other[name]) / 2 for name, seconds in one.items()})
    num_steps = np.array([step.num_steps for step in schedule.steps], dtype=float)
    return PointKernels(
        point=point,
        model=model,
        kernels={name: np.array([row[name] for row in rows]) for name in rows[0]},
        is_uncaptured=np.array([load.num_tokens > model.max_captured_tokens for load in schedule.first]),
        num_sampled=np.array([load.num_sampled for load in schedule.first], dtype=float),
        in_ttft=schedule.in_ttft * num_steps,
        in_tpot=schedule.in_tpot * num_steps,
    )


def _kernels(model: KernelLatency | RooflineLatency, step: ScheduledStep, load: StepLoad) -> dict[str, float]:
    if isinstance(model, KernelLatency):
        return model.scheduled_kernels(step, load)
    return {"gemm": model.step_seconds(load)}


def _model(point: MeasuredPoint) -> KernelLatency | RooflineLatency:
    ranks: dict[str, Any] = {
        "tensor_parallel_size": point.tensor_parallel_size,
        "pipeline_parallel_size": point.pipeline_parallel_size,
        "weights_dtype": point.quantization,
        "kv_cache_dtype": _cache_dtype(point),
    }
    try:
        return KernelLatency.for_model(
            point.geometry,
            point.device,
            **ranks,
            data_parallel_size=point.data_parallel_size,
            expert_parallel_size=point.expert_parallel_size,
        )
    except InputError:
        if point.data_parallel_size > 1:
            raise  # the roofline knows one rank
        return RooflineLatency.for_model(point.geometry, point.device, max_num_seqs=MAX_NUM_SEQS, **ranks)


def _cache_dtype(point: MeasuredPoint) -> str:
    """The cache's dtype, which tables of serving points leave out.

    8 bits where the checkpoint is a quantized copy, which asks for them, and for 8-bit weights on Blackwell, where
    published recipes set them: pools of 16 bits could not hold the requests that ran there at once.
    """
    is_blackwell = (point.device.cuda_capability or 0) // 10 == 10
    return "fp8" if point.is_requantized or (is_blackwell and point.precision == "fp8") else "auto"


def _num_blocks(point: MeasuredPoint) -> int:
    """Blocks of `BLOCK_SIZE` tokens in the caches of all ranks.

    Raises DoesNotFitError: the plan says that the server does not start.
    """
    ranks = point.tensor_parallel_size * point.data_parallel_size
    scheme = None if point.quantization in ("auto", "none") else scheme_by_name(point.quantization)
    deployment = Deployment(
        geometry=point.geometry,
        total_bytes=point.device.total_bytes,
        free_bytes=point.device.total_bytes,
        utilization=UTILIZATION,
        # Data-parallel ranks divide the experts, which are nearly all of the weights.
        tensor_parallel_size=ranks,
        pipeline_parallel_size=point.pipeline_parallel_size,
        max_num_seqs=256,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=point.input_len + point.output_len + 1,
        kv_cache_dtype=_cache_dtype(point),
        cuda_capability=point.device.cuda_capability,
        quantization=scheme,
        ignore_config_quantization=point.quantization == "none",
        validate=False,
    )
    plan = plan_deployment(deployment)
    if plan.refusal is not None:
        raise plan.refusal
    # Each rank stores the whole latents of its own requests, and the whole heads, of which the plan counts a share.
    has_latents = any(isinstance(cache, LatentCache) for layer in point.geometry.layers for cache in layer)
    return plan.pool.kv_cache_size_tokens // BLOCK_SIZE * (point.data_parallel_size if has_latents else 1)
