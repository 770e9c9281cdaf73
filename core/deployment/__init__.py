"""Plans one engine on its GPUs: where the memory goes, how many blocks the pool gets, and what to change."""
