"""vLLM's engine in this process (its CPU build on a machine without a GPU)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driver import Answer, Driver, Stamps, main
from workloads import Request


class Vllm(Driver):
    def load(self, args: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        started = time.time()
        import vllm

        self.import_s = time.time() - started
        self.params = vllm.SamplingParams
        options = vllm.EngineArgs(
            model=args.model, dtype=args.dtype, max_num_seqs=args.max_batch, max_model_len=2048, disable_log_stats=True
        )
        self.engine = vllm.LLMEngine.from_engine_args(options)
        self.versions = {"vllm": vllm.__version__}
        self.num_requests = 0

    def run(self, requests: Sequence[Request], max_concurrent: int) -> list[Answer]:
        stamps: dict[str, Stamps] = {}
        for request in requests:
            name = str(self.num_requests)
            self.num_requests += 1
            stamps[name] = Stamps()
            params = self.params(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
            self.engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                stamp = stamps[output.request_id]
                stamp.add(output.outputs[0].token_ids[len(stamp.token_ids) :], now)
        return [stamp.answer() for stamp in stamps.values()]


if __name__ == "__main__":
    main(Vllm())
