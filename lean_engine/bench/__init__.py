"""Measuring: traces of requests and what the engine makes of them."""
