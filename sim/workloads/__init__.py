"""Generated request streams: built-in workloads, workloads fitted to a trace, and mixes of several."""
