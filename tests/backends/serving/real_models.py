"""Random tiny models of several families: what each produces alone with its own cache, and through the pool."""

import inspect
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
transformers = pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.backends import CudaBackend  # noqa: E402
from kvledger.backends.cuda.step_runner import StepOutputs  # noqa: E402
from kvledger.backends.serving import (  # noqa: E402
    LiveEngine,
    ModelRunner,
    StepTokens,
    kv_cache_config,
    served_layers,
    transformers_geometry,
)
from kvledger.core import (  # noqa: E402
    AllocatorConfig,
    EventLog,
    KVCacheAllocator,
    Request,
    Scheduler,
    SchedulerConfig,
    TokenBatch,
)
from kvledger.core.keys.block_hash import block_hasher  # noqa: E402
from kvledger.core.keys.token_keys import TokenKeySource  # noqa: E402
from kvledger.core.planner.groups import allocator_groups  # noqa: E402
from kvledger.core.scheduler.engine import Wait, engine_loop  # noqa: E402

from tests.backends.serving.model_families import FAMILIES  # noqa: E402

VOCAB_SIZE = 97
BLOCK_SIZE = 4

_COMMON = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.3, "tie_word_embeddings": False, "pad_token_id": 0}
_NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None}
_CLASSES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
}


def tiny_model(family, seed=0, **changes):
    """A fresh model with the weights of a seed, attending in plain torch ("eager"), on the CPU unless told so."""
    family, _, device = family.partition(" on ")
    name, fields = FAMILIES[family]
    config_class, model_class = _CLASSES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    config = getattr(transformers, config_class)(**_COMMON | _NO_SPECIAL | fields | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval()
    model.set_attn_implementation("eager")
    if device == "cuda" and "num_experts" in fields:
        # The default asks the host, in float32 on a GPU, how many tokens each expert has: no graph captures that.
        model.set_experts_implementation("batched_mm")
    return model.to(device or "cpu")


def prompt(num_tokens, seed=0):
    """Random token ids; 0 is padding and never among them."""
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, num_tokens).tolist()


def greedy(logits, index):
    """The likeliest token."""
    return int(logits.argmax())


def sampled(seed, temperature=0.8):
    """Draw output `index` with a number that depends on the seed and the index alone."""

    def choose(logits, index):
        share = np.random.default_rng([seed, index]).random()
        weights = (logits.double() / temperature).softmax(-1).cumsum(-1)
        return min(int(torch.searchsorted(weights, share)), len(weights) - 1)

    return choose


class Alone:
    """One sequence through the model with transformers' own `DynamicCache`, token by token."""

    def __init__(self, model):
        self.model = model
        self.cache = transformers.DynamicCache(config=model.config)
        self.keyword = cache_keyword(model)

    @torch.no_grad()
    def forward(self, token_ids):
        """Logits of the last token."""
        ids = torch.tensor([token_ids], device=self.model.device)
        output = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.keyword: self.cache})
        return output.logits[0, -1]

    def generate(self, prompt_ids, num_tokens, choose=greedy):
        """The output tokens."""
        outputs, ids = [], prompt_ids
        for index in range(num_tokens):
            outputs.append(choose(self.forward(ids), index))
            ids = outputs[-1:]
        return outputs


