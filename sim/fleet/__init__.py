"""Several engines behind a router: data-parallel replicas, tiers for evicted blocks, prefill/decode disaggregation."""
