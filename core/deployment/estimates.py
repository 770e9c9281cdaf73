"""Estimates of a server's memory without a GPU: weights, activation peak, non-torch memory and graphs, by formulas.

One set of formulas serves all models. Each constant of `EstimateConstants` can be overridden, and every row is marked
as an estimate with its formula and the range in which the truth is expected. Checked against the `num_gpu_blocks` of
real servers (golden/measured_serving.jsonl).
"""

import attrs

from ..errors import InputError
from ..memory.ledger import LedgerRow, RowRole, RowSource
from ..models.geometry import ModelGeometry
from ..models.weights import Groups, QuantizationScheme, WeightKind, weight_bytes
from ..planner.cache_dtype import BITS_PER_ELEMENT, canonical_dtype
from ..quantities import GIB, MIB


@attrs.frozen(kw_only=True)
class EstimateConstants:
    """Sizes that no configuration gives. A range is the smallest and the largest plausible multiple of an estimate."""

    hidden_copies: int = 3  # vectors of the hidden size that a step keeps per token: residual, normed input, output
    unknown_block_copies: int = 8  # the same for the widest block of a model whose matrices are not known
    # Bytes of a full sampling step with top-k and top-p per request and vocabulary entry: logits in 16 bits and in
    # fp32, sorted values and indices (4 + 8) with the sort's own copies of both, probabilities and their cumulative
    # sum (4 + 4).
    sampler_bytes_per_logit: int = 40
    non_torch_bytes: int = 300 * MIB  # handles, workspaces and kernels of libraries, after the first reading
    collective_bytes: int = 450 * MIB  # channels and buffers of collectives, on ranks that use them
    graph_bytes_per_layer: int = 256 * 1024  # bytes of one captured batch size in one layer
    encoder_bytes: int = 3 * GIB // 2  # a multimodal encoder with its profiling run, which no text config describes
    weights_range: tuple[float, float] = (1.0, 1.01)  # buffers and padding add to the exact count
    transient_range: tuple[float, float] = (0.6, 1.6)
    non_torch_range: tuple[float, float] = (0.3, 1.8)
    graph_range: tuple[float, float] = (0.25, 3.0)
    encoder_range: tuple[float, float] = (0.0, 3.4)


def profiling_tokens(max_num_batched_tokens: int, max_num_seqs: int) -> tuple[int, ...]:
    """Tokens of each request in the step of a profiling run: as many requests as may run, evenly filled.

    The division rounds down and the last request takes the rest, as in vLLM's dummy batch.

    Raises:
        InputError: no tokens, or no requests.
    """
    if max_num_batched_tokens < 1 or max_num_seqs < 1:
        raise InputError(
            f"a profiling step of {max_num_batched_tokens} tokens over {max_num_seqs} requests; both must be at least 1"
        )
    num_requests = min(max_num_batched_tokens, max_num_seqs)
    even, left_over = divmod(max_num_batched_tokens, num_requests)
    return (*(even,) * (num_requests - 1), even + left_over)


def _estimate(name: str, num_bytes: int, spread: tuple[float, float], role: RowRole, formula: str) -> LedgerRow:
    low_bytes, high_bytes = (int(num_bytes * factor) for factor in spread)
    return LedgerRow(name, num_bytes, RowSource.ESTIMATE, role, formula, low_bytes, high_bytes)


def weights_row(
    groups: Groups,
    *,
    dtype: str,
    scheme: QuantizationScheme | None,
    tensor_parallel_size: int,
    constants: EstimateConstants,
) -> LedgerRow:
    """Weights of one rank: its parameters x bytes per parameter, scales included."""
    size = weight_bytes(groups, dtype=dtype, scheme=scheme, tensor_parallel_size=tensor_parallel_size)
    model_bytes = BITS_PER_ELEMENT[canonical_dtype(dtype)] / 8
    if scheme is None:
        formula = f"{size.parameters:,} parameters on this rank x {model_bytes:g} B ({dtype})"
    else:
        covered = ", ".join(sorted(scheme.kinds))
        bits = float(scheme.bits + scheme.scale_bits)
        formula = (
            f"{size.parameters:,} parameters on this rank: {covered} in {bits:.4g} bits ({scheme.name}), the rest in"
            f" {dtype}"
        )
    row = _estimate("weights", size.num_bytes, constants.weights_range, RowRole.RESIDENT, formula)
    if size.padding_bytes:  # other kernels have smaller tiles, or none
        formula = f"{formula}; {size.padding_bytes:,} B of it fill the tiles of the kernels"
        row = attrs.evolve(row, low_bytes=row.low_bytes - size.padding_bytes, formula=formula)
    if scheme is None or not scheme.unknown:
        return row
    return attrs.evolve(
        row,
        high_bytes=row.high_bytes + size.unquantised_attention_bytes,
        formula=f"{formula}; not known: {'; '.join(scheme.unknown)}",
    )


