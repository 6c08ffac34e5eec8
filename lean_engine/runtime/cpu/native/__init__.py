"""The compiled CPU device: the kernels in cpu/, a pool of threads, and a step that one call replays."""
