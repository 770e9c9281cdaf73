"""Capturing device work and replaying it: the one thing about CUDA graphs that needs a GPU, behind a small seam."""

from collections.abc import Callable
from typing import Protocol

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
        self._memory_pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphCapturer`. Warms up on a stream of its own, as torch asks of whoever captures."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool):
            run()
        return graph.replay
