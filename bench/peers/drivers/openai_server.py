"""Any OpenAI-compatible server, over HTTP on this machine, by the client of `lean-engine bench serve`.

--opt command="SERVER … {model} {port} {threads} {max_batch}"; run it with the Python that has lean-engine.
The server is a child of this process, so it is stopped and continued with it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driver import Answer, Driver, main, process_tree
from workloads import Request

from lean_engine.bench.serving.benchmark import LoadOptions
from lean_engine.bench.serving.datasets import Conversation, ServeTurn
from lean_engine.bench.serving.load import Load, LoadResult, Scheduled
from lean_engine.bench.serving.target import Target, first_model, make_target


class OpenAiServer(Driver):
    def load(self, args: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        values = {"model": args.model, "port": port, "threads": args.threads, "max_batch": args.max_batch}
        words = [word.format(**values) for word in shlex.split(args.opt["command"])]
        self.server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        self.base_url = f"http://127.0.0.1:{port}"
        while not self.is_healthy():
            if self.server.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {self.server.returncode}")
            time.sleep(0.02)
        name, _ = asyncio.run(first_model(self.base_url, {}))
        self.target: Target = make_target(
            "openai", self.base_url, None, name, ignore_eos=True, extra_body={"temperature": 0.0}
        )
        self.versions = {"command": os.path.basename(words[0]), "arguments": words[1:]}

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def run(self, requests: Sequence[Request], max_concurrent: int) -> list[Answer]:
        schedule = [Scheduled(0.0, Conversation((ServeTurn(r.prompt, len(r.prompt), r.max_tokens),))) for r in requests]

        async def send() -> LoadResult:
            return await Load(self.target, schedule, lambda prompt, answer, new: new, None, LoadOptions().timeout).run()

        started = time.perf_counter()
        result = asyncio.run(send())
        for record in result.records:
            if not record.is_completed:
                raise RuntimeError(f"request {record.index}: {record.error}")
        return [
            Answer(started + r.delta_times[0], started + (r.ended_at or 0.0), r.num_output_tokens, r.text)
            for r in result.records
        ]

    def process_ids(self) -> list[int]:
        return process_tree(self.server.pid)

    def close(self) -> None:
        if hasattr(self, "server"):
            self.server.kill()
            self.server.wait()


if __name__ == "__main__":
    main(OpenAiServer())