def cache_keyword(model):
    """What the model calls its cache: renamed in transformers 5.24."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def alone(model, prompt_ids, num_tokens, choose=greedy):
    """What the model produces for one prompt by itself."""
    return Alone(model).generate(prompt_ids, num_tokens, choose)


PLAN_SETTINGS = ("layout", "kv_cache_dtype")
BACKEND_SETTINGS = ("arrangement", "model_dtype", "kernels")


def make_backend_and_allocator(model, num_blocks=120, max_num_batched_tokens=256, **settings):
    """A pool for a model, and the log of what is decided about it."""
    plan = {name: settings.pop(name) for name in PLAN_SETTINGS if name in settings}
    memory = {name: settings.pop(name) for name in BACKEND_SETTINGS if name in settings}
    config = kv_cache_config(transformers_geometry(model), num_blocks=num_blocks, block_size=BLOCK_SIZE, **plan)
    backend = CudaBackend(device=model.device, max_num_batched_tokens=max_num_batched_tokens, **memory)
    backend.initialize(config)
    log = EventLog()
    rules = {"max_num_reqs": 8, "max_model_len": 200, "retention_interval": None} | settings
    rules["max_in_flight_tokens"] = max_num_batched_tokens
    groups = allocator_groups(config)
    allocator = KVCacheAllocator(AllocatorConfig(num_blocks=num_blocks, groups=groups, **rules), sinks=[backend, log])
    return backend, allocator, log


class Pool:
    """A model on a pool of its own: runner, backend and allocator, with the log of what was decided."""

    def __init__(self, model, max_num_batched_tokens=64, **settings):
        self.backend, self.allocator, self.log = make_backend_and_allocator(
            model, max_num_batched_tokens=max_num_batched_tokens, **settings
        )
        self.runner = ModelRunner(model, self.backend)
        self.requests = {}

    @property
    def is_empty(self):
        """Whether no request holds a block."""
        return self.allocator.num_free_blocks == self.allocator.config.num_blocks - 1

    def count(self, event_class):
        """Events of a kind so far."""
        return sum(isinstance(event, event_class) for commit in self.log for event in commit.events)

    def forward(self, work):
        """One pass over the next tokens of some requests (id -> token ids); logits of the last token of each."""
        for request_id, token_ids in work.items():
            request = self.requests.get(request_id)
            if request is None:
                request = self.requests[request_id] = Request(request_id, num_prompt_tokens=len(token_ids))
            else:
                request.num_output_tokens += len(token_ids)
            self.allocator.release_out_of_window(request_id) if self.allocator.holds(request_id) else None
            assert self.allocator.allocate(request, len(token_ids)) is not None
        rows = np.array([self.allocator.row_of(request_id) for request_id in work])
        counts = np.array([len(token_ids) for token_ids in work.values()])
        firsts = self.allocator.state.num_placed[rows] - counts
        token_ids = np.array([token for token_ids in work.values() for token in token_ids])
        logits = self.runner.run(token_ids, TokenBatch(rows, firsts, counts), np.arange(len(rows)))
        return dict(zip(work, logits, strict=True))

    def fork(self, parent_id, child_id):
        """A second request that shares all tokens of the first."""
        parent = self.requests[parent_id]
        child = self.requests[child_id] = Request(child_id, num_prompt_tokens=parent.num_tokens)
        self.allocator.fork(parent_id, child)

    def cached(self, request_id, layer_index, num_tokens):
        """Keys and values of the last tokens of a request in a layer, `[num_kv_heads, num_tokens, head_size]`."""
        row = self.allocator.row_of(request_id)
        placed = int(self.allocator.state.num_placed[row])
        name = f"layers.{layer_index}.attn"
        return [x.transpose(0, 1) for x in self.backend.gather(name, [row], [num_tokens], [placed - num_tokens])]


def tight_engine(model, kernels=None, capturer=None, **settings):
    """A live engine with little room: steps of 16 tokens, and a pool that cannot hold six requests at once.

    With a capturer its decode steps of up to 6 requests are captured, and `graphs` counts the replays.
    """
    geometry = transformers_geometry(model)
    # A window's blocks come back, so a pool for full layers would never be tight.
    num_blocks = {(False,): 24, (True,): 13, (False, True): 36}[
        tuple(sorted({layer.window is not None for layer in served_layers(geometry)}))
    ]
    plan = kv_cache_config(geometry, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    backend = CudaBackend(device=model.device, max_num_batched_tokens=16, kernels=kernels)
    backend.initialize(plan)
    allocator = AllocatorConfig(
        num_blocks=num_blocks,
        groups=allocator_groups(plan),
        max_model_len=70,
        max_num_reqs=6,
        max_in_flight_tokens=16,
        retention_interval=None,
    )
    runner = ModelRunner(model, backend)
    graphs = None
    if capturer is not None:
        backend.create_tables(allocator)
        graphs = runner.capture((1, 2, 4, 6), capturer)
    limits = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=16, reserve_full_sequence=False)
    engine = LiveEngine(runner, allocator=allocator, scheduler=limits, **settings)
    engine.graphs = graphs
    return engine


class Service:
    """The same pool under the scheduler and the engine loop: what a live engine does, without its threads."""

    def __init__(self, model, scheduler=None, **settings):
        self.pool = Pool(model, **settings)
        self.pool.runner.tokens = self
        self.pool.backend.runner = self.pool.runner
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": self.pool.backend.slots.shape[1]}
        self.scheduler = Scheduler(SchedulerConfig(**limits | (scheduler or {})), self.pool.allocator)
        self.tokens = {}
        self.requests = {}
        self.choices = {}
        self.num_steps = 0
        self.mixed_steps = 0

    def submit(self, request_id, prompt_ids, num_tokens, choose=greedy):
        """Queue a request."""
        keys = TokenKeySource(prompt_ids, block_hasher("sha256"), self.pool.allocator.config.hash_block_size)
        request = Request(request_id, num_prompt_tokens=len(prompt_ids), max_tokens=num_tokens, keys=keys)
        self.requests[request_id], self.choices[request_id] = request, choose
        self.tokens[request_id] = list(prompt_ids)
        self.scheduler.submit(request)

    def run(self, between_steps=None):
        """Until nothing is left; `between_steps` is called with the number of steps so far after each."""
        observers = [] if between_steps is None else [lambda *_: between_steps(self.num_steps)]
        loop = engine_loop(self.scheduler, observers)
        move = next(loop)
        while not isinstance(move, Wait):
            self.num_steps += 1
            load = move.load
            self.mixed_steps += bool(load.num_prefill_tokens and load.num_decode_tokens)
            self.pool.backend.submit(move)
            move = loop.send(self.pool.backend.collect())
        loop.close()

    def outputs(self, request_id):
        """The tokens that a request has produced."""
        return self.tokens[request_id][self.requests[request_id].num_prompt_tokens :]

    def step_tokens(self, step):
        """See `RequestTokens`."""
        flat, sampled_places = [], []
        batch = step.batch
        for place, (row, first, count) in enumerate(zip(batch.rows, batch.first_positions, batch.counts, strict=True)):
            known = self.tokens[self.scheduler.request_in(int(row)).request_id]
            flat += known[first : first + count]
            if first + count == len(known):
                sampled_places.append(place)
        return StepTokens(np.array(flat), np.array(sampled_places, dtype=np.int64))

    def sample(self, step, tokens, logits):
        """See `RequestTokens`."""
        requests = [self.scheduler.request_in(int(row)) for row in step.batch.rows[tokens.sampled]]

        def finish():
            for request, row in zip(requests, logits, strict=True):
                known = self.tokens[request.request_id]
                known.append(self.choices[request.request_id](row, len(known) - request.num_prompt_tokens))
                request.keys.append(known[-1:])
            return StepOutputs()

        return finish


def assert_close(mine, theirs):
    """Equal within 1e-4 in float32, absolute for values of up to 1 and relative above."""
    assert mine.shape == theirs.shape
    assert math.isfinite(float(mine.abs().max()))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
