"""How a graph is captured, on a torch.cuda of Python: warmed up and captured on one stream, into one memory pool."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="graphs are torch's")

from kvledger.backends.cuda.graphs import WARM_UP_RUNS, CudaGraphs  # noqa: E402

pytestmark = pytest.mark.torch


class Stream:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, calls):
        self.calls = calls

    def replay(self):
        self.calls.append("replay")


@pytest.fixture
def card(monkeypatch):
    """What is asked of torch.cuda, in order, and a run that says where it runs."""
    calls = []
    current = [Stream("main", calls)]
    streams, pools = itertools.count(1), itertools.count(1)

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    @contextmanager
    def captured(graph, pool, stream):
        calls.append(f"capture into {pool}")
        with on(stream):
            yield
        calls.append("captured")

    cuda = SimpleNamespace(
        Stream=lambda: Stream(f"side {next(streams)}", calls),
        current_stream=lambda: current[-1],
        stream=on,
        CUDAGraph=lambda: Graph(calls),
        graph=captured,
        graph_pool_handle=lambda: f"pool {next(pools)}",
    )
    monkeypatch.setattr("kvledger.backends.cuda.graphs.torch", SimpleNamespace(cuda=cuda))
    return calls, lambda: calls.append(f"run on {current[-1].name}")


def test_a_run_is_warmed_up_and_captured_on_a_stream_beside_the_current_one(card) -> None:
    calls, run = card
    replay = CudaGraphs().capture(run)
    assert calls == [
        "side 1 waits for main",
        *["run on side 1"] * WARM_UP_RUNS,
        "main waits for side 1",
        "capture into pool 1",
        "run on side 1",
        "captured",
    ]
    calls.clear()
    replay()
    assert calls == ["replay"]


def test_graphs_share_one_stream_so_that_libraries_keep_one_workspace(card) -> None:
    calls, run = card
    graphs = CudaGraphs()
    kept = [graphs.capture(run) for _ in range(3)]
    assert len(kept) == 3
    assert {call for call in calls if call.startswith("run on")} == {"run on side 1"}


def test_graphs_share_a_memory_pool_while_one_of_them_is_there(card) -> None:
    calls, run = card
    graphs = CudaGraphs()
    first, second = graphs.capture(run), graphs.capture(run)
    del first
    third = graphs.capture(run)
    assert calls.count("capture into pool 1") == 3
    del second, third


def test_a_memory_pool_whose_graphs_are_gone_is_not_used_again(card) -> None:
    calls, run = card
    graphs = CudaGraphs()
    sampled = graphs.capture(run)
    del sampled
    kept = [graphs.capture(run), graphs.capture(run)]
    assert len(kept) == 2
    assert [call for call in calls if call.startswith("capture into")] == [
        "capture into pool 1",
        "capture into pool 2",
        "capture into pool 2",
    ]
