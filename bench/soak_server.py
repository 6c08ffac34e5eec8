"""Two minutes of 200 clients who come, read and vanish: does the server keep anything, and is every answer right?

    python bench/soak_server.py [--model MODEL] [--seconds 120] [--clients 200]

Clients ask for completions, streamed or not, and hang up in the middle of some. Answers that are read to their end are
compared with the library's. At the start, in between and at the end, when all is idle, the server's blocks, tasks,
files and memory are looked at. The exit code is 1 if an answer was wrong, a request failed, or something was kept.
Memory may grow while the server warms up: it is compared with that after the first phase.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lean_engine import LLM, SamplingParams
from lean_engine.server.config import ServerConfig
from lean_engine.server.run import HttpServer

TINY = Path(__file__).resolve().parents[1] / "tests" / "data" / "tiny" / "llama-gqa-tied"
ENGINE: dict[str, Any] = {"threads": 1, "num_gpu_blocks_override": 700, "max_num_seqs": 64, "cpu_kernels": "numpy"}
NUM_QUESTIONS, PHASES = 100, 4
SLACK_BYTES = 8 * 2**20  # of memory between the look after the first phase and the last


def questions() -> list[dict[str, Any]]:
    """Bodies of completions, greedy ones and seeded ones, with and without log-probabilities."""
    rng = random.Random(0)
    return [
        {
            "prompt": [rng.randrange(200, 500) for _ in range(rng.randint(3, 120))],
            "max_tokens": rng.randint(4, 60),
            "temperature": rng.choice([0, 0, 1]),
            "seed": rng.randrange(1000),
            "ignore_eos": True,
            "logprobs": rng.choice([None, None, 3]),
        }
        for _ in range(NUM_QUESTIONS)
    ]


def offline_answers(model: str, asked: list[dict[str, Any]]) -> list[str]:
    with LLM(model, **ENGINE) as llm:
        params = [SamplingParams(**{k: v for k, v in body.items() if k != "prompt"}) for body in asked]
        outputs = llm.generate([{"prompt_token_ids": body["prompt"]} for body in asked], params)
    return [output.outputs[0].text for output in outputs]


class Clients:
    """Many clients in one process. Counts: whole, wrong, left, failed."""

    def __init__(self, url: str, expected: list[str], seed: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.asked = questions()
        self.expected = expected
        self.rng = random.Random(seed)
        self.counts = dict.fromkeys(("whole", "wrong", "left", "failed"), 0)

    async def run(self, count: int, seconds: float) -> dict[str, int]:
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self._client(deadline) for _ in range(count)))
        return self.counts

    async def _client(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            await asyncio.sleep(self.rng.random() * 0.2)
            number = self.rng.randrange(NUM_QUESTIONS)
            body = {**self.asked[number], "stream": self.rng.random() < 0.8}
            try:
                text = await self._ask(body, leaves=self.rng.random() < 0.4)
            except (OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
                self.counts["failed"] += 1
                print(f"failed: {error!r}", file=sys.stderr)
                continue
            if text is None:
                self.counts["left"] += 1
            else:
                self.counts["whole"] += 1
                self.counts["wrong"] += text != self.expected[number]

    async def _ask(self, body: dict[str, Any], leaves: bool) -> str | None:
        """The text of an answer, None if the client left before its end."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            data = json.dumps(body).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            writer.write(head.encode() + data)
            if leaves:
                await asyncio.sleep(self.rng.random() * 0.5)
                if self.rng.random() < 0.5:
                    await reader.read(100)
                return None
            answer = await reader.read()
        finally:
            writer.close()
        status = answer.split(b" ", 2)[1]
        if status != b"200":
            raise ValueError(answer[:300])
        if not body["stream"]:
            text: str = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
            return text
        events = [line[6:].strip() for line in answer.split(b"\n") if line.startswith(b"data: ")]
        if events[-1] != b"[DONE]":
            raise ValueError(f"the stream ended with {events[-1]!r}")
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def run_clients(url: str, expected: list[str], seed: int, count: int, seconds: float, results: Any) -> None:
    results.put(asyncio.run(Clients(url, expected, seed).run(count, seconds)))


def look(http: HttpServer) -> dict[str, int]:
    """What the idle server holds."""
    client, model = http.service.client, http.service.model
    assert model is not None
    pool = model.llm.engine.scheduler.pool
    deadline = time.monotonic() + 30
    while client.num_open or model.llm.engine.has_work() or http.num_connections or pool.num_free < pool.num_usable:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    gc.collect()
    statm = Path("/proc/self/statm").read_text().split()
    return {
        "open answers": client.num_open,
        "held blocks": pool.num_usable - pool.num_free,
        "connections": http.num_connections,
        "tasks": http.num_tasks(),
        "files": len(os.listdir("/proc/self/fd")),
        "memory": int(statm[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=200)
    args = parser.parse_args()
    expected = offline_answers(args.model, questions())
    config = ServerConfig(host="127.0.0.1", port=0, disable_access_log=True)
    http = HttpServer(lambda: LLM(args.model, **ENGINE), config)
    thread = threading.Thread(target=http.serve)
    thread.start()
    http.is_ready.wait()
    looks, totals = [], dict.fromkeys(("whole", "wrong", "left", "failed"), 0)
    for phase in range(PHASES + 1):  # the first one warms up
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        seconds = 5.0 if phase == 0 else args.seconds / PHASES
        arguments = (http.url, expected, phase, args.clients, seconds, results)
        clients = context.Process(target=run_clients, args=arguments)
        clients.start()
        counts = results.get()
        clients.join()
        looks.append(look(http))
        totals = {name: totals[name] + counts[name] for name in totals}
        print(f"phase {phase}: {counts}; idle: {looks[-1]}", flush=True)
    http.request_exit()
    thread.join()
    first, last = looks[0], looks[-1]
    kept = [name for name in first if name != "memory" and last[name] > first[name]]
    kept += [name for name in ("open answers", "held blocks", "connections") if last[name]]
    if last["memory"] > looks[1]["memory"] + SLACK_BYTES:
        kept.append("memory")
    print(f"answers: {totals}; kept: {', '.join(dict.fromkeys(kept)) or 'nothing'}")
    sys.exit(1 if kept or totals["wrong"] or totals["failed"] else 0)


if __name__ == "__main__":
    main()
