"""The allocator: commands that decide which request gets which block, each written down as one commit."""
