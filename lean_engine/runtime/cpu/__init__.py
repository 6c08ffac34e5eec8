"""The CPU device: the kernel table in NumPy, float32, one file per kernel family."""
