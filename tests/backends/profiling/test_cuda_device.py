"""What is said where there is no card, and which of torch's and NVML's calls stand behind each figure."""

import contextlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from kvledger.backends.profiling.device import AllocatorBytes, open_cuda_device
from kvledger.backends.profiling.probe import DeviceProbe
from kvledger.core.errors import InputError
from kvledger.core.memory.profile import MemoryKind

GIB = 1 << 30


class NVMLError(Exception):
    pass


def fake_torch(calls: list[Any], *, cards: int = 2, cuda: str | None = "13.0", getter: bool = True) -> Any:
    """The part of torch that is used, with two cards of 80 GiB."""
    stats = {
        "allocated_bytes.all.current": 3 * GIB,
        "allocated_bytes.all.peak": 5 * GIB,
        "reserved_bytes.all.current": 4 * GIB,
    }
    allocator = {"_accelerator_setAllocatorSettings": lambda text: calls.append(("set", text))}
    if getter:
        allocator["_accelerator_getAllocatorSettings"] = lambda: "a:1"
    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(cuda=cuda, hip=None),
        bfloat16="bf16",
        float32="fp32",
        device=lambda kind, index: f"{kind}:{index}",
        ones=lambda shape, dtype, device: calls.append(("ones", shape, dtype, device)),
        mm=lambda *_: calls.append("mm"),
        addmm=lambda *_: calls.append("addmm"),
        inference_mode=contextlib.nullcontext,
        _C=SimpleNamespace(**allocator),
        cuda=SimpleNamespace(
            is_available=lambda: bool(cards and cuda),
            device_count=lambda: cards,
            get_device_name=lambda index: f"Card {index}",
            get_device_properties=lambda index: SimpleNamespace(uuid=f"id-{index}", is_integrated=0),
            get_allocator_backend=lambda: "native",
            synchronize=lambda index: calls.append(("synchronize", index)),
            device=lambda index: contextlib.nullcontext(),
            empty_cache=lambda: calls.append("empty_cache"),
            mem_get_info=lambda index: (60 * GIB, 80 * GIB),
            memory_stats=lambda index: stats,
            reset_peak_memory_stats=lambda index: calls.append(("reset", index)),
        ),
    )


def fake_nvml(processes: list[Any], asked: list[str]) -> Any:
    def processes_of(card: str) -> list[Any]:
        if not processes:
            raise NVMLError("not supported")
        return processes

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: asked.append("shutdown"),
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid),
        nvmlDeviceGetComputeRunningProcesses=processes_of,
    )


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_a_cpu_build_is_named_where_a_card_was_asked_for() -> None:
    with pytest.raises(InputError, match=r"torch 2\.11\.0 built for no CUDA \(a CPU build\), 0 CUDA devices visible"):
        open_cuda_device(torch=fake_torch([], cards=0, cuda=None))


@pytest.mark.torch
def test_the_installed_torch_says_what_it_is() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(InputError, match=r"there is none: torch .* built for .*0 CUDA devices visible"):
        open_cuda_device()


def test_hidden_cards_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES=''"):
        open_cuda_device(torch=fake_torch([], cards=0))


def test_a_card_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"cuda:2 .* 2 CUDA devices visible \(0: Card 0, 1: Card 1\)"):
        open_cuda_device(2, torch=fake_torch([]))


def test_a_machine_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"install kvledger\[cuda\]"):
        open_cuda_device()


@pytest.mark.usefixtures("no_nvml")
def test_a_reading_waits_empties_the_cache_and_takes_the_drivers_figures() -> None:
    calls: list[Any] = []
    reading = DeviceProbe(open_cuda_device(1, torch=fake_torch(calls))).read()
    assert calls == [("synchronize", 1), "empty_cache"]
    assert (reading.free_bytes, reading.total_bytes) == (60 * GIB, 80 * GIB)
    assert (reading.torch_allocated_bytes, reading.torch_peak_bytes) == (3 * GIB, 5 * GIB)
    assert (reading.torch_reserved_bytes, reading.process_bytes) == (4 * GIB, None)
    assert reading.kind is MemoryKind.DEVICE


def test_the_warm_up_multiplies_with_and_without_a_bias_and_waits() -> None:
    calls: list[Any] = []
    open_cuda_device(1, torch=fake_torch(calls)).warm_up()
    assert [call for call in calls if call in ("mm", "addmm")] == ["mm", "addmm"] * 2
    assert calls[-1] == ("synchronize", 1)


def test_nvml_is_asked_for_this_process_on_this_card(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    own = SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * GIB)
    other = SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=9 * GIB)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([other, own], asked))
    assert open_cuda_device(1, torch=fake_torch([])).process_bytes() == 5 * GIB
    assert asked == ["GPU-id-1", "shutdown"]


@pytest.mark.parametrize(
    "processes",
    [[], [SimpleNamespace(pid=-1, usedGpuMemory=9)], [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)]],
)
def test_what_nvml_cannot_tell_is_not_guessed(monkeypatch: pytest.MonkeyPatch, processes: list) -> None:
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(processes, asked))
    assert open_cuda_device(torch=fake_torch([])).process_bytes() is None
    assert asked[-1] == "shutdown"


def test_settings_are_those_in_force_or_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    device = open_cuda_device(torch=fake_torch(calls))
    device.set_allocator_settings("b:2")
    assert (device.allocator_settings(), calls) == ("a:1", [("set", "b:2")])
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "c:3")
    assert open_cuda_device(torch=fake_torch([], getter=False)).allocator_settings() == "c:3"


def test_an_allocator_that_never_counted_is_not_taken_for_empty() -> None:
    torch = fake_torch([])
    torch.cuda.memory_stats = lambda index: {}
    device = open_cuda_device(torch=torch)
    assert device.allocator_bytes() == AllocatorBytes(allocated_bytes=None, peak_bytes=None, reserved_bytes=None)
    with pytest.raises(InputError, match="did not count"):
        DeviceProbe(device, attribute_process=False).read()
