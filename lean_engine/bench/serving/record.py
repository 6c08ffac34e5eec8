"""What is known of one request: when it was due, sent and answered, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["waiting", "completed", "error", "refused", "cut", "unfinished"]
# waiting: not sent yet, or under way · refused: HTTP 429 · cut: the stream ended before the answer did ·
# unfinished: the run was interrupted first. Only completed requests enter any average.


@dataclass(slots=True)
class Record:
    """One request. Times are seconds since the run began."""

    index: int
    max_tokens: int
    prompt_len: int | None  # tokens, where the data set knows
    scheduled_at: float  # when it ought to be sent
    due_at: float = 0.0  # … and the concurrency cap let it
    sent_at: float = 0.0  # when the client began to send it (to connect, where no connection was idle)
    delta_times: list[float] = field(default_factory=list)  # arrivals of events with text
    ended_at: float | None = None  # arrival of the last delta or of its finish_reason; of failures, when they were seen
    outcome: Outcome = "waiting"
    error: str = ""
    status: int = 0  # of HTTP
    finish_reason: str | None = None
    text: str = ""
    usage_prompt_tokens: int | None = None
    usage_completion_tokens: int | None = None
    cached_tokens: int | None = None
    num_output_tokens: int = 0  # from usage; else counted by the tokenizer, or by deltas

    @property
    def is_completed(self) -> bool:
        return self.outcome == "completed"

    @property
    def num_input_tokens(self) -> int:
        """What the server counted, else what the data set says."""
        counted = self.usage_prompt_tokens
        return counted if counted is not None else self.prompt_len or 0

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first delta."""
        return self.delta_times[0] - self.sent_at

    @property
    def latency(self) -> float:
        """Seconds from sending to the end."""
        return (self.ended_at or 0.0) - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None for an answer of one."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.num_output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between neighbouring deltas."""
        return [b - a for a, b in zip(self.delta_times, self.delta_times[1:], strict=False)]
