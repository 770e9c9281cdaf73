"""Our allocator inside engines whose cache managers are small: nano-vllm's block manager."""
