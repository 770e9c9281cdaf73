"""What each plot is called, and what it shows, in words: for those who cannot see it, on the page and in the files."""

import attrs


@attrs.frozen
class PlotText:
    """Of one plot: `name` for the buttons that save it, `title` for a file of its own, `alt` instead of the picture."""

    name: str
    title: str
    alt: str


PLOT_TEXTS = {
    "plot-curve": PlotText(
        "hit rate",
        "Prompt tokens that a prefix cache serves, by capacity",
        "Share of prompt tokens that a prefix cache serves against its capacity: the LRU line rises from left to right "
        "towards the ceiling; the optimum lies above it. The table below holds the points.",
    ),
    "plot-time": PlotText(
        "load over time",
        "Occupancy and queue over time",
        "Three lines over time, one above the other: share of the KV cache in use, requests running, requests waiting. "
        "A vertical line marks the last arrival.",
    ),
    "plot-latency": PlotText(
        "latency",
        "Latencies: 50th, 90th and 99th percentile",
        "For each latency its 50th, 90th and 99th percentile in seconds on a logarithmic axis; the table has them all.",
    ),
    "plot-distribution": PlotText(
        "latency distributions",
        "Latencies: share of samples within a time",
        "Four rising lines: the share of samples of TTFT, ITL, TPOT and E2E within a time, from 0 to 100 percent, over "
        "seconds on a logarithmic axis.",
    ),
    "plot-ledger": PlotText(
        "memory ledger",
        "Where every byte of a GPU goes",
        "One bar of a GPU's memory, cut into the rows of the ledger: weights, activations, the pool of KV blocks and "
        "the rest. The table below holds every row.",
    ),
    "plot-compare": PlotText(
        "allocators",
        "KV memory under five allocators",
        "For each allocator one bar of the KV memory: token states, reserved slots that will be filled, reserved slots "
        "that never are, and the rest. The table below holds the shares.",
    ),
    "plot-search": PlotText(
        "runs of the search",
        "What the runs of the search gave",
        "The SLO's figure of every run to its end against what was tried; a horizontal line marks the limit.",
    ),
    "plot-tornado": PlotText(
        "tornado",
        "What would change the answer",
        "For each assumption a bar from the answer at its low end to that at its high end, the widest one on top.",
    ),
}