def activation_row(
    geometry: ModelGeometry,
    layers: range,
    *,
    dtype: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    tensor_parallel_size: int,
    constants: EstimateConstants,
) -> LedgerRow:
    """Peak memory of the largest step on the stage of `layers`: the larger of the forward pass and the sampler (A02).

    Forward: tokens x bytes x (hidden_copies x hidden size + activations of the widest block on this rank). Sampler
    (last stage only): requests x vocabulary x bytes per logit, plus the forward pass's output, which is still held.
    """
    element_bytes = BITS_PER_ELEMENT[canonical_dtype(dtype)] // 8
    hidden_size, vocab_size, tokens = geometry.hidden_size, geometry.vocab_size, max_num_batched_tokens
    try:
        of_stage = geometry.weights.layers[layers.start : layers.stop]
        widest = max(widest_block(layer, tensor_parallel_size) for layer in of_stage)
        of_what = "in the widest block"
    except InputError:  # its weights were given, since nobody could count them
        widest = -(-constants.unknown_block_copies * hidden_size // tensor_parallel_size)
        of_what = f"for a block that is not known ({constants.unknown_block_copies} x hidden on {tensor_parallel_size})"
    forward = tokens * element_bytes * (constants.hidden_copies * hidden_size + widest)
    sampler = 0
    if layers.stop == geometry.num_hidden_layers:
        logits = max_num_seqs * vocab_size * constants.sampler_bytes_per_logit
        sampler = tokens * element_bytes * hidden_size + logits
    if forward >= sampler:
        formula = (
            f"forward pass: {tokens:,} tokens x {element_bytes} B x ({constants.hidden_copies} x {hidden_size:,} hidden"
            f" + {widest:,} {of_what})"
        )
    else:
        formula = (
            f"sampler: {max_num_seqs:,} requests x {vocab_size:,} vocabulary x"
            f" {constants.sampler_bytes_per_logit} B + {tokens:,} tokens x {element_bytes} B x {hidden_size:,} hidden"
        )
    return _estimate("peak activation", max(forward, sampler), constants.transient_range, RowRole.TRANSIENT, formula)


def widest_block(layer: Groups, tensor_parallel_size: int) -> int:
    """Activation elements per token of the wider of a layer's two blocks, on one rank."""
    attention = sum(g.width_on_rank(tensor_parallel_size) for g in layer if g.kind is WeightKind.ATTENTION)
    other = sum(g.width_on_rank(tensor_parallel_size) for g in layer if g.kind is not WeightKind.ATTENTION)
    return max(attention, other)


def non_torch_row(ranks: int, constants: EstimateConstants) -> LedgerRow:
    """Memory of libraries outside torch's allocator, and of collectives where an engine's `ranks` communicate."""
    base, collectives = constants.non_torch_bytes, constants.collective_bytes if ranks > 1 else 0
    formula = f"{base // MIB} MiB for libraries"
    if collectives:
        formula += f" + {collectives // MIB} MiB for collectives between {ranks} ranks"
    return _estimate("non-torch", base + collectives, constants.non_torch_range, RowRole.RESIDENT, formula)


def capture_sizes(max_num_seqs: int, largest: int = 512) -> tuple[int, ...]:
    """Captured batch sizes: 1, 2, 4, steps of 8 below 256, steps of 16 from there, up to twice the requests."""
    limit = min(2 * max_num_seqs, largest)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return tuple(size for size in sizes if size <= limit)


def graph_row(num_layers: int, max_num_seqs: int, constants: EstimateConstants) -> LedgerRow:
    """CUDA graphs: captured batches x layers x bytes each.

    Every size is captured in the pieces between attention calls; decode batches are captured whole, too.
    """
    sizes = capture_sizes(max_num_seqs)
    num_graphs = len(sizes) + sum(size <= max_num_seqs for size in sizes)
    num_bytes = num_graphs * num_layers * constants.graph_bytes_per_layer
    formula = f"{num_graphs} captured batches x {num_layers} layers x {constants.graph_bytes_per_layer // 1024} KiB"
    return _estimate("CUDA graphs", num_bytes, constants.graph_range, RowRole.GRAPHS, formula)


def encoder_row(left_out: tuple[str, ...], constants: EstimateConstants) -> LedgerRow | None:
    """Parts of the checkpoint that the text config does not describe; None if there are none."""
    if not left_out:
        return None
    formula = f"not known: {', '.join(left_out)}, with the encoder's own profiling run"
    return _estimate("encoder", constants.encoder_bytes, constants.encoder_range, RowRole.RESIDENT, formula)


def reserves_graph_memory(engine_version: str) -> bool:
    """Whether a vLLM of that version sets graph memory aside when it sizes the pool (since 0.21).

    Raises:
        InputError: not a version number.
    """
    return version_of(engine_version) >= (0, 21)


def version_of(engine_version: str) -> tuple[int, int]:
    """Major and minor number of a version of vLLM.

    Raises:
        InputError: not a version number.
    """
    parts = engine_version.lower().removeprefix("vllm").strip().removeprefix("v").split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise InputError(f"engine_version {engine_version!r} is not a version number such as 0.21.0")
    return int(parts[0]), int(parts[1])


# Drafts with which vLLM's engine does not schedule asynchronously.
SYNCHRONOUS_DRAFTS = ("ngram",)


def default_utilization(engine_version: str | None = None) -> float:
    """`gpu_memory_utilization` of a version of vLLM, unless given: 0.92, or 0.9 before it set graph memory aside.

    Raises:
        InputError: not a version number.
    """
    return 0.92 if engine_version is None or reserves_graph_memory(engine_version) else 0.9


def default_batch_limits(total_bytes: int, device_name: str) -> tuple[int, int]:
    """`max_num_seqs` and `max_num_batched_tokens` of vLLM's server on a device (`get_batch_defaults` of 0.32).

    Args:
        total_bytes: memory of the device; 0 where none is known, which vLLM treats as a small one.
        device_name: its name, in which vLLM looks for an A100.
    """
    if total_bytes >= 160 * GIB:
        return 1_024, 16_384
    if total_bytes >= 70 * GIB and "a100" not in device_name.lower():
        return 1_024, 8_192
    return 256, 2_048
