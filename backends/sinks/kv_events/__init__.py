"""KV events as vLLM publishes them: from commits to messages over ZeroMQ, and back into the pool that they describe."""
