"""CudaBackend on a GPU: the same comparison as on the CPU, without a wait on the way of a step, and in a CUDA graph."""

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="real memory needs torch")

from kvledger.backends import CacheArrangement, CudaBackend, SimBackend  # noqa: E402
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request, TokenBatch  # noqa: E402
from kvledger.core.planner.layout import (  # noqa: E402
    KVCacheGroup,
    KVCacheLayout,
    lay_out,
)
from kvledger.core.planner.specs import FullAttentionSpec  # noqa: E402
from kvledger.testing import LedgerAdapter, Scenario, ledger_supports  # noqa: E402
from kvledger.testing.choices import RandomChooser, choose_scenario  # noqa: E402

from tests.properties.same_slots import FP8_VARIANTS, VARIANTS, SameSlots  # noqa: E402
from tests.properties.slot_histories import play_commands, play_engine  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"),
    # Torch says this once of the mode that the tests below use, and warnings are errors here.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

# Few block sizes, since every shape of a cache is compiled once.
SUPPORTS = ledger_supports(block_sizes=(4, 16), max_groups=2)
LAYERS = ("a", "b", "c")
MAX_NUM_REQS = 8


@pytest.mark.parametrize("seed", range(24))
def test_memory_on_the_gpu_is_the_simulated_one_after_any_history(seed: int) -> None:
    has_e4m3 = torch.cuda.get_device_capability() >= (8, 9)
    in_8_bits = [variant for variant in FP8_VARIANTS if has_e4m3 or variant.dtype != "fp8_e4m3"]
    variants = (*VARIANTS, in_8_bits[seed % len(in_8_bits)])

    def witness(scenario: Scenario, ledger: LedgerAdapter) -> SameSlots:
        return SameSlots(scenario.groups, ledger.log.created, variants, device="cuda")

    chooser = RandomChooser(seed)
    scenario = choose_scenario(chooser, SUPPORTS)
    play = play_engine if seed % 4 == 0 else play_commands
    play(chooser, scenario, witness, 20)


@pytest.fixture
def served() -> Iterator[tuple[CudaBackend, KVCacheAllocator, SimBackend]]:
    """A small cache on the GPU, and a simulation beside it."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bf16")
    config = lay_out([KVCacheGroup(LAYERS, (spec,) * len(LAYERS), spec)], 100, KVCacheLayout.LBNHC)
    backend = CudaBackend(device="cuda", max_num_batched_tokens=256, arrangement=CacheArrangement.FLASH_NHD)
    backend.initialize(config)
    sim = SimBackend()
    limits = AllocatorConfig(num_blocks=100, groups=[FullAttention(16)], max_model_len=400, max_num_reqs=MAX_NUM_REQS)
    yield backend, KVCacheAllocator(limits, sinks=[backend, sim]), sim
    torch.cuda.set_sync_debug_mode("default")


def admit(allocator: KVCacheAllocator, lengths: list[int]) -> TokenBatch:
    for number, length in enumerate(lengths):
        allocator.allocate(Request(str(number), length), length)
    rows = np.array([allocator.row_of(str(number)) for number in range(len(lengths))], dtype=np.int64)
    return TokenBatch(rows, np.zeros(len(lengths), dtype=np.int64), np.array(lengths, dtype=np.int64))


def decode(allocator: KVCacheAllocator, batch: TokenBatch) -> TokenBatch:
    allocator.append(batch.rows)
    return TokenBatch(batch.rows, batch.first_positions + batch.counts, np.ones_like(batch.rows))


def numbers(num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(num_tokens, 8, 128, device="cuda", generator=generator).to(torch.bfloat16)


def test_nothing_on_the_way_of_a_step_waits_for_the_device(served) -> None:
    backend, allocator, sim = served
    batch = admit(allocator, [20, 33])
    allocator.fork("0", Request("child", 20))
    key, value = numbers(64, 0), numbers(64, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for step in range(20):
        slots = backend.slot_mapping(batch, 0, 64)
        for layer in LAYERS:
            backend.write_kv(layer, key, value)
        backend.flashinfer_tables(batch)
        if step == 0:
            child = np.array([*batch.rows, allocator.row_of("child")], dtype=np.int64)
            placed = np.array([20, 33, 20], dtype=np.int64)
            batch = TokenBatch(child, placed - 1, np.ones(3, dtype=np.int64))
        batch = decode(allocator, batch)
    torch.cuda.set_sync_debug_mode("default")
    assert slots.tolist()[3:] == [-1] * 61
    assert len(set(backend.slot_mapping(batch).tolist())) == 3
    assert backend.slot_mapping(batch).tolist() == sim.slot_mapping(batch).tolist()


def test_a_captured_decode_step_is_replayed_with_new_slots(served) -> None:
    backend, allocator, sim = served
    batch = admit(allocator, [15, 16, 30])
    key, value = numbers(MAX_NUM_REQS, 0), numbers(MAX_NUM_REQS, 1)

    def step() -> None:
        backend.map_slots(MAX_NUM_REQS)
        for layer in LAYERS:
            backend.write_kv(layer, key, value)

    backend.prepare(decode(allocator, batch))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    expected = backend.raw.clone()
    batch = TokenBatch(batch.rows, np.array([15, 16, 30]), np.ones(3, dtype=np.int64))
    for number in range(40):
        key.copy_(numbers(MAX_NUM_REQS, 2 * number))
        value.copy_(numbers(MAX_NUM_REQS, 2 * number + 1))
        backend.prepare(batch)
        graph.replay()
        simulated = sim.slot_mapping(batch, 0, MAX_NUM_REQS).tolist()
        assert backend.slots[0, :MAX_NUM_REQS].tolist() == simulated
        cache = expected.view(torch.bfloat16).view(len(LAYERS), 2, 100 * 16, 8, 128)
        for layer in range(len(LAYERS)):
            for request in range(3):
                cache[layer, 0, simulated[request]] = key[request]
                cache[layer, 1, simulated[request]] = value[request]
        assert torch.equal(backend.raw, expected)
        batch = decode(allocator, batch)
