"""Block hashes: the key of a block is a digest of its tokens, its extra keys and the key of the block before it.

`block_hasher(algorithm)` makes the hasher for one of `ALGORITHMS`. docs/block_hashes.md documents the byte encoding
and its reference vector. Importing this module loads neither hashlib nor OpenSSL: the ids of a trace are not hashed.
"""

import pickle
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import repeat
from types import ModuleType
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .extra_keys import BlockExtraKeys, encode_extra_keys

ALGORITHMS = ("sha256", "sha256_cbor", "sha256_pickle", "xxh3")

TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

INT32_TOKENS = 0x01
INT64_TOKENS = 0x02
EXTRA_KEYS_FOLLOW = 0x10
_HEADER = struct.Struct("<BI")
_ROOT_LABEL = b"kvledger block hash v1"
VLLM_DEFAULT_SEED = "vllm-none-hash"  # public and fixed, where PYTHONHASHSEED is unset (golden/hashing.jsonl)


@attrs.frozen
class BlockHasher:
    """A named algorithm that turns tokens into the chained keys of their complete blocks.

    It hashes the fixed byte encoding of docs/block_hashes.md with `new_hash` (hashlib.sha256, xxhash.xxh3_128).
    """

    name: str  # one of `ALGORITHMS`
    root: bytes  # the key that precedes a first block
    new_hash: Callable[[bytes], Any]

    def chain(
        self,
        token_ids: TokenIds,
        block_size: int,
        parent: bytes | None = None,
        extra_keys: Sequence[BlockExtraKeys] | None = None,
    ) -> list[bytes]:
        """Return the keys of the complete blocks of `token_ids`, in order; a partial last block gets none.

        `parent` is the key of the block before the first one (None: there is none). `extra_keys` holds one value per
        complete block; None means that no block has any. Raises InputError for a block size below 1, for token ids that
        are not whole numbers of 64 bits, and for extra keys that do not match the blocks.
        """
        payloads = encode_blocks(token_ids, block_size, extra_keys)
        new_hash = self.new_hash
        key = self.root if parent is None else parent
        keys: list[bytes] = []
        append = keys.append
        for payload in payloads:
            key = new_hash(key + payload).digest()
            append(key)
        return keys


@attrs.frozen
class VllmBlockHasher(BlockHasher):
    """vLLM's chain: SHA-256 over the serialized tuple (parent, tokens, extra keys), as golden/hashing.jsonl records it.

    `serialize` is canonical CBOR (portable) or pickle (tied to Python's pickle format: strings that are one object in
    vLLM's process and two here pickle to different bytes). The root is the NONE_HASH of a vLLM server with this seed.
    """

    serialize: Callable[[object], bytes]

    def chain(
        self,
        token_ids: TokenIds,
        block_size: int,
        parent: bytes | None = None,
        extra_keys: Sequence[BlockExtraKeys] | None = None,
    ) -> list[bytes]:
        """See `BlockHasher.chain`."""
        blocks = _complete_blocks(token_array(token_ids), block_size)
        key = self.root if parent is None else parent
        keys: list[bytes] = []
        for tokens, extra in zip(blocks.tolist(), _per_block(extra_keys, len(blocks)), strict=True):
            key = self.new_hash(self.serialize((key, tuple(tokens), extra or None))).digest()
            keys.append(key)
        return keys


def block_hasher(algorithm: str = "sha256", *, vllm_seed: str | None = None) -> BlockHasher:
    """Make the hasher named `algorithm`.

    * `sha256`: the default; cryptographic, and identical in every process, Python version and byte order.
    * `sha256_cbor`: vLLM's portable chain; imports cbor2.
    * `sha256_pickle`: what vLLM calls `sha256`; tied to Python's pickle.
    * `xxh3`: fast, 128 bits, not cryptographic: a user who chooses token ids can make keys collide, so it is for
      single-tenant use only; imports xxhash.

    `vllm_seed` is the PYTHONHASHSEED of the vLLM server whose keys must be reproduced, if it had one.

    Raises InputError for another name, for a `vllm_seed` that the algorithm would ignore, and where the package that
    the choice needs is not installed.
    """
    if vllm_seed is not None and algorithm in ("sha256", "xxh3"):
        raise InputError(f"vllm_seed {vllm_seed!r} has no effect on {algorithm!r}: leave it out, or choose sha256_cbor")
    if algorithm == "xxh3":
        xxh3_128 = _import_for(algorithm, "xxhash").xxh3_128
        return BlockHasher(algorithm, xxh3_128(_ROOT_LABEL).digest(), xxh3_128)
    from hashlib import sha256

    if algorithm == "sha256":
        return BlockHasher(algorithm, sha256(_ROOT_LABEL).digest(), sha256)
    seed = VLLM_DEFAULT_SEED if vllm_seed is None else vllm_seed
    if algorithm == "sha256_pickle":
        return VllmBlockHasher(algorithm, sha256(_pickle(seed)).digest(), sha256, _pickle)
    if algorithm == "sha256_cbor":
        dumps = partial(_import_for(algorithm, "cbor2").dumps, canonical=True)
        return VllmBlockHasher(algorithm, sha256(dumps(seed)).digest(), sha256, dumps)
    raise InputError(f"unknown block hash algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")


def key_low64(key: bytes) -> int:
    """Return the last 64 bits of a key as an unsigned number, which vLLM's KV events can be configured to carry."""
    return int.from_bytes(key[-8:], "big")


