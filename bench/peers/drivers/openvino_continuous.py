"""OpenVINO GenAI's continuous batching. --model is a directory that optimum-cli has exported."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driver import Answer, Driver, Stamps, main
from workloads import Request

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVino(Driver):
    def load(self, args: argparse.Namespace) -> None:
        started = time.time()
        import numpy
        import openvino
        import openvino_genai

        self.import_s = time.time() - started
        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.max_num_seqs = args.max_batch
        scheduling.max_num_batched_tokens = 512
        scheduling.cache_size = 1  # GB
        scheduling.enable_prefix_caching = True
        settings = {"INFERENCE_NUM_THREADS": args.threads, "INFERENCE_PRECISION_HINT": PRECISIONS[args.dtype]}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(args.model, scheduling, "CPU", settings)
        self.versions = {"openvino-genai": openvino_genai.__version__}
        self.num_requests = 0

    def run(self, requests: Sequence[Request], max_concurrent: int) -> list[Answer]:
        handles = []
        for request in requests:
            config = self.genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = request.max_tokens, True, False
            ids = self.openvino.Tensor(self.numpy.array([request.prompt], dtype=self.numpy.int64))
            handles.append(self.pipeline.add_request(self.num_requests, ids, config))
            self.num_requests += 1
        stamps = [Stamps() for _ in handles]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = time.perf_counter()
            for handle, stamp in zip(handles, stamps, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        stamp.add(output.generated_ids, now)
        return [stamp.answer() for stamp in stamps]


if __name__ == "__main__":
    main(OpenVino())
