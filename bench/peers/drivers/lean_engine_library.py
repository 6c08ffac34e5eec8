"""lean-engine in this process. --opt: fields of EngineConfig, values in JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driver import Answer, Driver, Stamps, main
from workloads import Request


class LeanEngine(Driver):
    def load(self, args: argparse.Namespace) -> None:
        started = time.time()
        import numpy

        from lean_engine import LLM, SamplingParams, __version__

        self.import_s = time.time() - started
        self.params = SamplingParams
        options = {"threads": args.threads, "max_num_seqs": args.max_batch, "max_model_len": 2048}
        options |= {"dtype": "auto" if args.dtype == "float32" else args.dtype}
        options |= {name: json.loads(value) for name, value in args.opt.items()}
        self.engine = LLM(args.model, **options).engine
        self.versions = {"lean-engine": __version__, "numpy": numpy.__version__, **options}
        self.num_requests = 0

    def run(self, requests: Sequence[Request], max_concurrent: int) -> list[Answer]:
        groups = []
        for request in requests:
            params = self.params(temperature=0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
            groups.append(self.engine.add(str(self.num_requests), request.prompt, params))
            self.num_requests += 1
        stamps = [Stamps() for _ in groups]
        while self.engine.has_work():
            self.engine.step()
            now = time.perf_counter()
            for group, stamp in zip(groups, stamps, strict=True):
                stamp.add(group.answers[0].token_ids[len(stamp.token_ids) :], now)
        return [stamp.answer() for stamp in stamps]


if __name__ == "__main__":
    main(LeanEngine())
