"""Captures device work in CUDA graphs and replays it: the only part about graphs that needs a GPU."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

# Libraries choose algorithms and allocate workspaces in their first calls, and Triton compiles in its first one.
WARM_UP_RUNS = 2


class GraphCapturer(Protocol):
    """Captures work for later replays: `CudaGraphs`, or a test's recorder."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the device work that one call of `run` starts.

        Args:
            run: called several times. It reads only device memory that keeps its address, waits for nothing, and leaves
                its results in memory that was allocated before.

        Returns:
            A function that starts the same work again on the contents that this memory has then.
        """
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool: each reuses the memory of those before it.

    Capture the largest first, and replay one at a time.
    """

    def __init__(self) -> None:
        """Make the stream that all captures use."""
        # cuBLAS keeps a workspace for each stream (32 MiB on Hopper) as long as the process lives. One stream for all
        # graphs needs one workspace, and since the warm-up runs on it too, none lies in a graph's memory pool.
        self._stream = torch.cuda.Stream()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._memory_pool: Any = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphCapturer`. Warms up beside the current stream, as torch requires before a capture."""
        others = list(self._graphs)  # keeps the other graphs, and with them the pool, until this one is captured
        if not others:
            # Torch refuses a memory pool that still holds something after all its graphs are deleted.
            self._memory_pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool, stream=self._stream):
            run()
        self._graphs.add(graph)
        return graph.replay
