"""Without a card the GPU benches skip; with one they refuse to measure Triton's interpreter."""

import pytest

torch = pytest.importorskip("torch", reason="the benches need torch")
pytest.importorskip("triton", reason="the benches need triton")

from bench.gpu_card import card_modules  # noqa: E402

pytestmark = pytest.mark.torch


def test_without_a_card_a_bench_skips_and_says_what_torch_found(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.skip.Exception, match=rf"no CUDA device to measure on \(torch {torch.__version__[:4]}"):
        card_modules()


def test_the_interpreter_is_never_measured(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(pytest.fail.Exception, match="the interpreter would be measured"):
        card_modules()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert [module.__name__ for module in card_modules()] == ["torch", "triton"]
