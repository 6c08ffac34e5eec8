"""KV memory: which blocks exist, who holds them, and how many fit. Pure Python; imports neither numpy nor cupy."""
