"""The cache kernels on a card, as fractions of what the card can do: `make gpu PYTHON=python3` prints one table.

Device time by CUDA events, contenders in turn, medians. Without a card nothing is printed and every bench skips.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bench import gpu_timing
from bench.gpu_card import card_modules, describe_card, show
from bench.gpu_timing import Row, fraction_of_copy, time_in_turn

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

ROUNDS = 30
PREFILL_TOKENS = 8192
DECODE_TOKENS = 256
LEAST_FRACTION_OF_COPY = 0.90
MOST_EMPTY_GRAPHS = 2.0
MOST_SLOT_MAPPING_US = 10.0


@pytest.fixture(scope="module")
def card(pytestconfig: pytest.Config) -> Iterator[Any]:
    """The card with its clock, the work and the kernels; prints the table of what was measured when all is done."""
    torch, triton = card_modules()
    from kvledger.kernels import TritonKernels

    from bench import gpu_workloads

    rows: list[Row] = []
    yield SimpleNamespace(
        torch=torch,
        clock=gpu_timing.CudaClock(torch),
        l2_bytes=torch.cuda.get_device_properties(0).L2_cache_size,
        kernels=TritonKernels(),
        work=gpu_workloads,
        rows=rows,
        capture=lambda run: gpu_timing.capture(torch, run),
    )
    if rows:
        show(pytestconfig, gpu_timing.format_table(describe_card(torch, triton), rows))


def captured_write(card: Any, layers: Any, slots: Any, **scales: Any) -> gpu_timing.Run:
    """The write of all layers as a graph, of which a replay was seen to write every row."""
    replay = card.capture(lambda: card.work.write_all_layers(card.kernels, layers, slots, **scales))
    for layer in layers:
        layer.key_cache.zero_()
        layer.value_cache.zero_()
    replay()
    card.work.check_written(layers, slots)
    return replay


def test_a_prefill_write_of_8192_tokens_in_32_layers_is_nearly_as_fast_as_a_copy(card: Any) -> None:
    work = card.work
    layers = work.make_layers(PREFILL_TOKENS)
    slots = work.prefill_slots(PREFILL_TOKENS)
    layer_bytes = work.row_bytes(PREFILL_TOKENS)
    run_bytes = work.NUM_LAYERS * layer_bytes
    # Each layer has sources of its own: by the time that one is read again, all others have been.
    assert gpu_timing.num_rotations(run_bytes, layer_bytes, card.l2_bytes) == 1
    targets = [card.torch.empty_like(layer.rows) for layer in layers]
    write = captured_write(card, layers, slots)
    whole = (
        card.torch.empty(run_bytes, dtype=card.torch.int8, device=work.DEVICE),
        card.torch.empty(run_bytes, dtype=card.torch.int8, device=work.DEVICE),
    )
    times = time_in_turn(
        card.clock,
        {
            "copy": [card.capture(lambda: work.copy_all_layers(layers, targets))],
            "whole": [card.capture(lambda: whole[0].copy_(whole[1]))],
            "write": [write],
            "eager": [lambda: work.write_all_layers(card.kernels, layers, slots)],
        },
        rounds=ROUNDS,
    )
    moved = 2 * run_bytes
    fraction = fraction_of_copy(times["write"], moved, times["copy"], moved)
    of_whole = fraction_of_copy(times["write"], moved, times["whole"], moved)
    card.rows += [
        Row(what="copy, 32 x 32 MiB, in a graph", timing=times["copy"], num_bytes=moved),
        Row(what="copy, 1 GiB at once, in a graph", timing=times["whole"], num_bytes=moved),
        Row(
            what="reshape_and_cache, 8,192 tokens x 32 layers, in a graph",
            timing=times["write"],
            num_bytes=moved,
            figure=f"{fraction:.3f} of the copies, {of_whole:.3f} of the one",
            required=f">= {LEAST_FRACTION_OF_COPY:.2f}",
            holds=fraction >= LEAST_FRACTION_OF_COPY,
        ),
        Row(
            what="the same without a graph, launches queued ahead",
            timing=times["eager"],
            num_bytes=moved,
            figure=f"{fraction_of_copy(times['eager'], moved, times['copy'], moved):.3f} of the copies",
        ),
    ]
    assert fraction >= LEAST_FRACTION_OF_COPY, f"{fraction:.3f} of the copies"


@pytest.mark.parametrize("name", ["packed K|V, heads first", "fp8 e4m3"])
def test_other_caches_are_measured_beside_the_copy(card: Any, name: str) -> None:
    work, torch = card.work, card.torch
    is_fp8 = name == "fp8 e4m3"
    if is_fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no e4m3")
    layers = work.make_layers(
        PREFILL_TOKENS,
        work.flash_cache if is_fp8 else work.packed_cache,
        torch.float8_e4m3fn if is_fp8 else torch.bfloat16,
    )
    slots = work.prefill_slots(PREFILL_TOKENS)
    scales = {key: torch.ones(1, device=work.DEVICE) for key in ("k_scale", "v_scale")} if is_fp8 else {}
    targets = [torch.empty_like(layer.rows) for layer in layers]
    write = captured_write(card, layers, slots, **scales)
    times = time_in_turn(
        card.clock,
        {
            "copy": [card.capture(lambda: work.copy_all_layers(layers, targets))],
            "write": [write],
        },
        rounds=ROUNDS,
    )
    read = work.NUM_LAYERS * work.row_bytes(PREFILL_TOKENS)
    moved = read + (read // 2 if is_fp8 else read)
    fraction = fraction_of_copy(times["write"], moved, times["copy"], 2 * read)
    card.rows.append(
        Row(
            what=f"reshape_and_cache, {name}, 8,192 tokens x 32 layers, in a graph",
            timing=times["write"],
            num_bytes=moved,
            figure=f"{fraction:.3f} of the copies",
        )
    )


def test_a_decode_write_of_256_tokens_in_32_layers_costs_at_most_two_graphs_of_empty_kernels(card: Any) -> None:
    work = card.work
    layer_bytes = work.row_bytes(DECODE_TOKENS)
    sets = gpu_timing.num_rotations(work.NUM_LAYERS * layer_bytes, layer_bytes, card.l2_bytes)
    slots = work.decode_slots(DECODE_TOKENS)
    all_layers = [work.make_layers(DECODE_TOKENS, seed=number) for number in range(sets)]
    writes = [captured_write(card, layers, slots) for layers in all_layers]
    times = time_in_turn(
        card.clock,
        {"empty": [card.capture(lambda: work.launch_empty(work.NUM_LAYERS))], "write": writes},
        rounds=max(ROUNDS, 4 * sets),
    )
    ratio = times["write"].median_us / times["empty"].median_us
    card.rows += [
        Row(what="32 empty kernels in a graph", timing=times["empty"]),
        Row(
            what=f"reshape_and_cache, 256 tokens x 32 layers, in a graph ({sets} sets of sources in turn)",
            timing=times["write"],
            num_bytes=2 * work.NUM_LAYERS * layer_bytes,
            figure=f"{ratio:.2f} x the empty graph",
            required=f"<= {MOST_EMPTY_GRAPHS:g}",
            holds=ratio <= MOST_EMPTY_GRAPHS,
        ),
    ]
    assert ratio <= MOST_EMPTY_GRAPHS, f"{ratio:.2f} empty graphs"


@pytest.mark.parametrize(("num_reqs", "tokens_each"), [(1, 8192), (64, 128), (256, 32)])
def test_slot_mapping_of_8192_tokens_takes_at_most_10_us(card: Any, num_reqs: int, tokens_each: int) -> None:
    run = card.work.slot_mapping_run(card.kernels, num_reqs, tokens_each)
    times = time_in_turn(card.clock, {"slots": [card.capture(run)]}, rounds=ROUNDS)
    median_us = times["slots"].median_us
    card.rows.append(
        Row(
            what=f"slot mapping, {num_reqs} x {tokens_each:,} tokens, in a graph",
            timing=times["slots"],
            figure=f"{median_us:.1f} us",
            required=f"<= {MOST_SLOT_MAPPING_US:g} us",
            holds=median_us <= MOST_SLOT_MAPPING_US,
        )
    )
    assert median_us <= MOST_SLOT_MAPPING_US, f"{median_us:.1f} us"
