"""Compare allocators on a scenario's traffic: memory wasted by static, power-of-two, oracle, growing and paged ones."""

from collections.abc import Callable
from typing import Any

import attrs

from ...core.errors import DoesNotFitError, InputError
from ...core.models.geometry import ModelGeometry
from ...core.quantities import format_bytes
from ..baselines.baselines import AllocatorUsage, compare_allocators
from ..figures import Document, gib, percent
from ..traces import Trace
from .curve import bytes_per_token
from .options import ENGINE, HARDWARE, option, options
from .results import Table
from .scenario import Scenario
from .traffic import counted, open_traffic

DEFAULT_BLOCK_SIZE = 16
# (input_length, output_length) of every request, in tokens.
Lengths = list[tuple[int, int]]
Sourced = tuple[int, str]  # a number, and where it comes from
Model = tuple[ModelGeometry, int]  # a model and the bytes of a token


@options
class CompareOptions:
    """What the allocators share."""

    kv_cache_tokens: int | None = option(None, HARDWARE, "KV cache memory in token slots.", metavar="TOKENS")
    watermark: float = option(0.01, ENGINE, "Share of its blocks that the paged allocator keeps free at admission.")


@attrs.frozen(kw_only=True)
class CompareResult:
    """Five allocators on the same requests and memory; `setup` is what they share: trace, memory, block size."""

    usages: list[AllocatorUsage]
    setup: Document

    def to_dict(self) -> Document:
        """The document of `kvledger compare --json`."""
        allocators = [usage.as_dict() for usage in self.usages]
        return {**self.setup, "allocators": allocators, "assumptions": assumptions(self.usages, self.setup)}

    def to_frame(self) -> Any:
        """A data frame with a row for each allocator."""
        return Table.of_rows([usage.as_dict() for usage in self.usages]).to_frame()


def compare_scenario(
    scenario: Scenario, asked: CompareOptions | None = None, *, on_progress: Callable[[int], None] = lambda count: None
) -> CompareResult:
    """Run the scenario's requests through every allocator.

    Raises:
        InputError: an option is missing or wrong.
        DoesNotFitError: no allocator serves a single request.
    """
    asked = asked or CompareOptions()
    block_size = DEFAULT_BLOCK_SIZE if scenario.block_size is None else scenario.block_size
    model = model_of(scenario)
    slots = _token_slots(scenario, asked, model, block_size)
    source = open_traffic(scenario)
    lengths = read_lengths(source, on_progress)
    return compare_on(
        source,
        lengths,
        slots=slots,
        longest=_longest_request(scenario.max_model_len, model, lengths),
        model=model,
        block_size=block_size,
        max_num_seqs=scenario.max_num_seqs,
        watermark=asked.watermark,
    )


def compare_on(
    trace: Trace,
    lengths: Lengths,
    *,
    slots: Sourced,
    longest: Sourced,
    model: Model | None,
    block_size: int,
    max_num_seqs: int | None,
    watermark: float,
) -> CompareResult:
    """Run requests of known lengths through every allocator; token slots and longest request with their sources."""
    shared = {"block_size": block_size, "max_num_seqs": max_num_seqs, "watermark": watermark}
    kv_bytes_per_token = None if model is None else model[1]
    usages = compare_allocators(
        lengths, num_slots=slots[0], max_model_len=longest[0], kv_bytes_per_token=kv_bytes_per_token, **shared
    )
    setup = {
        "trace": trace.info.as_dict(),
        "window": trace.info.window_as_dict(),
        "num_slots": slots[0],
        "num_slots_source": slots[1],
        "kv_bytes_per_token": kv_bytes_per_token,
        "max_model_len": longest[0],
        "max_model_len_source": longest[1],
        **shared,
    }
    if model is not None and model[0].warnings:
        setup["model_warnings"] = list(model[0].warnings)
    return CompareResult(usages=usages, setup=setup)


def model_of(scenario: Scenario) -> Model | None:
    """The scenario's model and the bytes of a token; None without a model.

    Raises InputError for a dtype without a model, and for a model with windowed or state layers: its sequences are no
    rows of equal slots, which is what the allocators here place.
    """
    dtype = scenario.kv_cache_dtype
    if scenario.model is not None:
        advice = "these allocators cannot place it. Leave --model out and give --kv-cache-tokens"
        return bytes_per_token(scenario.model, dtype, advice)
    if dtype != "auto":
        raise InputError(f"--kv-cache-dtype {dtype} has no effect without --model: leave it out")
    return None


