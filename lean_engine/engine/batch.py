"""StepPlan → the int32 arrays a program reads.

Tokens stand in the order of the plan: a token per decode, then chunk after chunk; row b of block_tables belongs to the
b-th of them. A block table's row is rewritten only where it changed since the last step. Entries past a request's last
block are stale and never read: attention stops at seq_lens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lean_engine.runtime.device import Array
from lean_engine.scheduling.plan import ScheduledChunk, StepPlan


@dataclass(frozen=True, slots=True)
class StepSize:
    num_tokens: int  # T
    num_requests: int  # B
    num_rows: int  # R: rows whose logits are computed
    num_blocks: int = 0  # of the longest block table


class Batch:
    """Fills a program's input arrays.

    Args:
        inputs: name → int32 array of the largest size; see Program.inputs.
    """

    def __init__(self, inputs: Mapping[str, Array], block_size: int) -> None:
        self.block_size = block_size
        self.input_ids = inputs["input_ids"]  # [T]
        self.positions = inputs["positions"]  # [T]
        self.slot_mapping = inputs["slot_mapping"]  # [T] block · S + offset
        self.block_tables = inputs["block_tables"]  # [B, M]
        self.cu_seqlens_q = inputs["cu_seqlens_q"]  # [B + 1]
        self.seq_lens = inputs["seq_lens"]  # [B]
        self.sample_rows = inputs["sample_rows"]  # [R] into the T tokens
        self.cu_seqlens_q[0] = 0
        self._written: list[tuple[list[int], int]] = [([], 0)] * len(self.block_tables)  # (table, blocks) of each row

    def fill(self, plan: StepPlan) -> StepSize:
        """Write one step, before the next is planned.

        The token of a decode may be one that a step in flight is sampling; the one before it stands in for it.
        """
        block_size = self.block_size
        token_ids = [request.token_ids[-1] for request in plan.decodes]
        positions = [request.num_computed_tokens - 1 for request in plan.decodes]
        slots = [
            request.block_table[position // block_size] * block_size + position % block_size
            for request, position in zip(plan.decodes, positions, strict=True)
        ]
        lengths = [position + 1 for position in positions]
        starts = list(range(len(token_ids) + 1))
        rows = list(range(len(token_ids)))
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            token_ids += chunk.request.token_ids[chunk.start : end]
            positions += range(chunk.start, end)
            slots += self._slots(chunk)
            rows += range(len(token_ids) - chunk.num_logit_rows, len(token_ids))
            starts.append(len(token_ids))
            lengths.append(end)
        tables = [request.block_table for request in plan.decodes]
        tables += [chunk.request.block_table for chunk in plan.chunks]
        for b, table in enumerate(tables):
            self._write_block_table(b, table)
        size = StepSize(len(token_ids), len(lengths), len(rows), max(map(len, tables)))
        self.input_ids[: size.num_tokens] = token_ids
        self.positions[: size.num_tokens] = positions
        self.slot_mapping[: size.num_tokens] = slots
        self.sample_rows[: size.num_rows] = rows
        self.cu_seqlens_q[: size.num_requests + 1] = starts
        self.seq_lens[: size.num_requests] = lengths
        return size

    def pad(self, size: StepSize, padded: StepSize) -> None:
        """Fill up to a larger step: tokens that are written nowhere, requests of length 0, any row for logits."""
        self.input_ids[size.num_tokens : padded.num_tokens] = 0
        self.positions[size.num_tokens : padded.num_tokens] = 0
        self.slot_mapping[size.num_tokens : padded.num_tokens] = -1
        self.sample_rows[size.num_rows : padded.num_rows] = 0
        self.cu_seqlens_q[size.num_requests + 1 : padded.num_requests + 1] = size.num_tokens
        self.seq_lens[size.num_requests : padded.num_requests] = 0

    def _slots(self, chunk: ScheduledChunk) -> list[int]:
        places = np.arange(chunk.start, chunk.start + chunk.num_tokens)
        blocks = np.array(chunk.request.block_table)[places // self.block_size]
        slots: list[int] = (blocks * self.block_size + places % self.block_size).tolist()
        return slots

    def _write_block_table(self, b: int, table: list[int]) -> None:
        """A request's table is one list that only grows while it runs, so identity and length tell what is new."""
        written, num_written = self._written[b]
        start = num_written if written is table else 0
        if start < len(table):
            self.block_tables[b, start : len(table)] = table[start:]
            self._written[b] = (table, len(table))
