"""What HTTP costs: 64 streamed completions against the same requests offline, and how soon the server is ready.

    python bench/server_overhead.py [--model MODEL] [--rounds 5] [--variant thread --variant process]

One offline engine and one server take turns, so both meet the same machine; while one is measured the other waits
without work. Requests are prompts of 32 random tokens, new in each round, answered by --tokens. Rates are output
tokens per second from the first submission to the last token; the client runs on the same CPUs and is part of what HTTP
costs. CPU times are of the processes, and say more than the rates on a machine with other work. Ready is the time from
the start of a process until it can answer.

The variant "process" has the engine in a process of its own, behind pipes (bench/engine_process.py), to compare with
the thread that the server uses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NUM_STREAMS, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 64
OFFLINE = """
import json, sys, time
from lean_engine import LLM, SamplingParams
llm = LLM(json.loads(sys.argv[1]), **json.loads(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    prompts, count = json.loads(line)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    seconds = time.perf_counter() - started
    print(json.dumps([seconds, [o.outputs[0].text for o in outputs]]), flush=True)
"""
SERVER = "from lean_engine.cli import main; main()"
VARIANTS = {"thread": SERVER, "process": "import engine_process; engine_process.use(); " + SERVER}


class Child:
    """A process that says in a line of stdout that it is ready. Attributes: ready_s, line."""

    def __init__(self, code: str, *arguments: str) -> None:
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parent,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.ready_s = time.perf_counter() - started
        if not self.line:
            raise SystemExit(f"{arguments} did not start")

    def ask(self, question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def cpu_s(self) -> float:
        """CPU seconds so far, of the process and its children."""
        pid = self.process.pid
        children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        ticks = 0
        for number in (str(pid), *(child for some in children for child in some)):
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(200, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_STREAMS)]


async def stream(host: str, port: int, prompt: list[int], num_tokens: int) -> tuple[str, int]:
    """One completion as events; its text and how many events it came in."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events), len(events)


async def all_streams(url: str, asked: list[list[int]], num_tokens: int) -> tuple[float, list[str], float]:
    """Seconds, texts, events per answer."""
    host, port = url.removeprefix("http://").split(":")
    started = time.perf_counter()
    found = await asyncio.gather(*(stream(host, int(port), prompt, num_tokens) for prompt in asked))
    seconds = time.perf_counter() - started
    return seconds, [text for text, _ in found], statistics.mean(count for _, count in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for LLM; default: the demo model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="of each answer")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="may be repeated; default: thread")
    parser.add_argument("--engine", default="{}", help="options of the engine, as JSON")
    args = parser.parse_args()
    engine = {"max_model_len": 1024, **json.loads(args.engine)}
    flags = [word for name, value in engine.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    serve = ["serve", *([args.model] if args.model else []), "--host", "127.0.0.1", "--port", "0", *flags]
    serve += ["--disable-access-log"]
    commands = {"offline": (OFFLINE, json.dumps(args.model), json.dumps(engine))}
    commands |= {name: (VARIANTS[name], *serve) for name in args.variant or ["thread"]}
    starts: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.starts):
        for name, command in commands.items():
            made = Child(*command)
            starts[name].append(made.ready_s)
            made.end()
    children = {name: Child(*command) for name, command in commands.items()}
    rounds = [measure(children, prompts(number), args.tokens) for number in range(args.rounds + 1)][1:]  # one warms up
    for child in children.values():
        child.end()
    print(f"{NUM_STREAMS} streams of {args.tokens} tokens, {args.rounds} rounds; medians (min–max)")
    for name in commands:
        print(f"{name}: ready after {statistics.median(starts[name]):.2f} s, the median of {args.starts}")
        for figure in rounds[0][name]:
            values = [one[name][figure] for one in rounds]
            print(f"    {figure:<18} {statistics.median(values):8.2f} ({min(values):.2f}–{max(values):.2f})")


def measure(children: dict[str, Child], asked: list[list[int]], num_tokens: int) -> dict[str, dict[str, float]]:
    """One round: the figures of each child."""
    total = NUM_STREAMS * num_tokens
    found: dict[str, dict[str, float]] = {}
    expected: list[str] = []
    offline_s = 0.0
    for name, child in children.items():
        cpu_s, client_s = child.cpu_s(), time.process_time()
        if name == "offline":
            seconds, expected = child.ask([asked, num_tokens])
            offline_s = seconds
            found[name] = {"tok/s": total / seconds, "CPU ms/tok": 1000 * (child.cpu_s() - cpu_s) / total}
            continue
        seconds, texts, num_events = asyncio.run(all_streams(child.line.split()[-1], asked, num_tokens))
        found[name] = {
            "tok/s": total / seconds,
            "of offline": offline_s / seconds,
            "CPU ms/tok": 1000 * (child.cpu_s() - cpu_s) / total,
            "client CPU ms/tok": 1000 * (time.process_time() - client_s) / total,
            "events per answer": num_events,
            "texts that agree": sum(a == b for a, b in zip(expected, texts, strict=True)),
        }
    return found


if __name__ == "__main__":
    main()
