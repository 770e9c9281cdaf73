"""`kvledger fleet` from the outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent / "kvledger"
QUICK = ("--workload", "conversation", "--limit", "60", "--num-gpu-blocks-override", "4000", "--block-size", "512")


def kvledger(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN, *arguments], capture_output=True, text=True, timeout=120)


def document(*arguments: str) -> dict:
    done = kvledger(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_fleet_has_the_keys_of_a_replay_and_figures_of_each_engine() -> None:
    fleet = document("fleet", *QUICK, "--replicas", "2", "--data-parallel-size", "2", "--routing", "sticky")
    assert set(document("replay", *QUICK)) | {"replicas"} == set(fleet)
    assert [(one["replica"], one["data_parallel_rank"]) for one in fleet["replicas"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert sum(one["requests"]["finished"] for one in fleet["replicas"]) == fleet["requests"]["finished"] == 60
    assumptions = fleet["assumptions"]
    assert (assumptions["num_replicas"], assumptions["data_parallel_size"]) == (2, 2)
    assert assumptions["routing"] == "sticky"
    assert assumptions["event_delay_s"] == 0


def test_one_engine_behind_a_router_is_a_replay() -> None:
    alone, fleet = document("replay", *QUICK), document("fleet", *QUICK, "--replicas", "1")
    for name in (
        "requests",
        "prefix_cache",
        "preemptions",
        "ttft_s",
        "tpot_s",
        "itl_s",
        "e2e_s",
        "throughput",
        "steps",
    ):
        assert fleet[name] == alone[name]


def test_the_table_has_a_row_for_each_engine() -> None:
    done = kvledger("fleet", *QUICK, "--replicas", "3")
    assert done.returncode == 0
    rows = done.stdout.split("Engines")[1].splitlines()
    assert [row.split()[0] for row in rows if row.strip()[:1].isdigit()] == ["0", "1", "2"]


def test_tiers_behind_each_pool_find_more_and_are_accounted_for() -> None:
    few = ("--workload", "conversation", "--limit", "150", "--rate-scale", "0.5", "--block-size", "512")
    fleet = document(
        "fleet", *few, "--num-gpu-blocks-override", "700", "--replicas", "2", "--host-blocks", "800", "--host-gb-s",
        "25", "--ssd-blocks", "2000", "--ssd-gb-s", "inf", "--tier-bytes-per-block", "67108864",
    )  # fmt: skip
    cache = fleet["prefix_cache"]
    assert cache["hit_rate_with_tiers"] > cache["hit_rate"]
    promoted = sum(tier["promoted"] for one in fleet["replicas"] for tier in one["tiers"])
    assert cache["external_hits_tokens"] == promoted * 512
    assert fleet["assumptions"]["tiers"] == [
        "host: 800 blocks, 25 GB/s each way",
        "ssd: 2,000 blocks, copies take no time",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replicas", "0"), "num_replicas is 0; it must be at least 1"),
        (("--routing", "luck"), "known: round-robin, least-outstanding-work, sticky, prefix-aware"),
        (("--routing", "sticky", "--routing-load-weight", "1"), "has no effect on --routing sticky"),
        (("--event-delay-ms", "-1"), "event_delay_s is -0.001"),
        (("--host-blocks", "10"), "--host-blocks and --host-gb-s go together; neither has a default"),
        (("--ssd-blocks", "10", "--ssd-gb-s", "3"), "--ssd-blocks needs --host-blocks"),
        (("--host-blocks", "10", "--host-gb-s", "3"), "the bandwidth of the host tier needs the bytes of a block"),
        (("--tier-bytes-per-block", "10"), "has no effect without --host-blocks"),
        (("--preemption-mode", "swap"), "--preemption-mode swap and --swap-link-gb-s go together"),
        (("--num-speculative-tokens", "2"), "go together; neither has a default"),
    ],
)
def test_bad_input_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    done = kvledger("fleet", *QUICK, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


POOLS = ("--prefill-replicas", "1", "--decode-replicas", "2", "--transfer-gb-s", "50")
BYTES = ("--transfer-bytes-per-block", "67108864")


def test_a_disaggregated_fleet_says_what_was_copied_and_how_long_it_took() -> None:
    fleet = document("fleet", *QUICK, *POOLS, *BYTES)
    assert fleet["requests"] == {"total": 60, "finished": 60, "rejected": 0, "aborted": 0}
    assert [(one["pool"], one["replica"]) for one in fleet["replicas"]] == [
        ("prefill", 0),
        ("decode", 0),
        ("decode", 1),
    ]
    moved = fleet["kv_transfer"]
    assert moved["transfers"] == moved["transfer_s"]["count"] > 50
    assert moved["transferred_bytes"] % 67108864 == 0
    assert moved["transfer_s"]["mean"] > 0
    assert fleet["assumptions"]["first_token_from"] == "prefill"
    late = document("fleet", *QUICK, *POOLS, *BYTES, "--first-token-from", "decode", "--transfer-latency-ms", "100")
    assert late["ttft_s"]["mean"] > fleet["ttft_s"]["mean"] + 0.1
    assert late["itl_s"]["max"] < fleet["itl_s"]["max"]


def test_the_table_of_a_disaggregated_fleet_names_the_pools() -> None:
    done = kvledger("fleet", *QUICK, *POOLS, *BYTES)
    assert done.returncode == 0
    assert "KV transfer" in done.stdout
    rows = [line.split()[:2] for line in done.stdout.split("Engines")[1].splitlines()]
    assert [row for row in rows if row and row[0] in ("prefill", "decode")] == [
        ["prefill", "0"],
        ["decode", "0"],
        ["decode", "1"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prefill-replicas", "1"), "--prefill-replicas and --decode-replicas go together"),
        (("--decode-routing", "sticky"), "--decode-routing sticky has no effect without --prefill-replicas"),
        ((*POOLS[:4],), "--prefill-replicas needs --transfer-gb-s; it has no default"),
        ((*POOLS,), "--transfer-gb-s 50 needs the bytes of a block: give --model, or --transfer-bytes-per-block"),
        ((*POOLS, *BYTES, "--replicas", "2"), "--replicas 2 and --prefill-replicas 1 exclude each other"),
        ((*POOLS, *BYTES, "--transfer-sharing", "luck"), "--transfer-sharing is 'luck'; it is one of fair, fifo"),
        ((*POOLS, *BYTES, "--transfer-latency-ms", "-1"), "--transfer-latency-ms is -1.0; it must be 0 or more"),
        ((*POOLS[:4], "--transfer-gb-s", "0"), "--transfer-gb-s is 0.0; it must be above 0"),
    ],
)
def test_pools_that_contradict_each_other_exit_with_2(arguments: tuple[str, ...], message: str) -> None:
    done = kvledger("fleet", *QUICK, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_fleet_leaves_the_files_of_a_replay(tmp_path: Path) -> None:
    names = {"requests-out": "r.csv", "series-out": "s.csv", "prometheus-out": "p.prom", "perfetto-out": "t.json"}
    files = [word for option, name in names.items() for word in (f"--{option}", str(tmp_path / name))]
    document("fleet", *QUICK, *POOLS, *BYTES, *files)
    header, *rows = (tmp_path / "r.csv").read_text().splitlines()
    assert header.startswith("engine,request_id,")
    assert {row.split(",")[0] for row in rows} <= {"prefill 0", "decode 0", "decode 1"}
    assert len(rows) == 60
    assert 'instance="prefill-0"' in (tmp_path / "p.prom").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names.values())


def test_a_fleet_in_a_closed_loop_says_so() -> None:
    assert document("fleet", *QUICK, "--closed-loop")["assumptions"]["arrivals"].startswith("closed loop")
    assert document("fleet", *QUICK)["assumptions"]["arrivals"].startswith("open loop")
