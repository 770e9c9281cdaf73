"""From a model to its pool: what is counted, what is profiled, what is refused, and that what comes out serves."""

import gc

import attrs
import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.backends.cuda.attention_packages import FlashAttention  # noqa: E402
from kvledger.backends.profiling.device import AllocatorBytes  # noqa: E402
from kvledger.backends.profiling.probe import HostDevice  # noqa: E402
from kvledger.backends.serving import EngineOptions, LiveEngine, ModelRunner, SamplingSettings, size_engine  # noqa: E402
from kvledger.core import DoesNotFitError, InputError  # noqa: E402
from kvledger.core.deployment.startup_log import read_startup_log  # noqa: E402
from kvledger.core.memory.profile import MemoryKind  # noqa: E402
from kvledger.kernels import TorchKernels  # noqa: E402

from tests.backends.cuda import fake_attention_packages as fakes  # noqa: E402
from tests.backends.serving.real_models import tiny_model  # noqa: E402
from tests.backends.serving.recorded_graphs import RecordedGraphs, RecordedKernels  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

MIB = 1 << 20
OPTIONS = EngineOptions(max_num_seqs=8, max_num_batched_tokens=64, block_size=4, kv_cache_memory_bytes=MIB)


@attrs.frozen
class Loaded:
    model: object


def sized(family="llama", device_access=None, graph_capturer=None, **changes):
    options = attrs.evolve(OPTIONS, **changes)
    where = {"device": "cpu", "device_access": device_access, "graph_capturer": graph_capturer}
    return size_engine(lambda: Loaded(tiny_model(family)), options, **where)


class CountedDevice(HostDevice):
    """A device of 8 GiB whose allocator counts the tensors that are alive, as a GPU's does."""

    total_bytes = 8 << 30
    kind = MemoryKind.DEVICE

    def __init__(self):
        super().__init__()
        gc.collect()
        self.others = self._alive()
        self.now = self.peak = 0

    def _alive(self):
        storages = {each.untyped_storage().data_ptr(): each for each in gc.get_objects() if type(each) in TENSORS}
        return sum(each.untyped_storage().nbytes() for each in storages.values())

    def allocator_bytes(self):
        return AllocatorBytes(allocated_bytes=self.now, peak_bytes=self.peak, reserved_bytes=self.now)

    def free_and_total_bytes(self):
        """The first thing that a reading asks; what it counts holds for the whole reading."""
        self.now = max(self._alive() - self.others, 0)
        self.peak = max(self.peak, self.now)
        return self.total_bytes - (100 << 20) - self.now, self.total_bytes

    def process_bytes(self):
        return (100 << 20) + self.now

    def release_cached(self):
        gc.collect()

    def reset_peak(self):
        self.peak = 0


TENSORS = (torch.Tensor, torch.nn.Parameter)


def serve(found):
    with LiveEngine(found.runner, allocator=found.allocator, scheduler=found.scheduler) as engine:
        requests = [engine.submit([5, 6, place], SamplingSettings(max_tokens=9, temperature=0)) for place in range(5)]
        return [request.result(60).token_ids for request in requests]


@pytest.mark.parametrize("family", ["llama", "gemma2-windowed", "gpt2"])
def test_a_pool_of_the_given_bytes_serves_the_model_on_a_cpu(family) -> None:
    found = sized(family)
    raw = found.runner.backend.raw
    assert MIB - found.plan.bytes_per_block < len(raw) == found.plan.num_blocks * found.plan.bytes_per_block <= MIB
    assert found.allocator.num_blocks == found.plan.num_blocks
    assert found.allocator.max_model_len == 256  # what the model was made for
    assert len(set(map(len, serve(found)))) == 1


def test_blocks_may_be_given_instead_of_bytes() -> None:
    found = sized(kv_cache_memory_bytes=None, num_gpu_blocks_override=70, max_model_len=128)
    assert (found.allocator.num_blocks, found.allocator.max_model_len) == (70, 128)
    rows = {row.name: row.num_bytes for row in found.plan.rows(found.plan.stages[0])}
    assert min(rows.values()) >= 0 and rows["in use before start"] > 0
    assert sum(rows.values()) == found.plan.deployment.total_bytes


def test_weights_are_counted_once_where_they_are_tied() -> None:
    untied = sized().plan.stages[0].ledger.row("weights").num_bytes
    model = tiny_model("llama", tie_word_embeddings=True)
    tied = size_engine(lambda: Loaded(model), OPTIONS, device="cpu").plan.stages[0].ledger.row("weights").num_bytes
    assert untied - tied == 97 * 48 * 4
    assert tied == sum(each.numel() * each.element_size() for each in [*model.parameters(), *model.buffers()])


