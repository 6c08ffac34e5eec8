"""How many requests per second the client of `lean-engine bench serve` can drive, against a server that does nothing.

    python bench/client_limit.py [--rates 500,1000,2000] [--seconds 5] [--tokens 8]

The server is a process of its own that answers every request at once with a canned stream of --tokens events, one
write each; client and server are held to one CPU each where the system can do that. A rate is kept when all requests
succeed and the client does not warn of itself. TTFT is the client's: what it adds to a server's latency.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from multiprocessing.connection import Connection

from lean_engine.bench.environment import append_result
from lean_engine.bench.serving.benchmark import LoadOptions, measure
from lean_engine.bench.serving.datasets import Conversation, ServeTurn
from lean_engine.bench.serving.report import ServeReport
from lean_engine.bench.serving.target import make_target

PROMPT = list(range(128))


class CannedServer(asyncio.Protocol):
    """Answers each request, recognised by the end of its body, with the same bytes."""

    pieces: tuple[bytes, ...] = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.received.endswith(b"\r\n\r\n"):  # a GET of /metrics
            self.received = b""
            self.transport.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")  # type: ignore[attr-defined]
        elif self.received.endswith(b"}"):
            self.received = b""
            for piece in self.pieces:
                self.transport.write(piece)  # type: ignore[attr-defined]


def canned(num_tokens: int) -> tuple[bytes, ...]:
    def chunk(text: str) -> bytes:
        return b"%x\r\n%s\r\n" % (len(text), text.encode())

    def event(finish: str | None) -> bytes:
        return chunk(f"data: {json.dumps({'choices': [{'index': 0, 'text': ' sea', 'finish_reason': finish}]})}\n\n")

    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": num_tokens}
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    tail = chunk(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n") + chunk("data: [DONE]\n\n") + b"0\r\n\r\n"
    return (head + event(None), *[event(None)] * (num_tokens - 2), event("length") + tail)


def serve(cpu: int | None, num_tokens: int, port: Connection) -> None:
    async def run() -> None:
        CannedServer.pieces = canned(num_tokens)
        server = await asyncio.get_running_loop().create_server(CannedServer, "127.0.0.1", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    pin(cpu)
    asyncio.run(run())


def pin(cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})


def drive(base_url: str, rate: float, seconds: float, num_tokens: int) -> ServeReport:
    target = make_target("openai", base_url, None, "none")
    conversations = [Conversation((ServeTurn(PROMPT, len(PROMPT), num_tokens),))] * int(rate * seconds)
    options = LoadOptions(request_rate=rate, num_warmups=100, percents=(50, 99))
    report, _ = asyncio.run(measure(target, conversations, options, lambda prompt, answer, new: new))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="250,500,1000,1500,2000")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--result-dir", help="append the figures to client_limit.jsonl in it")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    is_pinned = len(cpus) > 1
    receive, send = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.Process(
        target=serve, args=(cpus[1] if is_pinned else None, args.tokens, send), daemon=True
    )
    server.start()
    base_url = f"http://127.0.0.1:{receive.recv()}"
    pin(cpus[0] if is_pinned else None)
    print(
        "| rate asked (req/s) | done (req/s) | failed | CPU of the client | TTFT p50 / p99 (ms) | sent late p99 (ms) |"
    )
    print("|--:|--:|--:|--:|--:|--:|")
    for rate in map(float, args.rates.split(",")):
        report = drive(base_url, rate, args.seconds, args.tokens)
        latencies, client = report.latencies(), report.client
        print(
            f"| {rate:g} | {report.totals()['request_throughput']:.0f} | {report.num_failed} "
            f"| {100 * client.cpu_share:.0f} % | {latencies['p50_ttft_ms']:.2f} / {latencies['p99_ttft_ms']:.2f} "
            f"| {client.late_send_p99_ms:.2f}{' (the client warns)' if client.is_bottleneck else ''} |"
        )
        if args.result_dir:
            figures = {"rate": rate, "tokens": args.tokens, **report.totals(), **latencies, **report.counts()}
            append_result(args.result_dir, "client_limit", figures)


if __name__ == "__main__":
    main()
