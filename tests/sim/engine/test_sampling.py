"""Samples, beams and draft trees: forks and copies on write by the real allocator, counted beside arithmetic."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.sim.engine.sampling import BeamSearch, DraftTree, ParallelSampling, run_sampling
from kvledger.sim.random_draws import Draws
from kvledger.sim.traces import TraceRequest


def request(prompt: int, output: int) -> TraceRequest:
    return TraceRequest(0.0, prompt, output, None, 1)


@pytest.mark.parametrize(("prompt", "copies"), [(32, 0), (40, 2), (47, 2)])
def test_samples_copy_the_prompt_s_partial_block_and_nothing_else(prompt, copies):
    report = run_sampling([request(prompt, 50)], ParallelSampling(3))
    assert (report.num_forks, report.num_copied_blocks) == (2, copies)
    assert (report.num_steps, report.num_output_tokens) == (50, 150)


def test_what_samples_save_is_their_shared_full_blocks():
    report = run_sampling([request(64, 16)], ParallelSampling(4))
    # 4 shared blocks and 1 of each, through all 16 steps, where each alone would hold 5
    assert (report.held_block_steps, report.unshared_block_steps) == (16 * (4 + 4), 16 * 4 * 5)
    assert report.saving == pytest.approx(1 - 8 / 20)


@given(st.integers(1, 60), st.integers(1, 40), st.integers(2, 5), st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_samples_hold_what_arithmetic_says(prompt, output, n, block_size):
    report = run_sampling([request(prompt, output)], ParallelSampling(n), block_size=block_size)
    full = prompt // block_size
    held = sum(full + n * (-(-(prompt + step) // block_size) - full) for step in range(1, output + 1))
    assert report.held_block_steps == held
    assert report.unshared_block_steps == sum(n * -(-(prompt + step) // block_size) for step in range(1, output + 1))


def test_beams_that_are_never_replaced_are_samples():
    samples = run_sampling([request(70, 60)], ParallelSampling(4))
    beams = run_sampling([request(70, 60)], BeamSearch(4, 0.0))
    assert beams.as_dict() == samples.as_dict()


def test_beams_that_are_replaced_share_more_and_copy_more():
    reports = [run_sampling([request(70, 300)], BeamSearch(4, replaced), seed=1) for replaced in (0.0, 0.05, 0.3)]
    savings = [report.saving for report in reports]
    copies = [report.num_copied_blocks for report in reports]
    assert savings == sorted(savings)
    assert copies == sorted(copies)
    assert savings[-1] > 0.6
    assert all(report.num_output_tokens == 4 * 300 for report in reports)


@given(st.floats(0.0, 1.0), st.integers(2, 6), st.integers(0, 10**6))
def test_some_beam_always_lives_on_and_every_place_is_filled(replaced, width, seed):
    draws = Draws(seed)
    for ends, forks in BeamSearch(width, replaced).steps(30, draws):
        parents = {parent for parent, _ in forks}
        assert len(ends) < width
        assert not parents & set(ends)
        if ends:
            assert sorted(ends) == sorted(child for _, child in forks)


@pytest.mark.parametrize(("acceptance", "steps"), [(0.0, 30), (1.0, 10)])
def test_a_tree_s_accepted_drafts_shorten_the_run(acceptance, steps):
    report = run_sampling([request(40, 30)], DraftTree((3, 2), acceptance))
    assert report.num_steps == steps
    assert report.num_output_tokens == 30
    # the trunk's token, three first drafts and six second ones a step
    assert report.num_branch_tokens == steps * (1 + 3 + 6)
    assert report.num_forks == steps * 5


def test_a_tree_s_result_has_the_right_length_however_it_is_drawn():
    for seed in range(10):
        report = run_sampling([request(33, 47)], DraftTree((2, 2, 2), 0.7), seed=seed, block_size=4)
        assert report.num_output_tokens == 47
        assert 47 / 4 <= report.num_steps <= 47
        assert 0 < report.saving < 1


def test_one_seed_gives_one_report():
    requests = [request(50, 80), request(20, 30)]
    reports = [run_sampling(requests, BeamSearch(3, 0.2), seed=seed).as_dict() for seed in (5, 5, 6)]
    assert reports[0] == reports[1] != reports[2]
    assert reports[0]["num_requests"] == 2


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (["--n", "2"], "parallel sampling"),
        (["--beam-width", "3"], "beam search"),
        (["--draft-tree", "2,2", "--draft-acceptance-rate", "0.6"], "draft tree"),
    ],
)
def test_the_command_line_counts_forks_and_copies(kvledger, options, kind):
    arguments = ["sampling", "--workload", "sharegpt", "--limit", "4", *options]
    code, out, err = kvledger(*arguments, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["sampling"]["kind"] == kind
    assert answer["num_requests"] == 4
    assert answer["num_forks"] > 0
    assert 0 < answer["memory_saving"] < 1
    code, out, _ = kvledger(*arguments)
    assert code == 0
    assert "blocks copied on write" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give exactly one of --n, --beam-width and --draft-tree; none was given"),
        (["--n", "2", "--beam-width", "2"], "--n and --beam-width was given"),
        (["--n", "1"], "--n is 1; it must be from 2 to 256"),
        (["--n", "2", "--beam-replaced", "0.2"], "--beam-replaced 0.2 has no effect without --beam-width"),
        (["--beam-width", "2", "--beam-replaced", "1.5"], "--beam-replaced is 1.5"),
        (["--draft-tree", "2,2"], "--draft-tree and --draft-acceptance-rate go together"),
        (["--draft-tree", "2,x", "--draft-acceptance-rate", "0.5"], "--draft-tree 2,x: 'x' is not a whole number"),
        (["--draft-tree", "2,0", "--draft-acceptance-rate", "0.5"], "give children per depth"),
        (["--draft-tree", "99,99", "--draft-acceptance-rate", "0.5"], "has 9801 paths; at most 256"),
        (["--draft-tree", "2", "--draft-acceptance-rate", "1.5"], "--draft-acceptance-rate is 1.5"),
        (["--n", "2", "--block-size", "0"], "--block-size is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(kvledger, options, message):
    code, out, err = kvledger("sampling", "--workload", "sharegpt", "--limit", "2", *options)
    assert (code, out) == (2, "")
    assert message in err


def test_sampling_parameters_out_of_range_are_refused():
    with pytest.raises(InputError, match="it must be from 2 to 256"):
        ParallelSampling(1)
