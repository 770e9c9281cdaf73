"""Where every byte of a device goes: what one engine may use, what a profile measured, what is left for the pool."""
