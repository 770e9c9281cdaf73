"""Attention by FlashAttention and FlashInfer: stand-ins compute from exactly the arguments that they are given."""

import logging
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="real memory needs torch")

from kvledger.backends import CacheArrangement, CudaBackend  # noqa: E402
from kvledger.backends.cuda.attention_packages import FlashAttention, FlashInfer, installed_packages  # noqa: E402
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request, TokenBatch  # noqa: E402
from kvledger.core.planner.layout import (  # noqa: E402
    KVCacheGroup,
    KVCacheLayout,
    lay_out,
)
from kvledger.core.planner.specs import FullAttentionSpec  # noqa: E402

from tests.backends.cuda import fake_attention_packages as fakes  # noqa: E402

pytestmark = pytest.mark.torch

HEADS, Q_HEADS = 2, 4
LAYERS = ("a", "b")
ARRANGEMENTS = {
    CacheArrangement.PACKED: KVCacheLayout.LBNHC,
    CacheArrangement.FLASH_NHD: KVCacheLayout.LBNHC,
    CacheArrangement.FLASH_HND: KVCacheLayout.LBHNC,
    CacheArrangement.INTERLEAVED_NHD: KVCacheLayout.BLNHC,
    CacheArrangement.INTERLEAVED_HND: KVCacheLayout.BLHNC,
}


class Served:
    """Two backends with the same cache: one that is given packages, and one that has its own kernel alone."""

    def __init__(
        self,
        packages: list[Any],
        lengths: list[int],
        block_size: int,
        arrangement: CacheArrangement = CacheArrangement.FLASH_NHD,
        kernel_block_size: int | None = None,
        **changes: Any,
    ) -> None:
        torch.set_num_threads(1)
        shape = {"num_kv_heads": HEADS, "head_size": 64, "dtype": "fp16"} | changes
        spec = FullAttentionSpec(block_size=block_size, **shape)
        num_blocks = 2 + sum(-(-length // block_size) + 1 for length in lengths)
        plan = lay_out([KVCacheGroup(LAYERS, (spec, spec), spec)], num_blocks, ARRANGEMENTS[arrangement])
        limits = {"max_model_len": 1024, "max_num_reqs": 6}
        settings = {"arrangement": arrangement, "kernel_block_sizes": [kernel_block_size], "device": "cpu"}
        self.backends = [
            CudaBackend(**settings, max_num_batched_tokens=2048, attention_packages=given) for given in (packages, [])
        ]
        for backend in self.backends:
            backend.initialize(plan)
        self.allocator = KVCacheAllocator(
            AllocatorConfig(num_blocks=num_blocks, groups=[FullAttention(block_size)], **limits), sinks=self.backends
        )
        self.spec, self.size = spec, spec.head_size
        for number, length in enumerate(lengths):
            self.allocator.allocate(Request(str(number), length), length)
        self.rows = np.array([self.allocator.row_of(str(number)) for number in range(len(lengths))], dtype=np.int64)
        self.lengths = np.array(lengths, dtype=np.int64)

    def attend(self, counts: list[int], num_padding: int = 0, layer: str = "a", **options: Any) -> None:
        """The last `counts` tokens of each request attend in both backends, to the same numbers."""
        dtype = torch.float32 if self.spec.dtype == "fp32" else torch.float16
        generator = torch.Generator().manual_seed(1)
        whole = TokenBatch(self.rows, np.zeros_like(self.rows), self.lengths)
        last = TokenBatch(self.rows, self.lengths - counts, np.array(counts, dtype=np.int64))
        key = torch.randn(whole.num_tokens, HEADS, self.size, generator=generator).to(dtype)
        query = torch.randn(last.num_tokens + num_padding, Q_HEADS, self.size, generator=generator).to(dtype)
        found = []
        for backend in self.backends:
            backend.slot_mapping(whole)
            backend.write_kv(layer, key, -key)
            backend.slot_mapping(last)
            num_reqs = min(len(self.rows) + num_padding, 6)
            found.append(backend.attend(layer, query, scale=0.125, num_reqs=num_reqs, **options))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-3)
        assert found[1].any()

    @property
    def choice(self) -> str:
        return self.backends[0].attention_choices["a"]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("counts", [[1, 1, 1], [7, 1, 300]])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 20.0}])