def test_the_known_lines_say_what_was_allocated() -> None:
    found = sized()
    lines = found.lines()
    log = read_startup_log(lines, "here")
    assert log.num_gpu_blocks == found.allocator.num_blocks and log.concurrency_tokens == 256
    assert log.kv_cache_tokens == found.plan.pool.kv_cache_size_tokens
    rows = found.plan.rows(found.plan.stages[0])
    assert sum(row.num_bytes for row in rows) == found.plan.deployment.total_bytes
    assert all(any(row.name in line and str(row.source) in line for line in lines) for row in rows)
    assert not any("is ignored" in line for line in lines)  # nobody gave a utilization


def test_a_profile_measures_the_largest_step_and_leaves_the_model_as_it_was() -> None:
    device = CountedDevice()
    found = sized(device_access=device, kv_cache_memory_bytes=None, gpu_memory_utilization=0.02)
    rows = {row.name: row for row in found.plan.stages[0].ledger.non_kv_rows}
    assert rows["weights"].num_bytes > 150_000 and rows["weights"].source == "measured"
    assert rows["peak activation"].source == "measured"
    requested = 0.02 * device.total_bytes
    pool = found.plan.num_blocks * found.plan.bytes_per_block
    assert 0 <= requested - sum(row.num_bytes for row in rows.values()) - pool < found.plan.bytes_per_block + 1
    reconciled = found.reconciliation
    assert reconciled.pool_actual_bytes == reconciled.pool_planned_bytes == pool
    assert serve(found) == serve(sized())


@pytest.mark.parametrize("max_model_len", [None, 100])
def test_a_request_of_the_profile_is_no_longer_than_one_that_is_served(max_model_len) -> None:
    few = {"max_num_seqs": 1, "max_num_batched_tokens": 300, "max_model_len": max_model_len}
    found = sized(device_access=CountedDevice(), **few)
    assert found.allocator.max_model_len == (max_model_len or 256)


def test_packages_that_are_asked_for_are_asked_first(monkeypatch) -> None:
    asked = {"device_access": CountedDevice(), "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.02}
    with pytest.raises(InputError, match="neither flash_attn nor flashinfer can be imported"):
        sized(**asked, attention_packages=True)
    package = FlashAttention(fakes.flash_attn)
    monkeypatch.setattr("kvledger.backends.serving.engine.sizing.installed_packages", lambda: [package])
    found = sized(**asked, attention_packages=True)
    assert serve(found) == serve(sized())
    choices = found.runner.backend.attention_choices
    assert choices and all("flash_attn: it takes blocks of a multiple of 256" in choice for choice in choices.values())
    eager = sized(**asked)
    serve(eager)
    assert not any("flash_attn" in choice for choice in eager.runner.backend.attention_choices.values())


@pytest.fixture
def capturer(monkeypatch):
    """What captures on a CPU as CUDA graphs do on a GPU."""
    kernels = RecordedKernels(TorchKernels())
    monkeypatch.setattr("kvledger.backends.cuda.backend.default_kernels", lambda device: kernels)
    return RecordedGraphs(kernels)


def test_captured_decode_steps_are_estimated_set_aside_and_measured(capturer) -> None:
    given = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.02, "cudagraph_capture_sizes": (1, 8, 4)}
    found = sized(device_access=CountedDevice(), graph_capturer=capturer, **given)
    assert found.runner.graphs.sizes == (1, 4, 8)
    # The two largest are sampled over the smallest pool, then all are captured over the real one.
    assert len(capturer.recordings) == 2 + 3
    rows = {row.name: row for row in found.plan.stages[0].ledger.non_kv_rows}
    graphs = rows["CUDA graphs"]
    assert graphs.source == "estimate" and "1 more (decode)" in graphs.formula
    reconciled = found.reconciliation
    assert reconciled.graph_estimate_bytes == graphs.num_bytes > 0 and reconciled.graph_actual_bytes > 0
    pool = found.plan.num_blocks * found.plan.bytes_per_block
    requested = 0.02 * CountedDevice.total_bytes
    assert 0 <= requested - sum(row.num_bytes for row in rows.values()) - pool < found.plan.bytes_per_block + 1
    lines = found.lines()
    assert "Captured 3 decode steps in CUDA graphs, of 1 to 8 requests" in lines
    assert any(line.startswith("CUDA graph pool memory: ") for line in lines)
    assert serve(found) == serve(sized())
    assert found.runner.graphs.num_replays > 5