def _token_slots(scenario: Scenario, asked: CompareOptions, model: Model | None, block_size: int) -> Sourced:
    """Token slots, from the one option that is given.

    Raises InputError for none or several options, and for bytes without a model; DoesNotFitError for bytes below a
    single token.
    """
    options = {
        "--kv-cache-tokens": asked.kv_cache_tokens,
        "--num-gpu-blocks-override": scenario.num_gpu_blocks_override,
        "--kv-cache-memory-bytes": scenario.kv_cache_memory_bytes,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        raise InputError(f"the KV memory is not given: give one of {', '.join(options)}")
    if len(given) > 1:
        raise InputError(f"the KV memory is given by {' and '.join(given)}: give one of them")
    ((option, value),) = given.items()
    if option == "--kv-cache-tokens":
        return _positive(value, option), option
    if option == "--num-gpu-blocks-override":
        return _positive(value, option) * block_size, f"{option} {value:,} x {block_size} tokens"
    if model is None:
        raise InputError(f"{option} {value} needs --model, to know the bytes of a token")
    geometry, num_bytes = model
    if value < num_bytes:
        raise DoesNotFitError(
            f"{option} {format_bytes(value)} holds no token of {geometry.name}: one takes {format_bytes(num_bytes)}"
        )
    return value // num_bytes, f"{option} {value:,} // {num_bytes:,} bytes a token of {geometry.name}"


def _longest_request(max_model_len: int | None, model: Model | None, lengths: Lengths) -> Sourced:
    """Tokens of the longest request allowed: as given, else the model's own. Raises InputError where neither is."""
    if max_model_len is not None:
        return _positive(max_model_len, "--max-model-len"), "--max-model-len"
    if model is not None and model[0].max_position_embeddings is not None:
        return model[0].max_position_embeddings, f"max_position_embeddings of {model[0].name}"
    raise InputError(
        "--max-model-len is missing: static reserves that much for every request, so it decides the answer. Give the "
        f"server's value, or a --model that states one; the longest request here has {max(map(sum, lengths)):,} tokens"
    )


def read_lengths(trace: Trace, on_progress: Callable[[int], None] = lambda count: None) -> Lengths:
    """Every request's lengths. Raises InputError: there is no request."""
    lengths = [(request.input_length, request.output_length) for request in counted(trace, on_progress)]
    if not any(map(sum, lengths)):
        raise InputError(f"{trace.info.name}: no request with a token to compare allocators with")
    return lengths


def _positive(value: int, option: str) -> int:
    if value < 1:
        raise InputError(f"{option} {value}: it must be at least 1")
    return value


SATURATED_QUEUE = (
    "arrival times are not used: requests are served in their order, as many at a time as fit, and the shares are "
    "averaged over the iterations in which one waits"
)


def assumptions(usages: list[AllocatorUsage], setup: Document) -> list[str]:
    """What the figures rest on, one sentence each."""
    watermark, max_num_seqs = setup["watermark"], setup["max_num_seqs"]
    out = [
        SATURATED_QUEUE,
        f"paged: blocks of {setup['block_size']} tokens, one of them the null block; {percent(watermark)} of the "
        "blocks stay free at admission",
        "static, pow2 and oracle take chunks of a buddy allocator, whose sizes are powers of two",
        "growing gives a request twice its prompt and doubles a full region, in place or by copying",
        "growing and paged preempt the last request admitted, which is computed again",
        "no prefix is shared between requests",
    ]
    if max_num_seqs is not None:
        out.append(f"at most {max_num_seqs:,} requests run at a time")
    idle = [usage.name for usage in usages if not usage.queue_saturated and usage.finished]
    if idle:
        out.append(
            f"no request ever waited for {', '.join(idle)}: averaged over the whole run, and the batch is the work"
        )
    return out


def compare_sentences(usages: list[AllocatorUsage], setup: Document) -> list[str]:
    """The answer in words, the costs of growing, and what was refused."""
    by_name = {usage.name: usage for usage in usages}
    paged, reserving = by_name["paged"], [by_name[name] for name in ("static", "pow2", "oracle")]
    out: list[str] = []
    if paged.mean_batch and all(usage.mean_batch for usage in reserving):
        ratios = ", ".join(f"{paged.mean_batch / usage.mean_batch:.2f} x {usage.name}" for usage in reserving)
        out.append(f"Requests that paged memory runs at a time: {paged.mean_batch:,.1f} on average, that is {ratios}.")
    growth = by_name["growing"].growth
    if growth is not None and growth.num_copies:
        size = "" if growth.copied_bytes is None else f" ({gib(growth.copied_bytes)})"
        out.append(
            f"growing copied {growth.copied_tokens:,} tokens{size} in {growth.num_copies:,} moves; on average "
            f"{percent(growth.fragmentation.mean, 0)} of its free memory lay outside the largest hole."
        )
    refusals: dict[str, list[str]] = {}
    for usage in usages:
        if usage.refused:
            refusals.setdefault(_refusal(usage, setup), []).append(usage.name)
    for refusal, names in refusals.items():
        who = "Every allocator" if len(names) == len(usages) else ", ".join(names)
        out.append(f"{who} refused {refusal}")
    return out


def _refusal(usage: AllocatorUsage, setup: Document) -> str:
    too_long = f"longer than max_model_len {setup['max_model_len']:,}"
    never_fit = f"larger than its {setup['num_slots']:,} slots can ever hold"
    never_fitting = usage.refused - usage.refused_too_long
    reasons = [
        reason if count == usage.refused else f"{count:,} {reason}"
        for count, reason in ((usage.refused_too_long, too_long), (never_fitting, never_fit))
        if count
    ]
    total = usage.finished + usage.refused + usage.empty
    return f"{usage.refused:,} of {total:,} requests: {' and '.join(reasons)}."
