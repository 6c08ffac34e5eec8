"""One prepared script for the rare times that a GPU is at hand: what is right, how fast it is, beside what.

    python tools/gpu_check --out DIR [--emulated] [--time-limit 540] [--only PART,...]

Runs in a source checkout with nothing but NumPy, ml_dtypes and, for a GPU, CuPy, NVRTC and cuBLASLt; torch and
transformers are used by the comparisons where they are installed. Every part is a process of its own, so that a kernel
that hangs or faults costs its part only. DIR gets rows.jsonl (every row when it is measured), results.jsonl (a line per
part, its rows included, when it ends) and summary.txt.
"""
