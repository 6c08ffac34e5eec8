"""The CUDA device's home. Its kernels' sources lie in cuda/ at the top of the repository.

sources finds them and nvrtc compiles them, through cubin_cache; instances says which kernels a launch of the kernel
table is; emulator runs those on the CPU.
"""
