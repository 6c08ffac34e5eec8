"""Log-probabilities in the forms of chat and of completions.

JSON has no infinities: what the model excludes has FLOOR, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lean_engine.sampling.logprobs import TokenLogprobs
from lean_engine.server.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from lean_engine.text.tokenizer import Tokenizer

FLOOR = -9999.0
Entry = tuple[int, float, int]  # token id, log-probability, rank


class LogprobWriter:
    """Writes log-probabilities of one request.

    Args:
        tokenizer: None, or as_ids true: tokens are written as "token_id:123".
    """

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self._bytes_of = tokenizer

    def text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def _bytes(self, token_id: int) -> list[int] | None:
        return None if self._bytes_of is None else list(self._bytes_of.token_bytes(token_id))

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        content = []
        for entry in entries:
            (chosen, logprob, _), *top = entries_of(entry)
            tops = [TopLogprob(self.text(i), p, self._bytes(i)) for i, p, _ in top]
            content.append(ChatLogprob(self.text(chosen), logprob, self._bytes(chosen), tops))
        return ChatLogprobs(content)

    def completion(
        self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int
    ) -> CompletionLogprobs:
        """One entry per id; None where there is none, as for the first token of a prompt.

        Args:
            offset: characters before the first of them.
        """
        written = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(ids, entries, strict=True):
            token = self.text(token_id)
            written.text_offset.append(offset)
            written.tokens.append(token)
            offset += len(token)
            if entry is None:
                written.token_logprobs.append(None)
                written.top_logprobs.append(None)
                continue
            all_of = list(entries_of(entry))
            written.token_logprobs.append(all_of[0][1])
            top: dict[str, float] = {}
            for i, p, _ in all_of:
                top.setdefault(self.text(i), p)  # parts of characters look alike: the chosen one, then the likeliest
            written.top_logprobs.append(top)
        return written

    def prompt(self, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
        """vLLM's prompt_logprobs: null for the first token, then token id → its entry."""
        form: PromptLogprobs = [None]
        for entry in entries:
            form.append({str(i): PromptLogprob(p, rank, self.text(i)) for i, p, rank in entries_of(entry)})
        return form


def end_of(written: CompletionLogprobs, offset: int) -> int:
    """Characters before the token after these. offset: of the first of them."""
    return written.text_offset[-1] + len(written.tokens[-1]) if written.tokens else offset


def entries_of(entry: TokenLogprobs) -> Iterator[Entry]:
    """The chosen token, then the likeliest in order."""
    logprobs = (max(logprob, FLOOR) for logprob in entry.logprobs.tolist())
    return zip(entry.ids.tolist(), logprobs, entry.ranks.tolist(), strict=True)
