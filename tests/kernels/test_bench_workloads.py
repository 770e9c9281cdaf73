"""What the GPU benches run, in small and without a card: it writes every row where the slots say, and sees if not."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the benches need torch")

pytestmark = pytest.mark.torch

NUM_TOKENS = 32


@pytest.fixture
def work(triton_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The workloads on the CPU, two layers. The kernels come first: they decide whether Triton interprets."""
    if torch.cuda.is_available():
        pytest.skip("on a card the benches check themselves")
    from bench import gpu_workloads

    monkeypatch.setattr(gpu_workloads, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_workloads, "NUM_LAYERS", 2)
    return gpu_workloads


@pytest.mark.parametrize("cache_of", ["flash_cache", "packed_cache"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_prefill_fills_whole_blocks_of_every_layer(work: Any, triton_kernels: Any, cache_of: str, dtype: str) -> None:
    layers = work.make_layers(NUM_TOKENS, getattr(work, cache_of), getattr(torch, dtype))
    slots = work.prefill_slots(NUM_TOKENS)
    assert len(slots.unique()) == NUM_TOKENS
    assert slots.min() >= work.BLOCK_SIZE  # block 0 is the null block
    scales = {name: torch.ones(1) for name in ("k_scale", "v_scale")} if dtype == "float8_e4m3fn" else {}
    work.write_all_layers(triton_kernels, layers, slots, **scales)
    work.check_written(layers, slots)


def test_a_decode_writes_one_row_to_a_block_of_each_request(work: Any, triton_kernels: Any) -> None:
    layers, slots = work.make_layers(NUM_TOKENS), work.decode_slots(NUM_TOKENS)
    assert len((slots // work.BLOCK_SIZE).unique()) == NUM_TOKENS
    work.write_all_layers(triton_kernels, layers, slots)
    work.check_written(layers, slots)


def test_a_row_that_was_not_written_is_seen(work: Any, triton_kernels: Any) -> None:
    layers, slots = work.make_layers(NUM_TOKENS), work.decode_slots(NUM_TOKENS)
    work.write_all_layers(triton_kernels, layers[:1], slots)
    with pytest.raises(AssertionError, match="layer 1: a key is not at its slot"):
        work.check_written(layers, slots)


def test_two_layers_and_two_seeds_have_different_sources(work: Any) -> None:
    first, second = work.make_layers(NUM_TOKENS)
    other, _ = work.make_layers(NUM_TOKENS, seed=1)
    assert not torch.equal(first.rows, second.rows)
    assert not torch.equal(first.rows, other.rows)


def test_bytes_of_a_layer_are_those_of_its_keys_and_values(work: Any) -> None:
    (layer, _) = work.make_layers(NUM_TOKENS)
    assert work.row_bytes(NUM_TOKENS) == layer.rows.numel() * layer.rows.element_size()
    assert work.row_bytes(8192) == 32 << 20


def test_the_copy_moves_the_same_rows(work: Any) -> None:
    layers = work.make_layers(NUM_TOKENS)
    targets = [torch.zeros_like(layer.rows) for layer in layers]
    work.copy_all_layers(layers, targets)
    assert all(torch.equal(layer.rows, target) for layer, target in zip(layers, targets, strict=True))


def test_slot_mapping_is_checked_before_it_is_timed(work: Any, triton_kernels: Any, twins: Any) -> None:
    work.slot_mapping_run(triton_kernels, num_reqs=3, tokens_each=20)

    class Nothing:
        def compute_slot_mapping(self, slot_mapping: Any, **_: Any) -> None:
            slot_mapping.zero_()

    with pytest.raises(AssertionError, match="a slot is wrong"):
        work.slot_mapping_run(Nothing(), num_reqs=3, tokens_each=20)


def test_an_empty_kernel_can_be_launched(work: Any) -> None:
    work.launch_empty(2)
