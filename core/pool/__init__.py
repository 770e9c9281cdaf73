"""The block pool of one device: ref counts, the free queue in eviction order, and block tables."""