def token_array(token_ids: TokenIds) -> NDArray[np.signedinteger[Any]]:
    """Return the token ids as a little-endian array: int32 if all fit, else int64. May share memory with the input.

    Raises InputError for anything but whole numbers of 64 bits in one dimension.
    """
    if isinstance(token_ids, np.ndarray):
        return _narrowed(token_ids)
    try:
        return np.frombuffer(struct.pack(f"<{len(token_ids)}i", *token_ids), "<i4")
    except (struct.error, TypeError):
        pass  # struct has one error for "not a whole number" and for "too wide"; array, which is slower, has two
    try:
        return np.asarray(array("q", token_ids)).astype("<i8")
    except (TypeError, OverflowError) as error:
        raise InputError(f"token ids must be whole numbers that fit in 64 bits: {error}") from None


def _narrowed(token_ids: NDArray[np.integer[Any]]) -> NDArray[np.signedinteger[Any]]:
    dtype = token_ids.dtype
    if dtype.kind not in "iu" or token_ids.ndim != 1:
        raise InputError(
            f"token ids are an array of {dtype} with shape {token_ids.shape}: whole numbers in one dimension are needed"
        )
    if np.can_cast(dtype, np.int32) or token_ids.size == 0:
        return np.ascontiguousarray(token_ids, dtype="<i4")
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest >= -(1 << 31) and highest < 1 << 31:
        return token_ids.astype("<i4")
    if highest >= 1 << 63:
        raise InputError(f"token id {highest} does not fit in 64 bits: the largest that works is {(1 << 63) - 1}")
    return np.ascontiguousarray(token_ids, dtype="<i8")


def encode_blocks(
    token_ids: TokenIds, block_size: int, extra_keys: Sequence[BlockExtraKeys] | None = None
) -> list[bytes]:
    """Return the bytes to hash for each complete block, after the previous block's key (see docs/block_hashes.md)."""
    tokens = token_array(token_ids)
    blocks = _complete_blocks(tokens, block_size)
    if extra_keys is not None:
        _per_block(extra_keys, len(blocks))
    if tokens.dtype.itemsize == 4:
        payloads = _payloads(blocks, INT32_TOKENS)
    else:
        payloads = _payloads_by_width(blocks)
    return payloads if extra_keys is None else _with_extra_keys(payloads, extra_keys)


def _complete_blocks(tokens: NDArray[np.signedinteger[Any]], block_size: int) -> NDArray[np.signedinteger[Any]]:
    if block_size < 1:
        raise InputError(f"the hash block size is {block_size}: it must be at least 1 token")
    num_blocks = len(tokens) // block_size
    return tokens[: num_blocks * block_size].reshape(num_blocks, block_size)


def _per_block(extra_keys: Sequence[BlockExtraKeys] | None, num_blocks: int) -> Sequence[BlockExtraKeys]:
    if extra_keys is None:
        return list(repeat(None, num_blocks))
    if len(extra_keys) != num_blocks:
        raise InputError(f"{len(extra_keys)} extra keys for {num_blocks} complete blocks: give one value per block")
    return extra_keys


def _payloads(blocks: NDArray[np.signedinteger[Any]], domain: int) -> list[bytes]:
    num_blocks, block_size = blocks.shape
    if num_blocks == 1:  # a decode step completes one block at a time; for it the buffer costs more than the hash
        return [_HEADER.pack(domain, block_size) + blocks.tobytes()]
    # One buffer holds every header in front of its tokens, and one call cuts it into the loop's byte strings.
    rows = np.empty((num_blocks, _HEADER.size + block_size * blocks.itemsize), np.uint8)
    rows[:, : _HEADER.size] = np.frombuffer(_HEADER.pack(domain, block_size), np.uint8)
    rows[:, _HEADER.size :] = blocks.view(np.uint8)
    return rows.view(f"V{rows.shape[1]}").ravel().tolist()


def _payloads_by_width(blocks: NDArray[np.signedinteger[Any]]) -> list[bytes]:
    """Encode each block at its own width, so that a wide token elsewhere does not change the block's key."""
    as_int32 = blocks.astype("<i4")
    fits: NDArray[np.bool_] = np.logical_and.reduce(as_int32 == blocks, axis=1)
    narrow = iter(_payloads(as_int32[fits], INT32_TOKENS))
    wide = iter(_payloads(blocks[~fits], INT64_TOKENS))
    return [next(narrow if is_narrow else wide) for is_narrow in fits]


def _with_extra_keys(payloads: list[bytes], extra_keys: Sequence[BlockExtraKeys]) -> list[bytes]:
    previous: BlockExtraKeys = None
    encoded = b""
    for index, extra in enumerate(extra_keys):
        if not extra:
            continue
        if extra is not previous:  # an adapter's keys are one object over all blocks
            previous, encoded = extra, encode_extra_keys(extra)
        payload = payloads[index]
        payloads[index] = bytes((payload[0] | EXTRA_KEYS_FOLLOW,)) + payload[1:] + encoded
    return payloads


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _import_for(algorithm: str, package: str) -> ModuleType:
    try:
        return import_module(package)
    except ModuleNotFoundError:
        raise InputError(
            f"the block hash algorithm {algorithm!r} needs the package {package}, which is not installed: "
            "pip install 'kvledger[hashes]', or choose sha256"
        ) from None
