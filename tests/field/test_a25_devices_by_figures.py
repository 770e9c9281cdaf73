"""A25: a device without a preset is taken by its figures, by every command, and is said to be uncalibrated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvledger.core import InputError
from kvledger.sim import Scenario
from kvledger.sim.latency.devices import device_factors, devices, find_device

FIGURES = """\
name = "X9"
memory = "60GiB"
bandwidth_gb_s = 1500
tflops = {bf16 = 400, fp8 = 800}
link = {name = "PCIe 5 x16", gb_s = 128}
cuda_capability = "12.0"
source = "figures of a test"
"""
MODEL = ("--model", "llama-3.1-8b", "--max-model-len", "4096")
RUN = ("--workload", "conversation", "--limit", "6")


@pytest.fixture
def card(tmp_path: Path) -> Path:
    path = tmp_path / "x9.toml"
    path.write_text(FIGURES)
    return path


def kvledger(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "kvledger", *arguments]
    done = subprocess.run(command, cwd=cwd, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_a25_figures_from_a_file(card: Path) -> None:
    device = find_device(str(card))
    assert (device.name, device.total_bytes, device.bandwidth_bytes_per_s) == ("X9", 60 << 30, 1.5e12)
    assert (device.bf16_flops, device.fp8_flops, device.link.bytes_per_s) == (4e14, 8e14, 128e9)
    assert device.cuda_capability == 120
    assert device_factors(device).source.startswith("not calibrated: X9 by figures of figures of a test")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", *MODEL),
        ("replay", *MODEL, *RUN),
        ("fleet", *MODEL, *RUN, "--replicas", "2"),
        ("size", *MODEL, *RUN, "--slo-ttft-p99", "10"),
        ("study", *MODEL, *RUN),
    ],
)
def test_a25_every_command_takes_it_and_says_that_it_is_not_calibrated(card: Path, arguments: tuple[str, ...]) -> None:
    out = kvledger(*arguments, "--gpu", card.name, "--json", cwd=card.parent)
    assert "X9" in out
    assert "not calibrated" in out
    assert json.loads(out)


def test_a25_a_plan_starts_from_its_memory(card: Path) -> None:
    document = Scenario(model="llama-3.1-8b", gpu=str(card)).plan().to_dict()
    assert document["device"]["name"] == "X9"
    assert document["device"]["total_bytes"] == 60 << 30
    assert any(
        "X9 by the figures of" in sentence and "figures of a test" in sentence for sentence in document["assumptions"]
    )


def test_a25_half_the_bandwidth_is_a_slower_step(card: Path) -> None:
    def tpot() -> float:
        run = Scenario(workload="conversation", limit=10, model="llama-3.1-8b", gpu=str(card), max_model_len=4096)
        return run.replay().report.to_json()["tpot_s"]["mean"]

    before = tpot()
    card.write_text(FIGURES.replace("1500", "750"))
    assert tpot() > 1.5 * before


@pytest.mark.parametrize(
    "change, message",
    [
        (('name = "X9"', ""), "name is None; it must be a text that says what reports call the device"),
        (('source = "figures of a test"', ""), "source is None; it must be a text that says where the figures"),
        (('memory = "60GiB"', ""), "missing memory"),
        (("bandwidth_gb_s = 1500", ""), "missing bandwidth_gb_s"),
        (("bandwidth_gb_s = 1500", "bandwidth_gb_s = -1"), "bandwidth_gb_s is -1; it must be a number above 0"),
        (("bf16 = 400", "fp16 = 400"), "it must be a table of bf16 and fp8"),
        (('cuda_capability = "12.0"', "cuda_capability = 12"), "must be a version such as"),
        (("link =", "links ="), "unknown field links; known are name, memory"),
        (("name =", "name"), "not a TOML document"),
    ],
)
def test_a25_a_file_that_says_too_little_is_refused(card: Path, change: tuple[str, str], message: str) -> None:
    card.write_text(FIGURES.replace(*change))
    with pytest.raises(InputError, match=message):
        find_device(str(card))


def test_a25_several_gpus_need_a_link_and_step_times_need_flops(card: Path) -> None:
    run = Scenario(
        workload="conversation",
        limit=3,
        model="llama-3.1-8b",
        gpu=str(card),
        max_model_len=4096,
        tensor_parallel_size=2,
    )
    card.write_text(FIGURES.replace('link = {name = "PCIe 5 x16", gb_s = 128}', ""))
    with pytest.raises(InputError, match="has no link here, which several GPUs need"):
        run.replay()
    assert run.evolve(tensor_parallel_size=1).replay().report.to_json()["tpot_s"]["mean"] > 0
    card.write_text(FIGURES.replace("tflops = {bf16 = 400, fp8 = 800}", ""))
    with pytest.raises(InputError, match="has no dense bf16 FLOP/s here"):
        run.evolve(tensor_parallel_size=1).replay()
    assert run.plan().fits


def test_a25_an_unknown_name_says_how_to_describe_a_device() -> None:
    with pytest.raises(InputError, match=r"give --total-memory.*--gpu FILE.toml; see docs/planning.md"):
        find_device("X9")
    with pytest.raises(InputError, match="No such file"):
        find_device("/nowhere/x9.toml")


@pytest.mark.parametrize(
    "name, gigabytes, tb_per_s",
    [
        ("H20", 96, 4.0),
        ("L20", 48, 0.864),
        ("NVIDIA GeForce RTX 4090", 24, 1.008),
        ("RTX5090", 32, 1.792),
        ("RTX PRO 6000", 96, 1.792),
        ("DGX Spark", 128, 0.273),
        ("GB200", 186, 8.0),
        ("B300", 288, 8.0),
        ("GB300", 288, 8.0),
        ("NVIDIA A10G", 24, 0.6),
        ("AMD Instinct MI325X", 256, 6.0),
        ("AMD Instinct MI355X", 288, 8.0),
    ],
)
def test_a25_todays_cards_have_presets(name: str, gigabytes: int, tb_per_s: float) -> None:
    device = find_device(name)
    assert (device.label_gb, device.bandwidth_bytes_per_s) == (gigabytes, tb_per_s * 1e12)
    assert device.total_source.startswith("assumed: ")
    assert device.total_bytes < gigabytes << 30


def test_a25_what_no_datasheet_gives_is_not_made_up() -> None:
    assert [name for name, device in devices().items() if device.bf16_flops is None] == ["GB10"]
