"""Capturing device work and replaying it: the one thing about CUDA graphs that needs a GPU, behind a small seam."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

# Libraries choose algorithms and allocate workspaces in their first calls, and Triton compiles in its first one.
WARM_UP_RUNS = 2


class GraphCapturer(Protocol):
    """Turns work into something that is replayed: `CudaGraphs`, or a test's recorder."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the device work that one call of `run` starts.

        Args:
            run: called several times. It reads nothing but device memory that stays where it is, waits for nothing,
                and leaves its results in memory that was there before.

        Returns:
            What starts the same work again, on what that memory holds then.
        """
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool: each works in the memory of those before it, so capture the largest
    first, and replay one at a time.
    """

    def __init__(self) -> None:
        """Nothing is captured yet."""
        # cuBLAS keeps a workspace for each stream (32 MiB on Hopper) as long as the process lives. With one stream for
        # all, there is one; and as the warm-up runs on it too, none lies in a graph's memory pool.
        self._stream = torch.cuda.Stream()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._memory_pool: Any = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphCapturer`. Warms up beside the current stream, as torch asks of whoever captures."""
        others = list(self._graphs)  # so that none of them goes, and the pool with it, before this one is there
        if not others:
            # Torch refuses a memory pool that something still lies in and whose graphs are all gone.
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
