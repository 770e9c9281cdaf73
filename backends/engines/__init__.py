"""Our allocator inside engines with small cache managers: nano-vllm, transformers' continuous batching."""
