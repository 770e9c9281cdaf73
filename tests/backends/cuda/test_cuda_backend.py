"""CudaBackend on the CPU: what it refuses, what it sends to the device, and which blocks are copied."""

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="real memory needs torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kvledger.backends import ContextRank, CudaBackend  # noqa: E402
from kvledger.backends.cuda import tables as device_tables_module  # noqa: E402
from kvledger.backends.cuda.tables import PendingCopies  # noqa: E402
from kvledger.core import (  # noqa: E402
    AllocatorConfig,
    EventLog,
    FullAttention,
    InputError,
    KVCacheAllocator,
    MisuseError,
    Request,
    SlidingWindow,
)
from kvledger.core.planner.specs import FullAttentionSpec, SlidingWindowSpec  # noqa: E402

from tests.backends.served_backends import (  # noqa: E402
    FULL,
    backend_for,
    batch,
    numbers,
    plan,
    serve,
)

pytestmark = pytest.mark.torch


# -- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_what_was_found() -> None:
    with pytest.raises(InputError, match=rf"torch {torch.__version__.split('+')[0]}.*0 CUDA devices.*device='cpu'"):
        CudaBackend(device="cuda", max_num_batched_tokens=64)


@pytest.mark.parametrize("device", ["gpu", "meta", "mps"])
def test_other_devices_are_refused(device) -> None:
    with pytest.raises(InputError, match="'cpu'"):
        CudaBackend(device=device, max_num_batched_tokens=64)


def test_a_step_has_at_least_a_token() -> None:
    with pytest.raises(InputError, match="max_num_batched_tokens is 0"):
        CudaBackend(device="cpu", max_num_batched_tokens=0)