def test_flash_attention_reads_large_blocks(arrangement: Any, counts: list[int], options: Any) -> None:
    served = Served([FlashAttention(fakes.flash_attn)], [300, 1, 513], 256, arrangement)
    served.attend(counts, **options)
    assert served.choice == "flash_attn"


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("kernel_block_size", [None, 8])
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 20.0}])
def test_flashinfer_decodes_in_every_layout(arrangement: Any, kernel_block_size: int | None, options: Any) -> None:
    served = Served([FlashInfer(fakes.flashinfer)], [33, 16, 1], 16, arrangement, kernel_block_size)
    served.attend([1, 1, 1], **options)
    assert served.choice == "flashinfer"


@pytest.mark.parametrize("package", [FlashAttention(fakes.flash_attn), FlashInfer(fakes.flashinfer)])
def test_padding_requests_and_tokens_of_a_decode_give_zeros(package: Any) -> None:
    Served([package], [300, 20], 256).attend([1, 1], num_padding=2)


def test_flashinfer_plans_once_a_batch_for_layers_that_are_alike() -> None:
    wrappers: list[Any] = []

    class Counted(fakes.BatchDecodeWithPagedKVCacheWrapper):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            wrappers.append(self)

    module = type("flashinfer", (), {"BatchDecodeWithPagedKVCacheWrapper": Counted})
    served = Served([FlashInfer(module)], [33, 16], 16)
    served.attend([1, 1])
    backend = served.backends[0]
    query = torch.zeros(2, Q_HEADS, 64, dtype=torch.float16)
    backend.attend("b", query, scale=0.125, num_reqs=2)
    assert [wrapper.num_plans for wrapper in wrappers] == [1]
    served.allocator.append(served.rows)
    served.lengths += 1
    served.attend([1, 1])
    assert [wrapper.num_plans for wrapper in wrappers] == [2]
    backend.attend("b", query, scale=0.5, num_reqs=2)
    assert [wrapper.num_plans for wrapper in wrappers] == [2, 1]


@pytest.mark.parametrize(
    ("block_size", "counts", "changes", "reasons"),
    [
        (16, [3, 1], {}, ["flash_attn: it takes blocks of a multiple of 256 tokens, not of 16", "one token of each"]),
        (256, [1, 1], {"head_size": 260}, ["up to 256, not 260", "not 260 and 2"]),
        (256, [3, 1], {"dtype": "fp32"}, ["flash_attn: it takes one of", "one token of each"]),
        (256, [1, 1], {"dtype": "fp32"}, ["torch.float32 and torch.float32; flashinfer: it takes one of"]),
    ],
)
def test_what_fits_no_package_is_computed_here_and_the_reasons_are_said_once(
    block_size: int, counts: list[int], changes: Any, reasons: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    packages = [FlashAttention(fakes.flash_attn), FlashInfer(fakes.flashinfer)]
    served = Served(packages, [30, 20], block_size, **changes)
    with caplog.at_level(logging.INFO):
        for layer in ("a", "b", "a"):
            served.attend(counts, layer=layer)
    assert served.choice.startswith("own kernel; flash_attn: ")
    assert all(reason in served.choice for reason in reasons)
    assert [record.getMessage() for record in caplog.records if "attention of layer" in record.getMessage()] == [
        f"attention of layer a: {served.choice}",
        "attention of layer a: own kernel",
    ]


def test_an_entry_of_several_kernel_blocks_is_not_flash_attentions() -> None:
    served = Served([FlashAttention(fakes.flash_attn)], [600], 512, kernel_block_size=256)
    served.attend([1])
    assert "an entry of the block table is 512 tokens" in served.choice


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_package_is_used() -> None:
    assert installed_packages() == []
