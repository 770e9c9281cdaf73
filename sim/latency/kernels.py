"""Step times as sums of measured kernel times."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs

from ...core.deployment.estimates import capture_sizes
from ...core.errors import InputError, positive
from ...core.models.geometry import ModelGeometry
from ...core.types import ScheduledStep, StepLoad
from .devices import Device
from .kernel_factors import CLASSES, MAX_CAPTURED_TOKENS, NO_FACTORS, KernelFactors, factors_in, read_factors
from .kernel_parts import kernel_parts
from .kernel_profile import KernelProfile
from .kernel_tables import Curve
from .models import LatencyInputs, latency_models
from .roofline import RooflineLatency

_ATTENTION = ("attention_decode", "attention_prefill")
_OF_ALL_RANKS = ("experts", "collectives")  # classes that see the tokens of all data-parallel ranks

Chunk = tuple[int, int]  # tokens of a prompt that a step computes, and tokens of the same request before them


class Attention(Protocol):
    """Times the attention of all layers in one step."""

    def seconds(self, chunks: Sequence[Chunk], num_sequences: float, context: float) -> tuple[float, float]:
        """Seconds of the decoding sequences, `context` being their mean length, and of the prompts' chunks."""
        ...


@latency_models.register("kernels")
@attrs.frozen(kw_only=True, eq=False, slots=False)
class KernelLatency:
    """A step is the sum of its kernels, each at its measured time.

        gpu  = sum over classes of factor x seconds + layers x layer_s
        gpu  = max(gpu, layers x uncaptured_layer_s) + prefill_step_s    if no CUDA graph holds the step
        time = gpu x (prefill if no graph holds it, else step) + step_s + sampled x sequence_s

    With several data-parallel ranks each rank runs the attention and the dense products of its own requests, and all
    of them wait for the rank with the most tokens; experts see the tokens of all.

    Attributes:
        by_tokens: seconds of all layers over the tokens of a step, by class of kernels.
        by_sampled: seconds of the output matrix and the sampler over the tokens that are sampled.
        attention: times attention.
        factors: fitted factors of the classes, and costs of the host.
        num_layers: decoder layers.
        max_captured_tokens: tokens of the largest step that a CUDA graph holds.
        data_parallel_size: ranks with requests of their own that run in step.
        pipeline_parallel_size: micro-batches in flight; a step is one round of them.
        longest_stage_share: layers of the longest pipeline stage divided by the mean.
        sources: where the times of each class come from.
        dtypes: what the weights are made of, such as `bf16+mxfp4`.
        description: model and dtypes.
    """

    takes: ClassVar[tuple[str, ...]] = ("kernel_profile", "calibration", "enable_expert_parallel")

    by_tokens: Mapping[str, Curve]
    by_sampled: Curve
    attention: Attention
    factors: KernelFactors
    num_layers: int
    max_captured_tokens: int = MAX_CAPTURED_TOKENS
    data_parallel_size: int = attrs.field(default=1, validator=positive)
    pipeline_parallel_size: int = attrs.field(default=1, validator=positive)
    longest_stage_share: float = 1.0
    sources: Mapping[str, str]
    dtypes: str = ""
    description: str
    # Seconds of all steps so far, and those of them in measured kernels.
    _tally: list[float] = attrs.field(init=False, repr=False, factory=lambda: [0.0, 0.0])

    @classmethod
    def from_inputs(cls, inputs: LatencyInputs) -> "KernelLatency":
        """The model of a deployment: from a folder of profiles if one is given, else from the kernel database."""
        deployment, device = inputs.deployment, inputs.device
        if deployment is None or (device is None and inputs.kernel_profile is None):
            raise InputError("--latency kernels needs --model and --gpu: it sums kernels of both")
        captured = 0 if deployment.enforce_eager else capture_sizes(deployment.max_num_seqs)[-1]
        document = None if inputs.calibration is None else read_factors(Path(inputs.calibration))
        if (num_ranks := deployment.decode_context_parallel_size) > 1:
            raise InputError(
                f"--latency kernels does not time --decode-context-parallel-size {num_ranks}: use --latency roofline"
            )
        if inputs.kernel_profile is not None:
            if inputs.enable_expert_parallel or deployment.pipeline_parallel_size > 1:
                raise InputError(
                    "--kernel-profile holds the kernels of one stage with a slice of every expert: leave out "
                    "--enable-expert-parallel and --pipeline-parallel-size"
                )
            ranks = deployment.tensor_parallel_size
            profile = KernelProfile.read(inputs.kernel_profile, deployment.geometry.num_hidden_layers, ranks)
            return attrs.evolve(cls.of_profile(profile, deployment.geometry, document), max_captured_tokens=captured)
        assert device is not None
        return cls.for_model(
            deployment.geometry,
            device,
            tensor_parallel_size=deployment.tensor_parallel_size,
            pipeline_parallel_size=deployment.pipeline_parallel_size,
            expert_parallel_size=deployment.tensor_parallel_size if inputs.enable_expert_parallel else 1,
            weights_dtype=inputs.weights_dtype,
            kv_cache_dtype=deployment.cache_dtype,
            max_captured_tokens=captured,
            document=document,
        )

    @classmethod
    def of_profile(
        cls, profile: KernelProfile, geometry: ModelGeometry, document: Mapping[str, Any] | None = None
    ) -> "KernelLatency":
        """The model of one server whose kernels were profiled; a `document` of factors calibrates it to its runs."""
        sources = dict.fromkeys(("attention", *profile.by_tokens, "head"), profile.source)
        if profile.by_sampled is None:
            sources["head"] = "not profiled: counted as 0 s"
        return cls(
            by_tokens=profile.by_tokens,
            by_sampled=profile.by_sampled or Curve((0.0,), (0.0,)),
            attention=profile,
            factors=factors_in(document or NO_FACTORS),
            num_layers=geometry.num_hidden_layers,
            sources=sources,
            description=f"{geometry.name}, profiled",
        )

    @classmethod
    def for_model(
        cls,
        geometry: ModelGeometry,
        device: Device,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        weights_dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        max_captured_tokens: int = MAX_CAPTURED_TOKENS,
        document: Mapping[str, Any] | None = None,
    ) -> "KernelLatency":
        """The model of one server, from the kernel database.

        With `data_parallel_size` above 1 each of that many ranks runs the attention of its own requests, on
        `tensor_parallel_size` devices. `expert_parallel_size` ranks hold whole experts; 1: every rank a slice of each.
        The factors of a `document` replace the shipped ones.

        Raises InputError: the database is not installed or has no tables of the device, or the model's storage or
        arithmetic is not known.
        """
        roofline = RooflineLatency.for_model(
            geometry,
            device,
            max_num_seqs=1,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            weights_dtype=weights_dtype,
            kv_cache_dtype=kv_cache_dtype,
        )
        ranks = (tensor_parallel_size, data_parallel_size, expert_parallel_size)
        parts = kernel_parts(geometry, device, ranks, roofline, weights_dtype, kv_cache_dtype)
        return cls(
            by_tokens=parts.by_tokens(),
            by_sampled=parts.by_sampled(),
            attention=parts.attention(),
            factors=factors_in(document or read_factors(), device, geometry.name, parts.dtypes),
            num_layers=geometry.num_hidden_layers,
            max_captured_tokens=max_captured_tokens,
            data_parallel_size=data_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            longest_stage_share=roofline.longest_stage_share,
            sources=parts.sources,
            dtypes=parts.dtypes,
            description=f"{geometry.name} on {device.name}, weights {weights_dtype}, KV cache {kv_cache_dtype}",
        )

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds of a step of which only sums are known: one chunk of a prompt, and sequences of one length."""
        num_tokens, pairs = load.num_prefill_tokens, load.prefill_context_tokens
        before = max(0, round((pairs - num_tokens * (num_tokens + 1) / 2) / num_tokens)) if num_tokens else 0
        chunks = [(num_tokens, before)] if num_tokens else []
        return self._total(self.kernels(chunks, load, load.decode_context_tokens), load)

    def _total(self, kernels: Mapping[str, float], load: StepLoad) -> float:
        factors, is_uncaptured = self.factors, load.num_tokens > self.max_captured_tokens
        seconds = float(factors.seconds(kernels, is_uncaptured, load.num_sampled, self.num_layers))
        self._tally[0] += seconds
        measured = sum([getattr(factors, name) * kernels[name] for name in self.measured if name in kernels])
        self._tally[1] += measured * (factors.prefill if is_uncaptured else factors.step)
        return seconds

    @functools.cached_property
    def measured(self) -> tuple[str, ...]:
        """Classes of kernels with measured times."""
        sources = {**self.sources, **dict.fromkeys(_ATTENTION, self.sources.get("attention", "roofline"))}
        return tuple(name for name in CLASSES if not sources.get(name, "roofline").startswith("roofline"))

    def scheduled_seconds(self, step: ScheduledStep, num_steps_later: int, load: StepLoad) -> float:
        """Seconds of a scheduled step, from the chunks of its prompts; or of a later step of a macro-step."""
        return self._total(self.scheduled_kernels(step, load), load)

    def scheduled_kernels(self, step: ScheduledStep, load: StepLoad) -> dict[str, float]:
        """As `kernels`, of a scheduled step."""
        chunks: list[Chunk] = []
        if load.num_prefill_tokens:
            firsts, counts = step.batch.first_positions, step.batch.counts
            drafts = 0 if step.num_draft_tokens is None else step.num_draft_tokens
            places = (counts - drafts > 1).nonzero()[0].tolist()
            chunks = [(counts.item(place), firsts.item(place)) for place in places]
        return self.kernels(chunks, load, load.decode_context_tokens)

    def kernels(self, chunks: Sequence[Chunk], load: StepLoad, decode_context: int) -> dict[str, float]:
        """Seconds of a step's kernels by class, as they were measured."""
        ranks, stages = self.data_parallel_size, self.pipeline_parallel_size
        num_prefill, num_decode, sampled = load.num_prefill_tokens, load.num_decode_tokens, load.num_sampled
        # A sequence that verifies drafts decodes several tokens while its cache is read once.
        sequences = sampled if 0 < sampled < num_decode else num_decode
        shared = stages * ranks
        rank_tokens = (num_decode + num_prefill) / shared
        if ranks > 1 and num_prefill:  # all ranks wait for the one with the longest chunk
            rank_tokens = num_decode / shared + max([num_prefill / ranks, *(count for count, _ in chunks)]) / stages
        tokens = {True: (num_prefill + num_decode) / stages, False: rank_tokens}
        found = {name: curve.at(tokens[name in _OF_ALL_RANKS]) for name, curve in self.by_tokens.items()}
        context = decode_context / num_decode if num_decode else 0.0
        decode_s, prefill_s = self.attention.seconds(chunks, sequences / shared, context)
        found["attention_decode"] = decode_s
        found["attention_prefill"] = prefill_s / stages
        found["head"] = self.by_sampled.at(max(sampled / shared, 1.0))
        if self.longest_stage_share != 1:
            found = {name: seconds * self.longest_stage_share for name, seconds in found.items()}
        return found

    def assumptions(self) -> dict[str, object]:
        seconds, measured = self._tally
        return {
            "latency_model": "kernels: sum of measured kernel times, and costs of the host",
            "model": self.description,
            "kernel_sources": dict(self.sources),
            **({"time_in_measured_kernels": f"{measured / seconds:.1%} of all steps"} if seconds else {}),
            **self.factors.assumptions(),
        }
