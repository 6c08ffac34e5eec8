"""Load on an OpenAI-compatible server over HTTP, and what became of each request.

http, sse      bytes → body → events: incremental parsers that touch no socket
connection     sockets on asyncio; stamps bytes when they arrive, before anything is parsed
answer         events → the Record of one request
target         where the server is, what is sent to it
prompts, datasets, arrivals    what is asked, and when
load           the run
report         Records → the figures, in vLLM's names
"""