def test_a_profiled_engine_is_warm_before_its_decode_steps_are_captured(capturer, monkeypatch) -> None:
    num_captured, warm_up = [], ModelRunner.warm_up

    def watched(runner):
        num_captured.append(len(capturer.recordings))
        warm_up(runner)

    monkeypatch.setattr(ModelRunner, "warm_up", watched)
    sized(device_access=CountedDevice(), graph_capturer=capturer, cudagraph_capture_sizes=(1, 8))
    assert num_captured == [2] and len(capturer.recordings) == 2 + 2  # the first two over the smallest pool


def test_nothing_is_captured_where_it_is_not_wanted(capturer) -> None:
    found = sized(device_access=CountedDevice(), graph_capturer=capturer, enforce_eager=True)
    assert found.runner.graphs is None and not capturer.recordings
    assert "CUDA graphs" not in {row.name for row in found.plan.stages[0].ledger.non_kv_rows}
    assert sized().runner.graphs is None


@pytest.mark.gpu
def test_a_gpu_is_profiled_and_serves_as_a_cpu_does() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    options = attrs.evolve(OPTIONS, kv_cache_memory_bytes=None, gpu_memory_utilization=0.05)
    found = size_engine(lambda: Loaded(tiny_model("llama on cuda")), options, device="cuda")
    assert found.reconciliation is not None and found.plan.num_blocks > 1000
    assert {row.source for row in found.plan.stages[0].ledger.non_kv_rows} <= {"measured", "estimate"}
    assert found.runner.graphs.sizes == (1, 2, 4, 8) and found.reconciliation.graph_actual_bytes > 0
    assert serve(found) == serve(sized())
    assert found.runner.graphs.num_replays > 5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_cache_memory_bytes": None}, InputError, "on a CPU the pool's size must be given"),
        ({"gpu_memory_utilization": 0.5}, InputError, "gpu_memory_utilization 0.5 has no effect on a CPU"),
        ({"cudagraph_capture_sizes": (1, 2)}, InputError, r"cudagraph_capture_sizes \[1, 2\] has no effect on a CPU"),
        ({"cudagraph_capture_sizes": (1, 9)}, InputError, "numbers of requests from 1 to max_num_seqs 8"),
        (
            {"cudagraph_capture_sizes": (1,), "enforce_eager": True},
            InputError,
            r"cudagraph_capture_sizes \[1\] has no effect with enforce_eager",
        ),
        ({"num_gpu_blocks_override": 50}, InputError, "both size the pool; give one of them"),
        ({"kv_cache_memory_bytes": 1 << 60}, DoesNotFitError, "Largest kv_cache_memory_bytes that starts"),
        ({"kv_cache_memory_bytes": 20_000}, DoesNotFitError, "lower max_model_len to at most 48"),
        (
            {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 9},
            DoesNotFitError,
            "raise num_gpu_blocks_override to",
        ),
        ({"max_num_batched_tokens": 4}, InputError, "max_num_batched_tokens 4 is below max_num_seqs 8"),
    ],
)
def test_what_cannot_be_sized_is_refused_before_anything_is_allocated(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        sized(**changes)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_more_than_one_rank_is_refused_plainly(name) -> None:
    with pytest.raises(InputError, match=f"{name} is 2; a live engine runs on one device"):
        attrs.evolve(OPTIONS, **{name: 2})


def test_a_length_that_the_model_was_not_made_for_is_refused() -> None:
    with pytest.raises(InputError, match="max_model_len is 300, and LlamaForCausalLM was made for at most 256"):
        sized(max_model_len=300)
    with pytest.raises(InputError, match="max_model_len is 300, and LlamaForCausalLM was made for at most 256"):
        sized(max_model_len=300, max_num_seqs=1, max_num_batched_tokens=512, device_access=CountedDevice())
    found = sized()
    longer = attrs.evolve(found.allocator, max_model_len=300, max_in_flight_tokens=64)
    with pytest.raises(InputError, match="max_model_len is 300, and LlamaForCausalLM was made for at most 256"):
        LiveEngine(found.runner, allocator=longer, scheduler=found.scheduler)


def test_the_longest_request_that_fits_can_be_asked_for() -> None:
    found = sized(kv_cache_memory_bytes=60_000, max_model_len=-1)
    assert 0 < found.allocator.max_model_len < 256
    assert found.allocator.max_model_len <= (found.allocator.num_blocks - 1) * 4
