"""/tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lean_engine.errors import RequestError
from lean_engine.server.model import LoadedModel
from lean_engine.server.protocol import DetokenizeRequest, TokenizeRequest, adds_generation_prompt
from lean_engine.server.responses import Text, Tokens
from lean_engine.server.service import Service, json_response


async def tokenize(service: Service, http: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    model = service.open_model()
    body = await service.read(http, TokenizeRequest)
    model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    ids, texts = await service.in_thread(encode, model, body)
    return json_response(Tokens(count=len(ids), max_model_len=model.max_model_len, tokens=ids, token_strs=texts))


def encode(model: LoadedModel, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    if body.messages is None:
        ids = model.encode(body.prompt or "", body.add_special_tokens is not False)
    else:
        text = model.render(
            body.messages,
            chat_template=body.chat_template,
            template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=adds_generation_prompt(body),
            continue_final_message=body.continue_final_message,
            tools=body.tools,
        )
        ids = model.encode(text, body.add_special_tokens is True, param="messages")
    return ids, [model.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None


async def detokenize(service: Service, http: Request) -> Response:
    """The text of token ids."""
    model = service.open_model()
    body = await service.read(http, DetokenizeRequest)
    model.check_name(body.model)
    text = await service.in_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(Text(text))
