"""CudaBackend on the CPU: what layers write and read through it, what others see of its tables, and its steps."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="real memory needs torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kvledger.backends import CacheArrangement, ContextRank, CudaBackend, KVScales  # noqa: E402
from kvledger.backends.cuda.attention_packages import num_local_tokens  # noqa: E402
from kvledger.backends.cuda.step_runner import StepOutputs  # noqa: E402
from kvledger.core import (  # noqa: E402
    AllocatorConfig,
    FullAttention,
    InputError,
    KVCacheAllocator,
    MisuseError,
    Request,
    Scheduler,
    SchedulerConfig,
    SequenceState,
    SlidingWindow,
    TokenBatch,
)
from kvledger.core.planner.specs import FullAttentionSpec, MambaLikeSpec, MLASpec, SlidingWindowSpec, StateArray  # noqa: E402  # noqa: E402
from kvledger.core.scheduler.engine import Wait, engine_loop  # noqa: E402
from kvledger.core.types import ScheduledStep, StepLoad  # noqa: E402
from kvledger.kernels import MissingScaleWarning  # noqa: E402

from tests.backends.served_backends import (  # noqa: E402
    FULL,
    NUM_BLOCKS,
    backend_for,
    batch,
    numbers,
    plan,
    serve,
)

pytestmark = pytest.mark.torch


# -- keys and values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrangement", CacheArrangement, ids=lambda arrangement: arrangement.value)
def test_what_is_written_is_read_back_in_every_arrangement(arrangement) -> None:
    backend = backend_for(plan(), arrangement=arrangement, kernel_block_sizes=[2], checked=True)
    allocator, _ = serve(backend)
    allocator.allocate(Request("x", 11), 11)
    backend.slot_mapping(batch((0, 0, 11)))
    padded = numbers(16)
    padded[11:] = torch.nan
    for layer in "ab":
        backend.write_kv(layer, padded, -padded)
    for layer in "ab":
        keys, values = backend.gather(layer, [0], [7], [3])
        assert torch.equal(keys, padded[3:10])
        assert torch.equal(values, -padded[3:10])
    assert not backend.layers["a"].key.isnan().any()


def test_a_latent_is_written_in_two_parts_and_read_as_one() -> None:
    backend = backend_for(plan(MLASpec(block_size=4, head_size=24, dtype="bf16")))
    allocator, _ = serve(backend)
    allocator.allocate(Request("x", 9), 9)
    backend.slot_mapping(batch((0, 0, 9)))
    latent, rope = numbers(9, 1, 16)[:, 0], numbers(9, 1, 8)[:, 0]
    backend.write_kv("b", latent, rope)
    (read,) = backend.gather("b", [0], [9])
    assert torch.equal(read, torch.cat([latent, rope], dim=1))
    with pytest.raises(InputError, match="not a latent cache"):
        backend.attend("b", numbers(9, 4), scale=1.0, num_reqs=1)


def test_a_state_is_copied_but_not_written_through_slots() -> None:
    state = MambaLikeSpec(block_size=4, states=(StateArray((16, 16), "bf16"),))
    backend = backend_for(plan(FULL, state))
    serve(backend, [FullAttention(4), SequenceState(4)])
    with pytest.raises(InputError, match="layer c is a mamba cache"):
        backend.write_kv("c", numbers(1), numbers(1))
    with pytest.raises(InputError, match="no layer 'q' on this rank; it has a, b, c, d"):
        backend.write_kv("q", numbers(1), numbers(1))


@pytest.mark.parametrize("is_mixed", [True, False])
def test_blocks_of_groups_that_would_misread_each_other_are_cleared_when_they_are_taken(is_mixed) -> None:
    """A state is read before all of it is written; what another group left there must not be taken for it."""
    state = MambaLikeSpec(block_size=4, states=(StateArray((16, 16), "bf16"),))
    window = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="bf16", sliding_window=4)
    backend = backend_for(plan(FULL, state if is_mixed else window, num_blocks=12))
    kinds = [FullAttention(4), SequenceState(4) if is_mixed else SlidingWindow(4, 4)]
    allocator, _ = serve(backend, kinds, num_blocks=12)
    ones = torch.ones(20, 2, 16, dtype=torch.bfloat16)
    allocator.allocate(Request("x", 20), 20)  # 10 of 11 blocks, of which 5 are written
    backend.slot_mapping(batch((0, 0, 20)))
    backend.write_kv("a", ones, ones)
    allocator.free("x")
    allocator.allocate(Request("y", 16), 16)
    backend.prepare(batch((0, 0, 16)))
    taken = [block for group in allocator.block_ids("y") for block in group]
    is_dirty = [backend.layers["a"].pages[0][block].any().item() for block in taken]
    assert any(is_dirty) is not is_mixed
    assert backend.layers["a"].pages[0].any()


def test_layers_that_share_a_cache_are_bound_to_one() -> None:
    backend = backend_for(plan())
    allocator, _ = serve(backend)
    in_order, by_name = backend.bind(["a", "reader", "b"], {"reader": "a"})
    assert [cache.name for cache in in_order] == ["a", "a", "b"]
    assert by_name["reader"] is by_name["a"]
    allocator.allocate(Request("x", 2), 2)
    backend.slot_mapping(batch((0, 0, 2)))
    backend.write_kv("a", numbers(2), numbers(2))
    assert torch.equal(backend.gather("reader", [0], [2])[0], numbers(2))


def test_f05_quantised_bytes_with_different_scales() -> None:
    """Field report F05: k_scale 0.5, v_scale 2.0, e4m3."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="fp8")
    scales = {name: KVScales(k_scale=0.5, v_scale=2.0) for name in "ab"}
    backend = backend_for(plan(spec), model_dtype=torch.bfloat16, kv_scales=scales)
    allocator, _ = serve(backend)
    allocator.allocate(Request("x", 1), 1)
    backend.slot_mapping(batch((0, 0, 1)))
    x = torch.tensor([[[1.0, 150.0, 300.0, -300.0]]], dtype=torch.bfloat16)
    backend.write_kv("a", x, x)
    cache = backend.layers["a"]
    assert cache.key[1, 0, 0].view(torch.uint8).tolist() == [0x40, 0x79, 0x7E, 0xFE]
    assert cache.value[1, 0, 0].view(torch.uint8).tolist() == [0x30, 0x69, 0x71, 0xF1]
    keys, values = backend.gather("a", [0], [1])
    assert keys.dtype == torch.bfloat16
    assert keys.flatten().tolist() == [1.0, 144.0, 224.0, -224.0]
    assert values.flatten().tolist() == [1.0, 144.0, 288.0, -288.0]


