"""A model that is small, deterministic and honest: it knows earlier tokens only from the cache."""

import hashlib

import numpy as np
import torch
from kvledger.backends import CudaBackend
from kvledger.backends.serving import LiveEngine, StepTokens
from kvledger.backends.serving.model.served_model import LengthLimit
from kvledger.core import AllocatorConfig, FullAttention, SchedulerConfig, SlidingWindow
from kvledger.core.planner.layout import KVCacheGroup, KVCacheLayout, lay_out
from kvledger.core.planner.specs import FullAttentionSpec, SlidingWindowSpec

VOCAB_SIZE = 61
BLOCK_SIZE = 4
WINDOW = 8


def logits_of(token_ids):
    """What the model answers to a context: a different, fixed preference among all tokens for each."""
    digest = hashlib.blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0, 2, VOCAB_SIZE).astype(np.float32)


class Context:
    """The model over one sequence of its own, by its definition."""

    def __init__(self):
        self.token_ids = []

    def forward(self, token_ids):
        """What it answers behind these tokens too."""
        self.token_ids += token_ids
        return logits_of(self.token_ids)


class CacheReader:
    """Writes token ids as keys and values, and answers from what it reads back through the block tables."""

    def __init__(self, backend, windowed=False):
        self.backend = backend
        self.tokens = None
        self.vocab_size = VOCAB_SIZE
        self.length_limit = LengthLimit(None, "")
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


def make_reading_engine(
    num_blocks=40,
    max_model_len=64,
    windowed=False,
    policy="fcfs",
    max_num_seqs=8,
    max_num_batched_tokens=32,
    enable_chunked_prefill=True,
    enable_caching=True,
    recording=None,
    **settings,
):
    """An engine over a pool of small blocks; `recording(allocator, scheduler)` makes the recording, if any."""
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
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        policy=policy,
    )
    return LiveEngine(
        CacheReader(backend, windowed),
        allocator=allocator,
        scheduler=scheduler,
        recording=recording(allocator, scheduler) if recording else None,
        **settings,
    )
