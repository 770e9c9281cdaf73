"""The profiler on a real card: what a known model, pool and graph take is found again in the rows."""

from contextlib import suppress

import pytest

torch = pytest.importorskip("torch")

from kvledger.backends.cuda.graphs import CudaGraphs  # noqa: E402
from kvledger.backends.profiling.device import open_cuda_device  # noqa: E402
from kvledger.backends.profiling.graph_memory import GraphCaptures  # noqa: E402
from kvledger.backends.profiling.profiler import MemoryProfiler  # noqa: E402
from kvledger.backends.profiling.step import ProfilingStep, StepLimits  # noqa: E402
from kvledger.core.errors import InputError  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

MIB = 1 << 20


@pytest.fixture
def profiler():
    try:
        device = open_cuda_device(0)
    except InputError as absent:
        pytest.skip(str(absent))
    return MemoryProfiler(device, StepLimits(max_num_batched_tokens=4096, max_num_seqs=16))


def capture_product(capturer, model, size: int):
    """A graph of one product, and what it reads and writes."""
    batch = torch.ones(size, 4096, dtype=torch.bfloat16, device="cuda:0")
    product = torch.empty(size, 16384, dtype=torch.bfloat16, device="cuda:0")
    return capturer.capture(lambda: product.copy_(model(batch))), batch, product


def test_a_start_up_is_measured_and_reconciles(profiler) -> None:
    settings = profiler.device.allocator_settings()
    baseline = profiler.take_baseline()
    model = profiler.load_weights(
        lambda: torch.nn.Linear(4096, 16384, bias=False, dtype=torch.bfloat16, device="cuda:0")  # 128 MiB
    )
    assert profiler.device.allocator_settings() == settings
    measured = profiler.profile(
        ProfilingStep(
            model=lambda tokens: model(torch.ones(sum(tokens), 4096, dtype=torch.bfloat16, device="cuda:0")),
            sampler=lambda hidden: hidden[:16].float().softmax(-1),
        )
    )
    rows = {row.name: row.num_bytes for row in measured.rows}
    assert rows["weights"] == 128 * MIB
    assert rows["peak activation"] >= (4096 * 4096 + 4096 * 16384) * 2  # the model's input and output
    assert rows["peak activation"] < 2 * (4096 * 4096 + 4096 * 16384) * 2
    capturer = CudaGraphs()
    mode = GraphCaptures(mode="full", sizes=(1, 2, 4), capture=lambda size: capture_product(capturer, model, size))
    measured = profiler.estimate_graphs((mode,))
    pool = profiler.allocate_pool(
        lambda: torch.zeros(256 * MIB, dtype=torch.int8, device="cuda:0"), planned_bytes=256 * MIB
    )
    graphs = profiler.capture_graphs(lambda: [mode.capture(size) for size in mode.sizes])
    report = profiler.reconcile()
    assert report.pool_actual_bytes == pool.numel()
    assert report.actual_bytes <= baseline.free_bytes
    assert len(graphs) == 3
    with torch.inference_mode():  # in which they were captured
        for replay, _, product in graphs:
            product.zero_()
            replay()
            assert product.any()
    # Neighbours move device-wide figures; what NVML attributes to this process they do not.
    if measured.profile.is_attributed:
        assert abs(report.unexplained_bytes) <= 64 * MIB


def test_settings_come_back_on_a_card_after_a_failure(profiler) -> None:
    settings = profiler.device.allocator_settings()
    profiler.take_baseline()
    with suppress(RuntimeError):
        profiler.load_weights(lambda: torch.ones(1 << 50, dtype=torch.int8, device="cuda:0"))
    assert profiler.device.allocator_settings() == settings