def test_memory_that_was_refused_is_not_there_and_can_still_be_made() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="fp8")
    backend = CudaBackend(device="cpu", max_num_batched_tokens=64)
    with pytest.raises(InputError, match="give model_dtype"):
        backend.initialize(plan(spec))
    assert not backend.layers
    backend.initialize(plan())
    assert backend.raw.numel() == plan().size_bytes


def test_a_quantised_cache_needs_the_models_dtype_and_warns_of_missing_scales() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="fp8")
    with pytest.raises(InputError, match="layers a, b are quantised; give model_dtype"):
        backend_for(plan(spec))
    with pytest.warns(MissingScaleWarning, match="[kv]_scale of layer a"):
        backend_for(plan(spec), model_dtype=torch.bfloat16, kv_scales={"b": KVScales(1.0, 1.0)})
    with pytest.raises(InputError, match="scales for a; quantised layers are none"):
        backend_for(plan(), kv_scales={"a": KVScales(1.0, 1.0)})


def test_attention_over_the_pool_is_attention_over_the_tokens() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="fp32")
    backend = backend_for(plan(spec), arrangement=CacheArrangement.FLASH_HND)
    allocator, _ = serve(backend)
    for name, length in (("x", 11), ("y", 6)):
        allocator.allocate(Request(name, length), length)
    keys, values = numbers(17, dtype=torch.float32), numbers(17, seed=1, dtype=torch.float32)
    query = numbers(17, heads=4, seed=2, dtype=torch.float32)
    backend.slot_mapping(batch((0, 0, 11), (1, 0, 6)))
    backend.write_kv("a", keys, values)
    found = backend.attend("a", query, scale=0.25, num_reqs=2)
    for start, end in ((0, 11), (11, 17)):
        q, k, v = (t[start:end].transpose(0, 1)[None] for t in (query, keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.25, enable_gqa=True
        )
        torch.testing.assert_close(found[start:end], expected[0].transpose(0, 1))


# -- FlashInfer's view -----------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    pages_per_block=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=60, deadline=None)
def test_flashinfers_pages_are_those_of_the_tables(lengths, pages_per_block) -> None:
    backend = backend_for(plan(num_blocks=80), kernel_block_sizes=[4 // pages_per_block], max_num_batched_tokens=300)
    allocator, _ = serve(backend, num_blocks=80)
    for number, length in enumerate(lengths):
        allocator.allocate(Request(str(number), length), length)
    tokens = batch(*[(allocator.row_of(str(number)), 0, length) for number, length in enumerate(lengths)])
    backend.prepare(tokens)
    tables = backend.flashinfer_tables(tokens)
    page_size = 4 // pages_per_block
    assert tables.indptr.tolist() == tables.indptr_host.tolist()
    for number, length in enumerate(lengths):
        begin, end = tables.indptr[number : number + 2].tolist()
        pages, last = tables.indices[begin:end].tolist(), int(tables.last_page_len[number])
        assert 1 <= last <= page_size
        assert (len(pages) - 1) * page_size + last == length
        (blocks,) = allocator.block_ids(str(number))
        slots = [page * page_size + offset for page in pages for offset in range(page_size)][:length]
        assert slots == [blocks[position // 4] * 4 + position % 4 for position in range(length)]


@given(num_tokens=st.integers(0, 100), size=st.integers(1, 4), stripe=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_a_context_rank_counts_the_tokens_that_it_holds(num_tokens, size, stripe) -> None:
    for rank in range(size):
        held = [position for position in range(num_tokens) if position // stripe % size == rank]
        (found,) = num_local_tokens(np.array([num_tokens]), ContextRank(rank, size, stripe))
        assert found == len(held)


def test_a_context_rank_reads_nothing_back_alone() -> None:
    spec = FullAttentionSpec(block_size=2, num_kv_heads=2, head_size=16, dtype="bf16")
    backend = backend_for(plan(spec), context=ContextRank(1, 2))
    allocator = KVCacheAllocator(
        AllocatorConfig(num_blocks=NUM_BLOCKS, groups=[FullAttention(4)], max_model_len=50), sinks=[backend]
    )
    allocator.allocate(Request("x", 7), 7)
    assert backend.slot_mapping(batch((0, 0, 7))).tolist() == [-1, 2, -1, 3, -1, 4, -1]
    tables = backend.flashinfer_tables(batch((0, 0, 7)))
    assert (tables.indices.tolist(), tables.last_page_len.tolist()) == ([1, 2], [1])
    with pytest.raises(MisuseError, match="holds only some tokens"):
        backend.gather("a", [0], [7])
    with pytest.raises(MisuseError, match="merged over the ranks"):
        backend.attend("a", numbers(7, 4), scale=1.0, num_reqs=1)


# -- steps -----------------------------------------------------------------------------------------------------------


class CountingRunner:
    """A model that stores the position of each token as its key, and stops requests after their third output."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend
        self.launched = 0

    def launch(self, step: ScheduledStep):
        self.launched += 1
        positions = torch.from_numpy(step.batch.positions()).to(torch.bfloat16)
        key = positions[:, None, None].expand(-1, 2, 16).contiguous()
        for layer in "ab":
            self.backend.write_kv(layer, key, -key)
        return lambda: StepOutputs(outputs=step.batch.rows.tolist())


def test_an_engine_serves_with_it_and_every_token_is_where_it_belongs() -> None:
    backend = backend_for(plan())
    backend.runner = runner = CountingRunner(backend)
    allocator, _ = serve(backend)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16), allocator)
    for number in range(5):
        scheduler.submit(Request(str(number), 10 + number, max_tokens=6))
    loop, results = engine_loop(scheduler), []
    move = next(loop)
    while not isinstance(move, Wait):
        backend.submit(move)
        result = backend.collect()
        results.append(result)
        for row, end in zip(move.batch.rows.tolist(), (move.batch.first_positions + move.batch.counts).tolist()):  # noqa: B905
            keys, values = backend.gather("b", [row], [end])
            assert keys[:, 0, 0].tolist() == list(range(end))
            assert torch.equal(values, -keys)
        move = loop.send(result)
    assert runner.launched == len(results) > 10
    assert all(result.nanoseconds[0] > 0 and result.outputs for result in results)
    assert scheduler.stats.num_finished == 5


def step_of(tokens: TokenBatch, num_steps: int = 1) -> ScheduledStep:
    return ScheduledStep(tokens, StepLoad(tokens.num_tokens, 0, 0, 0, 0), num_steps)


def test_steps_are_submitted_and_collected_in_turn() -> None:
    backend = backend_for(plan())
    allocator, sim = serve(backend)
    allocator.allocate(Request("x", 6), 6)
    tokens = batch((0, 0, 6))
    with pytest.raises(MisuseError, match="collect without a submitted step"):
        backend.collect()
    with pytest.raises(InputError, match="a macro-step of 3 steps"):
        backend.submit(step_of(tokens, 3))
    backend.submit(step_of(tokens))
    assert backend.slots[0, :7].tolist() == sim.slot_mapping(tokens, 0, 7).tolist()
    with pytest.raises(MisuseError, match="a step is in flight"):
        backend.submit(step_of(tokens))
    result = backend.collect()
    assert result.outputs is None
    assert result.nanoseconds[0] >= 1


def test_warming_up_changes_no_byte_and_no_slot() -> None:
    window = SlidingWindowSpec(block_size=8, num_kv_heads=1, head_size=16, dtype="bf16", sliding_window=12)
    for arrangement in CacheArrangement:
        backend = backend_for(plan(FULL, window), arrangement=arrangement)
        serve(backend, [FullAttention(4), SlidingWindow(8, 12)])
        backend.raw.copy_(torch.arange(len(backend.raw)) % 127)
        before = backend.raw.clone()
        backend.warm_up()
        assert torch.equal(backend.raw, before)
        assert (backend.slots == -1).all()
