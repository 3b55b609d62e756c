"""``/tokenize`` and ``/detokenize``: exactly the ids that a generating request would have."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from metainfer.core.errors import RequestError
from metainfer.server.dialogue import conversation_of, size_of
from metainfer.server.prepare import check_model, off_loop
from metainfer.server.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest
from metainfer.server.state import ServerState


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def tokenize(state: ServerState, body: TokenizeRequest) -> Response:
    """Ids of a text, or of the prompt that a chat request with these messages would have."""
    info, text = state.serving()
    if body.model is not None:
        check_model(state.config, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(
            "Either prompt or messages is needed, not both.", "Send one.", param="prompt"
        )
    if body.prompt is not None:
        prompt, special = body.prompt, body.add_special_tokens is not False
        ids = await off_loop(len(prompt), lambda: text.tokenizer.encode(prompt, special))
    else:
        chat = ChatRequest(
            model=body.model or "",
            messages=body.messages or [],
            tools=body.tools,
            reasoning_effort=body.reasoning_effort,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        conversation = conversation_of(text, chat)
        ids = await off_loop(size_of(chat), lambda: text.format.encode(conversation).ids)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": info.max_context,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = list(map(text.tokenizer.token_text, ids))
    return _json(answer)


async def detokenize(state: ServerState, body: DetokenizeRequest) -> Response:
    """The text of ids, special tokens spelled out."""
    info, text = state.serving()
    if body.model is not None:
        check_model(state.config, body.model)
    worst = max(body.tokens, default=0)
    if worst >= info.vocab_size:
        raise RequestError(
            f"Token id {worst} is out of range; the vocabulary has {info.vocab_size} tokens.",
            param="tokens",
        )
    ids = body.tokens
    decode = text.tokenizer.decode
    return _json({"prompt": await off_loop(len(ids), lambda: decode(ids, skip_special=False))})
