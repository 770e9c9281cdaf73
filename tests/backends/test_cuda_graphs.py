"""How a graph is captured, on a torch.cuda of Python: warmed up beside, then captured into one memory pool."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="graphs are torch's")

from kvledger.backends.cuda_graphs import WARM_UP_RUNS, CudaGraphs  # noqa: E402

pytestmark = pytest.mark.torch


class Stream:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def card(monkeypatch):
    """What is asked of torch.cuda, in order, and a run that says where it runs."""
    calls = []
    current = [Stream("main", calls)]

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    @contextmanager
    def captured(graph, pool):
        calls.append(f"capture into {pool}")
        yield
        calls.append("captured")

    cuda = SimpleNamespace(
        Stream=lambda: Stream("side", calls),
        current_stream=lambda: current[-1],
        stream=on,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: calls.append("replay")),
        graph=captured,
        graph_pool_handle=lambda: "the pool",
    )
    monkeypatch.setattr("kvledger.backends.cuda_graphs.torch", SimpleNamespace(cuda=cuda))
    return calls, lambda: calls.append(f"run on {current[-1].name}")


def test_a_run_is_warmed_up_on_a_stream_of_its_own_and_then_captured(card) -> None:
    calls, run = card
    replay = CudaGraphs().capture(run)
    assert calls == [
        "side waits for main",
        *["run on side"] * WARM_UP_RUNS,
        "main waits for side",
        "capture into the pool",
        "run on main",
        "captured",
    ]
    calls.clear()
    replay()
    assert calls == ["replay"]


def test_all_graphs_of_one_kind_share_a_memory_pool(card) -> None:
    calls, run = card
    graphs = CudaGraphs()
    for _ in range(2):
        graphs.capture(run)
    assert calls.count("capture into the pool") == 2
