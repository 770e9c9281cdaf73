"""A capacity study in a notebook's style: from a model and a card to hit rates and latencies, as data frames.

Run it with `python examples/capacity_study.py`, or cell by cell in an editor that knows `# %%`. It takes seconds.
"""

# %% The question: an 8B model on two GPUs, and two hundred requests of chat traffic.
from kvledger.sim import Scenario

scenario = Scenario(
    model="llama-3.1-8b",
    gpu="H100",
    tensor_parallel_size=2,
    block_size=64,
    workload="conversation",
    limit=200,
)

# %% How many blocks fit, and where does every byte go?
plan = scenario.plan()
print(plan)
print(plan.to_frame()[["name", "bytes", "source"]])

# %% What would a larger or smaller cache serve?
curve = scenario.evolve(block_size=None).curve(capacities="500,1000,2000,4000", policy="lru,s3fifo,optimum")
print(curve.to_frame()[["policy", "num_blocks", "block_hit_rate"]])

# %% How long do users wait, request by request?
run = scenario.replay()
requests = run.requests.to_frame()
print(run)
print(requests[["request_id", "ttft_s", "tpot_s", "num_cached_tokens"]].head())

# %% The same traffic, twice as fast.
busy = scenario.evolve(rate_scale=2).replay()
print(
    f"p99 TTFT: {run.report.latencies['ttft_s']['p99']:.3f} s, at twice the traffic "
    f"{busy.report.latencies['ttft_s']['p99']:.3f} s"
)
