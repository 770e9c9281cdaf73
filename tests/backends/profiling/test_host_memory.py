"""The host behind the probe protocol: really measured here, and read from prepared files where a fault is wanted."""

from pathlib import Path

import pytest
from kvledger.backends.profiling.probe import DeviceProbe, HostDevice
from kvledger.backends.profiling.profiler import MemoryProfiler
from kvledger.backends.profiling.step import ProfilingStep, StepLimits
from kvledger.core.errors import InputError
from kvledger.core.memory.ledger import RowSource
from kvledger.core.memory.profile import MemoryKind, MemoryProfile

MIB = 1 << 20
# A page here or there is not this test's: the interpreter and torch's own threads allocate too.
SLACK_BYTES = 24 * MIB


def proc(tmp_path: Path, meminfo: str, status: str) -> Path:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(meminfo)
    (tmp_path / "self/status").write_text(status)
    return tmp_path


@pytest.mark.torch
def test_a_torch_callable_is_measured_with_what_it_keeps_and_what_it_needs_for_its_own_time() -> None:
    torch = pytest.importorskip("torch")
    probe = DeviceProbe(HostDevice())
    kept = []

    def step() -> None:
        transient = torch.ones(96 * MIB, dtype=torch.uint8)
        kept.append(torch.ones(64 * MIB, dtype=torch.uint8))
        del transient

    probe.read()
    before = probe.read()
    probe.reset_peak()
    step()
    profile = MemoryProfile(before=before, after=probe.read(), weights_bytes=0)
    assert profile.before.kind is MemoryKind.HOST
    assert profile.is_attributed
    assert abs(profile.total_consumed_bytes - 64 * MIB) < SLACK_BYTES
    assert abs(profile.transient_headroom_bytes - 96 * MIB) < SLACK_BYTES
    assert kept[0].numel() == 64 * MIB


@pytest.mark.torch
def test_a_whole_profile_of_a_small_model_on_the_host_ends_in_measured_rows() -> None:
    torch = pytest.importorskip("torch")
    profiler = MemoryProfiler(HostDevice(), StepLimits(max_num_batched_tokens=4096, max_num_seqs=4))
    profiler.take_baseline()
    model = profiler.load_weights(lambda: torch.nn.Linear(4096, 4096, bias=False))  # 64 MiB
    measured = profiler.profile(
        ProfilingStep(
            model=lambda tokens: model(torch.ones(sum(tokens), 4096)),  # 64 MiB in, 64 MiB out
            sampler=lambda hidden: hidden[:4].argmax(-1),
        )
    )
    rows = {row.name: row for row in measured.rows}
    assert {row.source for row in measured.rows} == {RowSource.MEASURED}
    assert abs(rows["weights"].num_bytes - 64 * MIB) < SLACK_BYTES
    assert abs(rows["peak activation"].num_bytes - 128 * MIB) < SLACK_BYTES
    pool = profiler.allocate_pool(lambda: torch.ones(48 * MIB, dtype=torch.uint8), planned_bytes=32 * MIB)
    report = profiler.reconcile()
    assert abs(report.pool_actual_bytes - pool.numel()) < SLACK_BYTES


def test_a_peak_begins_anew_when_it_is_reset() -> None:
    device = HostDevice()
    block = bytearray(128 * MIB)
    del block
    high = device.allocator_bytes().peak_bytes
    device.reset_peak()
    again = device.allocator_bytes().peak_bytes
    assert high is not None
    assert again is not None
    if again == high:
        pytest.skip("this kernel does not reset the high-water mark of resident bytes")
    assert high - again > 64 * MIB


def test_figures_are_bytes_of_the_kernels_kib(tmp_path: Path) -> None:
    files = proc(tmp_path, "MemTotal: 100 kB\nMemAvailable: 40 kB\n", "VmHWM:\t 9 kB\nVmRSS:\t 7 kB\nThreads:\t1\n")
    reading = DeviceProbe(HostDevice(files)).read()
    assert (reading.total_bytes, reading.free_bytes) == (102_400, 40_960)
    assert (reading.torch_allocated_bytes, reading.torch_peak_bytes, reading.process_bytes) == (7_168, 9_216, 7_168)


def test_a_kernel_that_says_no_peak_gives_the_processs_own_highest_never_too_little(tmp_path: Path) -> None:
    files = proc(tmp_path, "MemTotal: 100 kB\nMemAvailable: 40 kB\n", "VmRSS: 7 kB\n")
    peak = HostDevice(files).allocator_bytes().peak_bytes
    assert peak is not None
    assert peak > MIB


def test_a_mark_that_may_not_be_reset_is_kept(tmp_path: Path) -> None:
    files = proc(tmp_path, "MemTotal: 1 kB\n", "VmHWM: 9 kB\nVmRSS: 7 kB\n")
    (files / "self/clear_refs").mkdir()
    device = HostDevice(files)
    device.reset_peak()
    assert device.allocator_bytes().peak_bytes == 9_216


def test_what_the_kernel_does_not_say_is_named(tmp_path: Path) -> None:
    files = proc(tmp_path, "MemTotal: 100 kB\n", "VmRSS: 7 kB\n")
    with pytest.raises(InputError, match="does not say MemAvailable; it says MemTotal"):
        HostDevice(files).free_and_total_bytes()


def test_a_host_without_proc_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs Linux with /proc"):
        HostDevice(tmp_path / "nothing").process_bytes()
