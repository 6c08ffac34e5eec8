"""The periodic line of the log: how busy the engine is."""

from __future__ import annotations

import asyncio
import logging
import time

from lean_engine.server.service import Service

log = logging.getLogger("lean_engine")
INTERVAL_SECONDS = 10.0


async def log_statistics(service: Service) -> None:
    """Log a line every ten seconds while there is work, and one after it."""
    before, since, was_busy = service.metrics.totals(), time.monotonic(), False
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        stats = service.client.stats
        after, now = service.metrics.totals(), time.monotonic()
        is_busy = after != before
        if stats is not None and (is_busy or was_busy):
            seconds = now - since
            log.info(
                "prompts %.1f tokens/s, generation %.1f tokens/s, %d running, %d waiting, KV cache %.1f %% used, "
                "prefix cache hit rate %.1f %%",
                (after.prompt_tokens - before.prompt_tokens) / seconds,
                (after.generation_tokens - before.generation_tokens) / seconds,
                stats.num_running,
                stats.num_waiting,
                100 * stats.usage,
                100 * stats.prefix_hit_ratio,
            )
        before, since, was_busy = after, now, is_busy