def test_the_simulated_backend_is_imported_without_torch() -> None:
    program = (
        "import sys; from kvledger.backends import SimBackend; assert 'torch' not in sys.modules; "
        "import kvledger.backends; assert 'CudaBackend' in kvledger.backends.__all__; "
        "assert kvledger.backends.CudaBackend.__name__ == 'CudaBackend' and 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# -- the pool --------------------------------------------------------------------------------------------------------


def test_memory_comes_first_and_once() -> None:
    with pytest.raises(MisuseError, match="call initialize first"):
        serve(CudaBackend(device="cpu", max_num_batched_tokens=64))
    backend = backend_for(plan())
    with pytest.raises(MisuseError, match="has its memory already"):
        backend.initialize(plan())
    with pytest.raises(MisuseError, match="no pool yet"):
        backend.slot_mapping(batch((0, 0, 1)))


def test_a_pool_that_was_not_planned_is_refused() -> None:
    with pytest.raises(InputError, match=r"61 blocks and groups with blocks of \[4\] tokens; the plan has 60 blocks"):
        serve(backend_for(plan()), num_blocks=61)
    with pytest.raises(InputError, match=r"blocks of \[8\] tokens; the plan has 60 blocks and \[4\] tokens"):
        serve(backend_for(plan()), [FullAttention(8)])


def test_a_second_pool_and_a_missing_commit_are_refused() -> None:
    backend = backend_for(plan())
    log = EventLog()
    allocator = KVCacheAllocator(AllocatorConfig(num_blocks=60, groups=[FullAttention(4)], max_model_len=50), [log])
    for length in (3, 9):
        allocator.allocate(Request(str(length), length), length)
    backend.apply(log[0])
    with pytest.raises(MisuseError, match="commit 2 came where 1 is next"):
        backend.apply(log[2])
    with pytest.raises(MisuseError, match="commit 0 came where 1 is next"):
        backend.apply(log[0])


def test_tables_made_before_the_pool_are_those_that_it_uses() -> None:
    with pytest.raises(MisuseError, match="call initialize first"):
        CudaBackend(device="cpu", max_num_batched_tokens=64).create_tables(
            AllocatorConfig(num_blocks=60, groups=[FullAttention(4)], max_model_len=120)
        )
    backend = backend_for(plan())
    with pytest.raises(InputError, match="61 blocks"):
        backend.create_tables(AllocatorConfig(num_blocks=61, groups=[FullAttention(4)], max_model_len=120))
    config = AllocatorConfig(num_blocks=60, groups=[FullAttention(4)], max_model_len=120, max_num_reqs=6)
    backend.create_tables(config)
    with pytest.raises(MisuseError, match="has its tables already"):
        backend.create_tables(config)
    places = [backend.slots.data_ptr(), backend.block_tables[0].data_ptr(), backend.inputs.rows.data_ptr()]
    for changes in ({"max_num_reqs": 7}, {"max_model_len": 121}):
        with pytest.raises(InputError, match="tables were made for max_num_reqs 6 and max_model_len 120"):
            serve(backend, **changes)
    allocator, sim = serve(backend)
    allocator.allocate(Request("a", 9), 9)
    tokens = batch((allocator.row_of("a"), 0, 9))
    assert backend.slot_mapping(tokens).tolist() == sim.slot_mapping(tokens).tolist()
    assert places == [backend.slots.data_ptr(), backend.block_tables[0].data_ptr(), backend.inputs.rows.data_ptr()]


def test_blocks_that_do_not_divide_over_context_ranks_are_refused() -> None:
    spec = FullAttentionSpec(block_size=3, num_kv_heads=2, head_size=16, dtype="bf16")
    backend = backend_for(plan(spec), context=ContextRank(0, 2, 2))
    with pytest.raises(InputError, match="blocks of 6 tokens do not divide into stripes of 2 on 2 ranks"):
        serve(backend, [FullAttention(6)])


# -- slots and what is sent ------------------------------------------------------------------------------------------


def test_slots_are_those_of_the_simulation_and_the_tail_is_padding() -> None:
    window = SlidingWindowSpec(block_size=8, num_kv_heads=1, head_size=16, dtype="bf16", sliding_window=12)
    backend = backend_for(plan(FULL, window))
    allocator, sim = serve(backend, [FullAttention(4), SlidingWindow(8, 12)])
    for name, length in (("x", 21), ("y", 5)):
        allocator.allocate(Request(name, length), length)
    tokens = batch((allocator.row_of("y"), 3, 2), (allocator.row_of("x"), 0, 21))
    for group in (0, 1):
        slots = backend.slot_mapping(tokens, group, 30)
        assert slots.dtype == torch.int64
        assert slots.tolist() == sim.slot_mapping(tokens, group, 30).tolist()
        assert backend.slots[group, 23:].tolist() == [-1] * 41


def test_a_batch_that_is_too_long_is_refused() -> None:
    backend = backend_for(plan())
    allocator, _ = serve(backend)
    allocator.allocate(Request("x", 70), 70)
    with pytest.raises(InputError, match="6 tokens cannot be padded to 4"):
        backend.slot_mapping(batch((0, 0, 6)), 0, 4)
    with pytest.raises(InputError, match="65 padded tokens; the buffers hold max_num_batched_tokens 64"):
        backend.slot_mapping(batch((0, 0, 6)), 0, 65)
    with pytest.raises(InputError, match="a batch of 65 tokens of 1 requests"):
        backend.slot_mapping(batch((0, 0, 65)))
    with pytest.raises(InputError, match=r"of 7 requests.*max_num_reqs 6"):
        backend.slot_mapping(batch(*[(0, 0, 1)] * 7))


def test_a_step_is_one_transfer_of_what_changed() -> None:
    backend = backend_for(plan())
    allocator, _ = serve(backend)
    for name, length in (("x", 8), ("y", 6), ("z", 7)):
        allocator.allocate(Request(name, length), length)
    backend.slot_mapping(batch((0, 0, 8), (1, 0, 6), (2, 0, 7)))
    before, before_bytes = backend.num_transfers, backend.num_transfer_bytes
    decode = batch((0, 8, 1), (1, 6, 1), (2, 7, 1))
    allocator.append(decode.rows)  # only x needs a block
    for group in (0, 0):
        backend.slot_mapping(decode, group)
    header_bytes = backend.num_transfer_bytes - before_bytes - 16
    assert backend.num_transfers == before + 1
    assert header_bytes == 128  # 6 x (8 + 4 + 4) + 7 x 4, in whole int64s: the batch; 16 bytes are one table entry
    assert backend.block_tables[0][0, :4].tolist() == [*allocator.block_ids("x")[0], 0]


def test_a_freed_row_is_the_null_block_on_the_device() -> None:
    backend = backend_for(plan())
    allocator, sim = serve(backend)
    allocator.allocate(Request("x", 30), 30)
    backend.slot_mapping(batch((0, 0, 30)))
    assert backend.block_tables[0].any()
    allocator.free("x")
    backend.prepare(batch())
    assert not backend.block_tables[0].any()
    assert backend.num_blocks_per_row[0].tolist() == sim.num_blocks_per_row[0].tolist() == [0] * 6


def test_more_than_a_transfer_holds_is_sent_in_several(monkeypatch) -> None:
    monkeypatch.setattr(device_tables_module, "MAX_STAGED_ENTRIES", 3)
    backend = backend_for(plan())
    allocator, sim = serve(backend)
    for name in "xyz":
        allocator.allocate(Request(name, 30), 30)
    before = backend.num_transfers
    tokens = batch((1, 5, 20))
    assert backend.slot_mapping(tokens).tolist() == sim.slot_mapping(tokens).tolist()
    assert backend.num_transfers == before + 8  # 3 x 8 entries
    assert np.array_equal(backend.block_tables[0].numpy()[:, :30], sim.block_tables[0])


def test_buffers_stay_where_they_are_so_that_a_recorded_step_can_be_replayed() -> None:
    """What a CUDA graph does: the same calls on the same tensors, with a new batch in the buffers."""
    backend = backend_for(plan())
    allocator, sim = serve(backend)
    key, value = numbers(4), numbers(4, seed=1)

    def recorded() -> None:
        backend.map_slots(4)
        backend.write_kv("a", key, value)

    def addresses() -> list[int]:
        inputs = backend.inputs
        tensors = [inputs.rows, inputs.query_start_loc, inputs.first_positions, inputs.seq_lens, backend.slots]
        return [tensor.data_ptr() for tensor in [*tensors, *backend.block_tables, backend.raw]]

    start = addresses()
    for name in "xyz":
        allocator.allocate(Request(name, 1), 1)
    for step in range(12):
        tokens = batch(*[(row, step, 1) for row in range(3)])
        if step:
            allocator.append(tokens.rows)
        key.copy_(numbers(4, seed=step))
        value.copy_(numbers(4, seed=100 + step))
        backend.prepare(tokens)
        recorded()
        assert backend.slots[0, :4].tolist() == sim.slot_mapping(tokens, 0, 4).tolist()
        keys, values = backend.gather("a", [0, 1, 2], [1, 1, 1], [step] * 3)
        assert torch.equal(keys, key[:3])
        assert torch.equal(values, value[:3])
    assert addresses() == start


# -- copies ----------------------------------------------------------------------------------------------------------


def test_a_child_that_diverges_copies_first_and_its_parent_keeps_its_tokens() -> None:
    backend = backend_for(plan())
    allocator, _ = serve(backend)
    allocator.allocate(Request("x", 6), 6)
    first = numbers(6)
    backend.slot_mapping(batch((0, 0, 6)))
    for layer in "ab":
        backend.write_kv(layer, first, -first)
    allocator.fork("x", Request("child", 6))
    child = allocator.row_of("child")
    allocator.append(np.array([child]))
    allocator.append(np.array([0]))
    mine, own = numbers(1, seed=1), numbers(1, seed=2)
    backend.slot_mapping(batch((child, 6, 1), (0, 6, 1)))
    for layer in "ab":
        backend.write_kv(layer, torch.cat([mine, own]), -torch.cat([mine, own]))
    for layer in "ab":
        keys, values = backend.gather(layer, [0, child], [7, 7])
        assert torch.equal(keys, torch.cat([first, own, first, mine]))
        assert torch.equal(values, -keys)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 5)), max_size=20))
