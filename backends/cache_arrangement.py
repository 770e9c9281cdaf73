"""How the keys and values of a layer are arranged in memory."""

import enum


class CacheArrangement(enum.Enum):
    """How keys and values of an attention layer are arranged; a latent or a state has one vector and needs none.

    PACKED: K and V of a token side by side, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, in the physical
    order of the plan's layout. FLASH: all keys, then all values, `[2, num_blocks, block_size, num_kv_heads,
    head_size]`. INTERLEAVED: keys, then values of each block, `[num_blocks, 2, ...]`. NHD and HND say whether tokens or
    heads are the outer axis inside a block. CLASSIC: keys `[num_blocks, num_kv_heads, head_size / x, block_size, x]`
    with 16 bytes a vector of x, values `[num_blocks, num_kv_heads, head_size, block_size]`.
    """

    PACKED = "packed"
    FLASH_NHD = "flash_nhd"
    FLASH_HND = "flash_hnd"
    INTERLEAVED_NHD = "interleaved_nhd"
    INTERLEAVED_HND = "interleaved_hnd"
    CLASSIC = "classic"

    @property
    def splits_layer(self) -> bool:
        """All keys of a layer lie before all its values, so a block of it is two runs of bytes."""
        return self in (CacheArrangement.FLASH_NHD, CacheArrangement.FLASH_HND, CacheArrangement.CLASSIC)

    @property
    def is_heads_first(self) -> bool:
        """Heads are the outer axis inside a block (HND)."""
        return self in (CacheArrangement.FLASH_HND, CacheArrangement.INTERLEAVED_HND)
