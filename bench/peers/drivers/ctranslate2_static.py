"""CTranslate2: static batches; a callback tells of each token. --model is a directory of its converter."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driver import Answer, Driver, batches, main
from workloads import Request


class CTranslate2(Driver):
    def load(self, args: argparse.Namespace) -> None:
        started = time.time()
        import ctranslate2

        self.import_s = time.time() - started
        self.generator = ctranslate2.Generator(
            args.model, device="cpu", compute_type=args.dtype, inter_threads=1, intra_threads=args.threads
        )
        self.vocabulary = json.loads((Path(args.model) / "vocabulary.json").read_text())
        self.versions = {"ctranslate2": ctranslate2.__version__}

    def run(self, requests: Sequence[Request], max_concurrent: int) -> list[Answer]:
        return [answer for batch in batches(requests, max_concurrent) for answer in self.one_batch(batch)]

    def one_batch(self, batch: Sequence[Request]) -> list[Answer]:
        prompts = [[self.vocabulary[i] for i in r.prompt] for r in batch]
        steps = max(r.max_tokens for r in batch)
        times: list[list[float]] = [[] for _ in batch]

        def note(result: Any) -> bool:
            times[result.batch_id].append(time.perf_counter())
            return False  # go on

        results = self.generator.generate_batch(
            prompts,
            max_batch_size=0,
            beam_size=1,
            sampling_topk=1,
            max_length=steps,
            min_length=steps,
            end_token=[],
            include_prompt_in_result=False,
            callback=note,
        )
        return [
            Answer(t[0], t[r.max_tokens - 1], r.max_tokens, result.sequences_ids[0][: r.max_tokens])
            for t, r, result in zip(times, batch, results, strict=True)
        ]


if __name__ == "__main__":
    main(CTranslate2())