@settings(max_examples=300, deadline=None)
def test_rounds_of_parallel_copies_give_what_one_copy_after_the_other_gives(decided) -> None:
    pending, expected = PendingCopies(), list(range(6))
    for group, source, target in decided:
        if source != target:
            pending.add(group, source, target)
            expected[target] = expected[source]
    found = list(range(6))
    for _, sources, targets in pending.take():
        assert len(set(targets.tolist())) == len(targets)
        assert not set(targets.tolist()) & set(sources.tolist())
        for target, content in zip(targets.tolist(), [found[source] for source in sources.tolist()], strict=True):
            found[target] = content
    assert found == expected
    assert not pending


def test_an_entry_that_changes_twice_is_sent_once_with_its_last_value() -> None:
    backend = backend_for(plan())
    allocator, sim = serve(backend)
    for name, length in (("x", 4), ("y", 12)):
        allocator.allocate(Request(name, length), length)
    backend.prepare(batch())
    before_bytes = backend.num_transfer_bytes
    row_y = allocator.row_of("y")
    allocator.truncate("y", 8)  # entry 2 becomes null, and a block again when y goes on
    for _ in range(3):
        allocator.append(np.array([row_y]))
    allocator.append(np.array([allocator.row_of("x")]))
    backend.prepare(batch())
    assert backend.num_transfer_bytes - before_bytes == 128 + 2 * 8 + 2 * 4  # the batch, two indices, two blocks
    assert np.array_equal(backend.block_tables[0].numpy()[:, :30], sim.block_tables[0])
    backend.prepare(batch())
    assert backend.num_transfer_bytes - before_bytes == 2 * 128 + 24
