"""From layer specs and available bytes to block-table groups, memory layout and the number of blocks of a KV cache."""
