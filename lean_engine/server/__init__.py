"""The HTTP server: OpenAI's API over the engine.

A request: `connection` (uvicorn's protocol with limits) → `gate` (request id, key, access log) → `app` (routes) →
`completions`, `chat`, `tokens` (one file per endpoint, bodies from `protocol`) → `engine_client` → the engine's thread,
whose reports come back through `engine_client` into the request's `Exchange`, and from there to `sse` or one body.
"""
