"""transformers with torch: static batches through generate, which is what most scripts do. --opt attn=sdpa."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driver import Answer, Driver, batches, main, of_batch
from workloads import Request


class Transformers(Driver):
    def load(self, args: argparse.Namespace) -> None:
        started = time.time()
        import torch
        import transformers

        self.import_s = time.time() - started
        self.torch = torch
        torch.set_num_threads(args.threads)
        torch.set_num_interop_threads(1)
        attention = args.opt.get("attn", "sdpa")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype), attn_implementation=attention
        ).eval()
        settings = self.model.generation_config
        settings.eos_token_id, settings.pad_token_id, settings.do_sample = None, 0, False
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__, "attn": attention}

    def run(self, requests: Sequence[Request], max_concurrent: int) -> list[Answer]:
        return [answer for batch in batches(requests, max_concurrent) for answer in self.one_batch(batch)]

    def one_batch(self, batch: Sequence[Request]) -> list[Answer]:
        times: list[float] = []

        def note(input_ids: Any, scores: Any, **_: Any) -> Any:  # called after each step; ends nothing
            times.append(time.perf_counter())
            return self.torch.zeros(input_ids.shape[0], dtype=self.torch.bool)

        width = max(len(r.prompt) for r in batch)
        ids = self.torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in batch])
        mask = self.torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
        with self.torch.inference_mode():
            rows = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(r.max_tokens for r in batch),
                stopping_criteria=[note],
            )
        return of_batch(times, batch, rows[:, width:].tolist())


if __name__ == "__main__":
    main(Transformers())
