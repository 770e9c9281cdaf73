"""Real memory in torch tensors: the cache's buffer, block tables and slots on the device, and the model's kernels."""
