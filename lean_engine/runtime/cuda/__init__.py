"""The CUDA device's home. Its kernels' sources lie in cuda/ at the top of the repository; `sources` finds them."""
