"""A model that is small, deterministic and honest: it knows earlier tokens only from the cache."""

import hashlib
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")

from kvledger.backends import CudaBackend  # noqa: E402
from kvledger.backends.serving import LiveEngine, StepTokens  # noqa: E402
from kvledger.backends.serving.sampling import choose_tokens, uniform  # noqa: E402
from kvledger.core import AllocatorConfig, FullAttention, SchedulerConfig, SlidingWindow  # noqa: E402
from kvledger.core.kv_cache_config import KVCacheGroup  # noqa: E402
from kvledger.core.kv_cache_layout import KVCacheLayout  # noqa: E402
from kvledger.core.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec  # noqa: E402
from kvledger.core.kv_cache_tensors import lay_out  # noqa: E402

VOCAB_SIZE = 61
BLOCK_SIZE = 4
WINDOW = 8


def logits_of(token_ids):
    """What the model answers to a context: a different, fixed preference among all tokens for each."""
    digest = hashlib.blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0, 2, VOCAB_SIZE).astype(np.float32)


class CacheReader:
    """Writes token ids as keys and values, and answers from what it reads back through the block tables."""

    def __init__(self, backend, windowed=False):
        self.backend = backend
        self.tokens = None
        self.vocab_size = VOCAB_SIZE
        self.max_model_len = None
        self.windowed = windowed
        self.fail_at_step = None
        self.num_steps = 0
        self.on_step = None

    def launch(self, step):
        self.num_steps += 1
        if self.on_step is not None:
            self.on_step(step)
        if self.fail_at_step == self.num_steps:
            raise RuntimeError("the device is gone")
        tokens: StepTokens = self.tokens.step_tokens(step)
        content = torch.from_numpy(tokens.token_ids).to(torch.float32)[:, None, None].expand(-1, 1, 8).contiguous()
        for layer in self.backend.layers:
            self.backend.write_kv(layer, content, -content)
        ends = (step.batch.first_positions + step.batch.counts).tolist()
        rows = step.batch.rows.tolist()
        logits = [self._answer(rows[place], ends[place]) for place in tokens.sampled.tolist()]
        return self.tokens.sample(step, tokens, torch.from_numpy(np.array(logits).reshape(-1, VOCAB_SIZE)))

    def _answer(self, row, length):
        keys, values = self.backend.gather("full", [row], [length])
        context = keys[:, 0, 0].round().to(torch.int64)
        assert torch.equal(keys, -values)
        if self.windowed:
            first = max(length - WINDOW, 0)
            seen, _ = self.backend.gather("windowed", [row], [length - first], [first])
            assert torch.equal(seen[:, 0, 0].to(torch.int64), context[first:])
        return logits_of(context.numpy())


class Text:
    """A tokenizer: token i is the i-th letter of an alphabet with spaces; 60 is special."""

    ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?-"

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(
            self.ALPHABET[token] if token < 60 else "" if skip_special_tokens else "<end>" for token in token_ids
        )


@pytest.fixture
def make_engine():
    """Engines over the honest model; those that still run at the end of a test are shut down."""
    engines = []

    def make(
        num_blocks=40,
        max_model_len=64,
        windowed=False,
        policy="fcfs",
        max_num_seqs=8,
        max_num_batched_tokens=32,
        enable_caching=True,
        recording=None,
        **settings,
    ):
        full = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="fp32")
        groups = [KVCacheGroup(("full",), (full,), full)]
        kinds = [FullAttention(BLOCK_SIZE)]
        rules = {}
        if windowed:
            window = SlidingWindowSpec(
                block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="fp32", sliding_window=WINDOW
            )
            groups.append(KVCacheGroup(("windowed",), (window,), window))
            kinds.append(SlidingWindow(BLOCK_SIZE, window=WINDOW))
            rules = {"retention_interval": 0}
        backend = CudaBackend(device="cpu", max_num_batched_tokens=max_num_batched_tokens)
        backend.initialize(lay_out(groups, num_blocks, KVCacheLayout.LBNHC))
        allocator = AllocatorConfig(
            num_blocks=num_blocks,
            groups=kinds,
            max_model_len=max_model_len,
            max_num_reqs=max_num_seqs,
            enable_caching=enable_caching,
            max_in_flight_tokens=max_num_batched_tokens,
            **rules,
        )
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, policy=policy
        )
        engine = LiveEngine(
            CacheReader(backend, windowed),
            allocator=allocator,
            scheduler=scheduler,
            recording=recording(allocator, scheduler) if recording else None,
            **settings,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown(drain=False, timeout_s=20)


@pytest.fixture
def alone():
    """What a greedy request produces by the model's definition, with no cache at all."""

    def outputs(prompt, max_tokens, stop_token_ids=()):
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(int(logits_of(tokens).argmax()))
            if tokens[-1] in stop_token_ids:
                break
        return tuple(tokens[len(prompt) :])

    return outputs


@pytest.fixture
def drawn_alone():
    """What a request with a seed produces by the definition: the model's answers, and the request's own draws."""

    def outputs(prompt, each):
        tokens = list(prompt)
        for index in range(each.max_tokens):
            logits = torch.from_numpy(logits_of(tokens))[None]
            (chosen,) = choose_tokens(logits, [each], [uniform(each.seed, index)]).wait()
            tokens.append(chosen.token_id)
        return tuple(tokens[len(prompt) :])

    return outputs


@pytest.fixture
def text():
    """A tokenizer."""
    return Text()


@pytest.fixture
def eventually():
    """Wait for something that other threads do."""

    def wait(condition, timeout_s=20.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.001)

    return wait
