"""POST /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import Any

import flask

from jaxserve.errors import RequestError
from server.body import read_json
from server.described import Description, described
from server.openai.messages import read_messages
from server.openai.schema import DetokenizeBody, TokenizeBody
from server.services import Services


def tokenize_blueprint(services: Services) -> flask.Blueprint:
    """Both routes."""
    blueprint = flask.Blueprint("tokenize", __name__)

    @blueprint.post("/tokenize")
    @described(Description(body=TokenizeBody))
    def tokenize() -> dict[str, Any]:
        """The token ids of a text or a chat."""
        body = read_json(TokenizeBody, services.config.max_body_bytes)
        services.check_model(body.model)
        ids = _ids(services, body)
        infos = [engine.info for engine in services.engines if engine.info is not None]
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": infos[0].max_model_len if infos else None,
            "tokens": ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = [services.tokenizer.token_text(token) for token in ids]
        return answer

    @blueprint.post("/detokenize")
    @described(Description(body=DetokenizeBody))
    def detokenize() -> dict[str, Any]:
        """The text of token ids."""
        body = read_json(DetokenizeBody, services.config.max_body_bytes)
        services.check_model(body.model)
        size = services.tokenizer.vocab_size
        for token in body.tokens:
            if not 0 <= token < size:
                raise RequestError(
                    f"tokens holds {token}; this model's ids are 0 to {size - 1}", param="tokens"
                )
        return {"prompt": services.tokenizer.decode(body.tokens, skip_special=False)}

    return blueprint


def _ids(services: Services, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is None:
        chat_only = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        for name in chat_only:
            if getattr(body, name) is not None:
                raise RequestError(f"{name} goes with messages, not with prompt", param=name)
        return services.prompts.texts([body.prompt or ""], add_bos=body.add_special_tokens)[0]
    if body.add_special_tokens is not None:
        raise RequestError(
            "add_special_tokens goes with prompt; a chat template writes its own",
            param="add_special_tokens",
        )
    return services.prompts.chat(
        read_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
    )
