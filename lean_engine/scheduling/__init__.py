"""Who runs in a step, and with how many tokens. Pure Python; imports neither numpy nor cupy."""
