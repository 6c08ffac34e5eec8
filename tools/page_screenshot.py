"""Makes assets/page.png: the page at / with the demo model at work, in headless Chromium.

    PYTHONPATH=. python tools/page_screenshot.py assets/page.png

A server is started in this process; a dozen conversations run, most of them with one long system prompt, so that the
block map shows held, shared and cached blocks. --dark, --width, --height give other looks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import KEYS, Browser

from lean_engine import LLM
from lean_engine.server.config import ServerConfig
from lean_engine.server.run import HttpServer

SYSTEM = "You are a helpful assistant. " + "Answer plainly, and with an example where one helps the reader. " * 20
QUESTIONS = ("Why is the sky blue?", "Name ten animals of the sea.", "What is a compiler?", "How do bees find flowers?")
NUM_CONVERSATIONS = 13
MAX_NUM_SEQS = 12


def converse(url: str, number: int) -> None:
    """One conversation after another, of growing length, until the server ends."""
    turn = 0
    while True:
        turn += 1
        messages = [
            {"role": "system", "content": SYSTEM if number % 4 else "Be brief."},
            {"role": "user", "content": QUESTIONS[(number + turn) % 4] + " please" * (7 * number % 60)},
        ]
        length = 40 + 23 * number % 160 + 60 * (turn > 1)
        body = {"messages": messages, "max_tokens": length, "temperature": 1, "seed": number, "ignore_eos": True}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
        try:
            urllib.request.urlopen(request, timeout=300).read()
        except OSError:
            return


def photograph(url: str, arguments: argparse.Namespace) -> None:
    browser = Browser(Path(tempfile.mkdtemp()))
    try:
        browser.resize(arguments.width, arguments.height, is_dark=arguments.dark, is_still=True)
        browser.open(url + "/")
        browser.wait(lambda: browser.text("#status") == "live", 60)
        time.sleep(arguments.seconds)
        browser.run(
            "document.getElementById('max_tokens').value = 400; document.getElementById('temperature').value = 0"
        )
        browser.type("#input", arguments.question + KEYS["Enter"])
        browser.wait(lambda: len(browser.text(".message.assistant .text")) > 130, 300)
        if arguments.view is not None:
            browser.click(f".views button[data-view={arguments.view}]")
            time.sleep(2)
        browser.screenshot(arguments.target)
    finally:
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--width", type=int, default=1360)
    parser.add_argument("--height", type=int, default=860)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--view", choices=("chat", "engine"), help="on a narrow page")
    parser.add_argument("--seconds", type=float, default=30, help="of work before the question is asked")
    parser.add_argument("--question", default="What is the capital of France, and what is it known for?")
    arguments = parser.parse_args()
    config = ServerConfig(host="127.0.0.1", port=0, disable_access_log=True, disable_log_stats=True, shutdown_timeout=0)
    http = HttpServer(lambda: LLM(num_gpu_blocks_override=600, max_num_seqs=MAX_NUM_SEQS), config)
    serving = threading.Thread(target=http.serve)
    serving.start()
    http.is_ready.wait()
    for number in range(NUM_CONVERSATIONS):
        threading.Thread(target=converse, args=(http.url, number), daemon=True).start()
    try:
        photograph(http.url, arguments)
    finally:
        http.request_exit()
        serving.join()


if __name__ == "__main__":
    main()
