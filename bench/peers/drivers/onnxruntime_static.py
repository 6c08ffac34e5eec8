"""ONNX Runtime GenAI: static batches, padded on the right, which is all that its attention understands. --model is a
directory of its model builder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driver import Answer, Driver, batches, main, of_batch
from workloads import Request

PADDING_ID = 2


class OnnxRuntime(Driver):
    def load(self, args: argparse.Namespace) -> None:
        started = time.time()
        import numpy
        import onnxruntime_genai

        self.import_s = time.time() - started
        self.numpy, self.genai = numpy, onnxruntime_genai
        config = onnxruntime_genai.Config(args.model)
        session = {"session_options": {"intra_op_num_threads": args.threads}}
        config.overlay(json.dumps({"model": {"decoder": session}}))
        self.model = onnxruntime_genai.Model(config)
        self.versions = {"onnxruntime-genai": onnxruntime_genai.__version__}

    def run(self, requests: Sequence[Request], max_concurrent: int) -> list[Answer]:
        return [answer for batch in batches(requests, max_concurrent) for answer in self.one_batch(batch)]

    def one_batch(self, batch: Sequence[Request]) -> list[Answer]:
        width, steps = max(len(r.prompt) for r in batch), max(r.max_tokens for r in batch)
        rows = [r.prompt + [PADDING_ID] * (width - len(r.prompt)) for r in batch]
        length = width + steps
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(batch_size=len(batch), max_length=length, min_length=length, do_sample=False)
        generator = self.genai.Generator(self.model, params)
        generator.append_tokens(self.numpy.array(rows, dtype=self.numpy.int32))
        times = []
        for _ in range(steps):
            generator.generate_next_token()
            generator.get_next_tokens()
            times.append(time.perf_counter())
        said = [generator.get_sequence(i)[width:] for i in range(len(batch))]
        return of_batch(times, batch, said)


if __name__ == "__main__":
    main(OnnxRuntime())
