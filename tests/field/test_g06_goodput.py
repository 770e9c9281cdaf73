"""Field report G06: which requests keep an SLO: refused ones do not, single tokens have no TPOT, E2E may be limited."""

import json

import pytest
from kvledger.core import InputError
from kvledger.sim.engine.metrics import RequestRecord
from kvledger.sim.search.slo import Slo, SloTally


def record(ttft_s=0.1, tpot_s=0.01, e2e_s=None, num_tokens=11):
    tpot_s = None if num_tokens == 1 else tpot_s
    e2e_s = ttft_s + (tpot_s or 0) * (num_tokens - 1) if e2e_s is None else e2e_s
    return RequestRecord("r", 0.0, 0.0, ttft_s, tpot_s, e2e_s, 10, num_tokens, 0, 0)


def verdict(slo, *records, refused=0):
    tally = SloTally(slo)
    for each in records:
        tally.finished(each)
    return tally.verdict(len(records) + refused)


@pytest.mark.parametrize("limits", [{"ttft_s": 1.0}, {"tpot_s": 0.02}, {"e2e_s": 1.0}, {"ttft_s": 1.0, "e2e_s": 1.0}])
def test_g06_a_refused_request_is_one_of_all(limits):
    figure = verdict(Slo(goodput_share=0.9, **limits), *[record()] * 9, refused=1).figures["goodput_share"]
    assert figure == {"limit": 0.9, "value": 0.9, "met": True}
    assert not verdict(Slo(goodput_share=0.91, **limits), *[record()] * 9, refused=1).met


def test_g06_a_single_token_keeps_a_tpot_limit_but_not_every_other():
    slo = Slo(goodput_share=1.0, tpot_s=0.001, ttft_s=1.0, e2e_s=1.0)
    assert verdict(slo, record(num_tokens=1)).figures["goodput_share"]["value"] == 1.0
    assert verdict(slo, record(num_tokens=1, ttft_s=2.0)).figures["goodput_share"]["value"] == 0.0
    assert verdict(slo, record()).figures["goodput_share"]["value"] == 0.0


def test_g06_a_slow_end_misses_the_limit_on_the_whole_request_alone():
    slow = record(ttft_s=0.1, tpot_s=0.01, e2e_s=9.0)
    assert verdict(Slo(goodput_share=1.0, ttft_s=1.0, tpot_s=0.02), slow).met
    assert not verdict(Slo(goodput_share=1.0, ttft_s=1.0, tpot_s=0.02, e2e_s=8.9), slow).met
    assert verdict(Slo(e2e_p99_s=9.0), slow).figures["e2e_p99_s"] == {"limit": 9.0, "value": 9.0, "met": True}
    assert not verdict(Slo(e2e_p99_s=8.9), slow).met


def test_g06_refused_requests_are_endlessly_late_in_a_percentile_of_e2e():
    assert verdict(Slo(e2e_p99_s=1.0), *[record()] * 99, refused=1).met
    figure = verdict(Slo(e2e_p99_s=1.0), *[record()] * 98, refused=2).figures["e2e_p99_s"]
    assert figure == {"limit": 1.0, "value": None, "met": False}


def test_g06_a_run_is_lost_as_soon_as_too_many_ends_are_late():
    tally = SloTally(Slo(e2e_p99_s=1.0))
    tally.finished(record(e2e_s=2.0))
    assert not tally.is_lost(100)
    tally.finished(record(e2e_s=2.0))
    assert tally.is_lost(100)
    assert tally.lost().figures["e2e_p99_s"]["num_late"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"e2e_s": 1.0}, "--slo-e2e"),
        ({"goodput_share": 0.9}, "--slo-e2e"),
        ({"e2e_p99_s": -1.0}, "above 0"),
        ({}, "--slo-e2e-p99"),
    ],
)
def test_g06_limits_that_say_nothing_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        Slo(**given)


@pytest.fixture
def nine_and_one(tmp_path):
    """Nine prompts of 100 tokens, one of them with a single output token, and one that no pool of 200 blocks holds."""
    rows = [{"timestamp": 500 * i, "input_length": 100, "output_length": 1 if i == 4 else 20} for i in range(9)]
    rows.append({"timestamp": 4500, "input_length": 5000, "output_length": 20})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


POOL = ("--num-gpu-blocks-override", "200", "--block-size", "16", "--probes", "0")


@pytest.mark.parametrize("limit", [("--slo-ttft", 5), ("--slo-tpot", 0.5), ("--slo-e2e", 5)])
def test_g06_on_the_command_line(kvledger, nine_and_one, limit):
    code, out, err = kvledger("size", nine_and_one, *POOL, "--slo-goodput", 0.9, *limit, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    (trial,) = document["shapes"][0]["searches"][0]["trials"]
    assert (trial["requests"]["rejected"], trial["slo"]["goodput_share"]["value"]) == (1, 0.9)
    assert document["answer"]["replicas"] == 1


def test_g06_a_limit_on_e2e_is_searched_and_shown(kvledger, nine_and_one):
    code, out, err = kvledger("size", nine_and_one, "--limit", 9, *POOL, "--slo-e2e-p99", 3)
    assert (code, err) == (0, "")
    assert "p99 E2E within 3 s" in out and "E2E p99" in out


def test_g06_an_e2e_that_no_fleet_keeps_is_relaxed_to_the_requests_that_can(kvledger, nine_and_one):
    code, out, err = kvledger("size", nine_and_one, "--limit", 9, *POOL, "--slo-e2e-p99", 0.05, "--json")
    assert (code, err) == (1, "")
    document = json.loads(out)
    (shape,) = document["shapes"]
    assert shape["searches"] == [] and "p99 E2E" in shape["reason"]
    assert shape["idle_share_in_time"] == pytest.approx(1 / 9)  # the request of a single token
    assert document["instead"]["slo"] == {"goodput_share": 0.11, "e2e_s": 0.05}
