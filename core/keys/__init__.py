"""Keys: block hashes over tokens and extra keys, which make a block findable."""
