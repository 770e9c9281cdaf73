"""A policy in a file outside the repository works in every command that takes a policy, and appears in their help."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

POLICY = """
from collections import OrderedDict
from itertools import chain, islice

from kvledger.core import EvictionPolicy, eviction_policies


@eviction_policies.register("2q")
class TwoQueues(EvictionPolicy):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.max_new, self.max_remembered = num_blocks // 4, num_blocks // 2
        self.new, self.hot, self.remembered = OrderedDict(), OrderedDict(), OrderedDict()

    def admit(self, group, blocks, indices, keys):
        for block, key in self.deepest_first(list(zip(blocks, keys)), indices):
            is_back = self.remembered.pop(key, None) is not None
            (self.hot if is_back else self.new)[block] = key

    def release(self, blocks):
        for block in filter(self.hot.__contains__, blocks):
            self.hot.move_to_end(block)

    def victims(self, count):
        new, hot = self.free_among(self.new), self.free_among(self.hot)
        too_many = islice(new, max(0, len(self.new) - self.max_new))
        return list(islice(chain(too_many, hot, new), count))

    def evict(self, blocks):
        self.remembered.update((self.new[block], True) for block in blocks if block in self.new)
        while len(self.remembered) > self.max_remembered:
            self.remembered.popitem(last=False)
        self.forget(blocks)

    def forget(self, blocks):
        for block in blocks:
            (self.new if block in self.new else self.hot).pop(block)
"""
EXAMPLE = Path(__file__).parents[3] / "examples/two_queues.py"
TRAFFIC = ("--workload", "conversation", "--limit", "300")
POOL = ("--num-gpu-blocks-override", "8000", "--base-ms", "8", "--us-per-prefill-token", "30")


@pytest.fixture
def run(tmp_path):
    """Run a command with the policy's file as a plug-in; give back what it prints."""
    path = tmp_path / "policy_of_my_own.py"
    path.write_text(POLICY)
    environment = {**os.environ, "KVLEDGER_PLUGINS": str(path), "COLUMNS": "200"}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def kvledger(run):
    return lambda *arguments: run("-m", "kvledger", *arguments)


def test_the_policies_here_and_in_the_examples_take_45_lines_at_most():
    assert len(POLICY.strip().splitlines()) <= 45
    assert len(EXAMPLE.read_text().splitlines()) <= 45


@pytest.mark.parametrize("command", ["curve", "replay", "block-size", "optimum"])
def test_help_lists_the_policy(kvledger, command):
    assert "2q" in re.split(r"[\s,.;]+", kvledger(command, "--help"))


def test_curve_replays_the_policy(kvledger):
    options = ("--capacities", "300,2000", "--policy", "lru,2q,optimum")
    policies = json.loads(kvledger("curve", *TRAFFIC, *options, "--json"))["policies"]
    for point, best in zip(policies["2q"], policies["optimum"], strict=True):
        assert 0 < point["hit_blocks"] <= best["hit_blocks"]


def test_replay_runs_an_engine_under_the_policy(kvledger):
    replayed = kvledger("replay", *TRAFFIC, *POOL, "--block-size", "64", "--eviction", "2q", "--json")
    document = json.loads(replayed)
    assert document["assumptions"]["eviction"] == "2q"
    assert document["requests"]["finished"] == 300


def test_block_size_compares_sizes_under_the_policy(kvledger):
    options = ("--block-sizes", "64,128", "--eviction", "2q")
    document = json.loads(kvledger("block-size", *TRAFFIC, *POOL, *options, "--json"))
    assert document["assumptions"]["eviction"] == "2q"
    assert not any("error" in row for row in document["rows"])


def test_optimum_sets_the_policy_beside_the_best_possible_one(kvledger):
    document = json.loads(kvledger("optimum", *TRAFFIC, *POOL, "--block-size", "64", "--json"))
    assert [row["policy"] for row in document["policies"]][-2:] == ["2q", "optimum"]
    named = json.loads(kvledger("optimum", *TRAFFIC, *POOL, "--block-size", "64", "--policy", "2q,lfu", "--json"))
    assert [row["policy"] for row in named["policies"]] == ["lru", "2q", "lfu", "optimum"]
    assert document["policies"][-2] == named["policies"][1]


def test_curve_and_ledger_find_the_same_hits_under_the_policy(run):
    program = """
from kvledger.sim.cache.policies import replay_policy
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.workloads.builtin import open_workload
from tests.sim.cache.test_ledger_agreement import ledger_hits

prompts = read_prompt_blocks(open_workload("conversation", limit=2_000))
for num_blocks in (1_000, 3_000, 10_000):
    hits = replay_policy(prompts, "2q", num_blocks).hit_blocks
    assert hits == ledger_hits(prompts, "2q", num_blocks) > 0
print("equal")
"""
    assert run("-c", program) == "equal\n"
