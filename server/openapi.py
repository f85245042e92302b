"""The OpenAPI document of a server, from its routes and its request models."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from starlette.routing import BaseRoute, Route

import jaxserve
from server.protocol.anthropic_request import CountTokensRequest, MessagesRequest
from server.protocol.chat import BatchChatRequest, ChatCompletionRequest, ChatTokenizeRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embed_v2 import EmbedV2Request
from server.protocol.pooling import ClassifyRequest, EmbeddingRequest, PoolingRequest
from server.protocol.profile import StartProfileRequest
from server.protocol.responses_request import InputTokensRequest, ResponsesRequest
from server.protocol.scoring import RerankRequest, ScoreRequest
from server.protocol.tokens import DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]

VERSION = "3.1.0"
REF = "#/components/schemas/{model}"
SCORE_PATHS, RERANK_PATHS = ("/score", "/v1/score"), ("/rerank", "/v1/rerank", "/v2/rerank")
# path -> the models of which its body is one
BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatCompletionRequest,),
    "/v1/chat/completions/batch": (BatchChatRequest,),
    "/v1/embeddings": (EmbeddingRequest,),
    "/pooling": (PoolingRequest,),
    "/v2/embed": (EmbedV2Request,),
    "/classify": (ClassifyRequest,),
    **dict.fromkeys(SCORE_PATHS, (ScoreRequest,)),
    **dict.fromkeys(RERANK_PATHS, (RerankRequest,)),
    "/tokenize": (TokenizeRequest, ChatTokenizeRequest),
    "/detokenize": (DetokenizeRequest,),
    "/start_profile": (StartProfileRequest,),
    "/invocations": (
        ChatCompletionRequest,
        CompletionRequest,
        EmbeddingRequest,
        ClassifyRequest,
        RerankRequest,
        ScoreRequest,
    ),
    "/v1/responses": (ResponsesRequest,),
    "/v1/responses/input_tokens": (InputTokensRequest,),
    "/v1/messages": (MessagesRequest,),
    "/v1/messages/count_tokens": (CountTokensRequest,),
}
_NO_BODY = (
    "/ping",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/release_kv_cache_memory",
    "/sleep",
    "/wake_up",
    "/stop_profile",
    "/v1/responses/{response_id}/cancel",
)
_MAY_HAVE_BODY = ("/start_profile",)


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _maybe(kind: Schema) -> Schema:
    return {"anyOf": [kind, {"type": "null"}]}


def _some(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer", "minimum": 0}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_OBJECT: Schema = {"type": "object"}
# schemas of fields of which the models leave the types to `check`
_PROMPT: Schema = {"anyOf": [SOME_TEXT, _some(SOME_TEXT), _some(WHOLE), _some(_some(WHOLE))]}
_TYPES: dict[str, Schema] = {"prompt": _PROMPT, "input": _PROMPT}
_CONTENT: Schema = {"anyOf": [TEXT, _list(_OBJECT)]}
_TURNS = _some(_object({"role": {"enum": ["user", "assistant"]}, "content": _CONTENT}))
_SYSTEM = _maybe(_CONTENT)
# of single models, by their names
_TYPES_OF: dict[str, dict[str, Schema]] = {
    "ResponsesRequest": {"input": {"anyOf": [SOME_TEXT, _TURNS]}},
    "InputTokensRequest": {"input": {"anyOf": [SOME_TEXT, _TURNS]}},
    "MessagesRequest": {"messages": _TURNS, "system": _SYSTEM},
    "CountTokensRequest": {"messages": _TURNS, "system": _SYSTEM},
}
_USAGE = _object(
    {"prompt_tokens": WHOLE, "total_tokens": WHOLE},
    completion_tokens=WHOLE,
    prompt_tokens_details=_maybe(_OBJECT),
    completion_tokens_details=_OBJECT,
)
_REASON = _maybe({"enum": ["stop", "length", "tool_calls", "repetition", "abort"]})
_TOKENS = _maybe(_list(WHOLE))
_REPORTS: Schema = {"type": "object", "additionalProperties": _list({})}


def _generated(kind: str, choice: Schema) -> Schema:
    return _object(
        {
            "id": TEXT,
            "object": {"const": kind},
            "created": WHOLE,
            "model": TEXT,
            "choices": _list(choice),
            "usage": _USAGE,
            "system_fingerprint": TEXT,
        },
        metrics=_OBJECT,
    )


def _choice(said: dict[str, Schema], **more: Schema) -> Schema:
    required = {"index": WHOLE, **said, "logprobs": _maybe(_OBJECT), "finish_reason": _REASON}
    return _object(required, token_ids=_TOKENS, reports=_REPORTS, **more)


_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _maybe(TEXT)},
    reasoning=_maybe(TEXT),
    tool_calls=_list(_OBJECT),
)
_TEXT_CHOICE = _choice({"text": TEXT}, prompt_token_ids=_TOKENS)
_COMPLETION = _generated("text_completion", _TEXT_CHOICE)
_CHAT = _generated("chat.completion", _choice({"message": _MESSAGE}))
_NUMBERS: Schema = {"anyOf": [_list(NUMBER), TEXT]}


def _item(**fields: Schema) -> Schema:
    return _object({"index": WHOLE, **fields})


_MODEL = _object(
    {"id": TEXT, "object": {"const": "model"}, "created": WHOLE, "max_model_len": WHOLE}
)
_ANTHROPIC_MODEL = _object(
    {"id": TEXT, "type": {"const": "model"}, "display_name": TEXT, "created_at": TEXT}
)


def _of_prompts(item: Schema) -> Schema:
    head: Schema = {"id": TEXT, "object": {"const": "list"}, "created": WHOLE, "model": TEXT}
    return _object({**head, "data": _list(item), "usage": _USAGE})


_EMBEDDINGS = _of_prompts(_item(object={"const": "embedding"}, embedding=_NUMBERS))
_TYPED = _object(
    {
        "id": TEXT,
        "embeddings": _OBJECT,
        "texts": _list(TEXT),
        "meta": _OBJECT,
        "response_type": TEXT,
    }
)
_CLASSES = _of_prompts(_item(label=TEXT, probs=_list(NUMBER), num_classes=WHOLE))
_SCORES = _of_prompts(_item(object={"const": "score"}, score=NUMBER))
_RANKS = _object(
    {
        "id": TEXT,
        "model": TEXT,
        "usage": _USAGE,
        "results": _list(_item(document=_OBJECT, relevance_score=NUMBER)),
    }
)
_STATUS = {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]}
_RESPONSE_USAGE = _object(
    {
        "input_tokens": WHOLE,
        "input_tokens_details": _object({"cached_tokens": WHOLE}),
        "output_tokens": WHOLE,
        "output_tokens_details": _OBJECT,
        "total_tokens": WHOLE,
    }
)
_ITEM = _object({"type": {"enum": ["message", "reasoning", "function_call"]}, "id": TEXT})
_RESPONSE = _object(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": WHOLE,
        "completed_at": _maybe(WHOLE),
        "status": _STATUS,
        "background": {"type": "boolean"},
        "error": _maybe(_object({"code": TEXT, "message": TEXT})),
        "incomplete_details": _maybe(_object({"reason": TEXT})),
        "model": TEXT,
        "output": _list(_ITEM),
        "usage": _maybe(_RESPONSE_USAGE),
        "instructions": _maybe(TEXT),
        "max_output_tokens": _maybe(WHOLE),
        "metadata": _OBJECT,
        "parallel_tool_calls": {"type": "boolean"},
        "previous_response_id": _maybe(TEXT),
        "store": {"type": "boolean"},
        "text": _OBJECT,
        "tools": _list(_OBJECT),
    },
    reports=_REPORTS,
)
_BLOCK = _object({"type": {"enum": ["text", "thinking", "tool_use"]}})
_ANTHROPIC = _object(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": _list(_BLOCK),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": _maybe(TEXT),
        "usage": _object(
            {"input_tokens": WHOLE, "output_tokens": WHOLE},
            cache_read_input_tokens=_maybe(WHOLE),
            cache_creation_input_tokens=_maybe(WHOLE),
        ),
    }
)
_FACTS = _object(
    {
        "version": TEXT,
        "models": _list(TEXT),
        "context": WHOLE,
        "chat": {"type": "boolean"},
        "structured_outputs": {"type": "boolean"},
        "max_logprobs": {"type": "integer"},
        "slots": WHOLE,
        "page_size": WHOLE,
        "policy": TEXT,
        "has_keys": {"type": "boolean"},
    }
)
# path, or method and path -> the schema of its JSON answer; other answers have no schema
ANSWERS: dict[str, Schema] = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/v1/chat/completions/batch": _CHAT,
    "/invocations": {"anyOf": [_COMPLETION, _CHAT, _EMBEDDINGS, _CLASSES, _SCORES, _RANKS]},
    "/v1/embeddings": _EMBEDDINGS,
    "/pooling": _of_prompts(_item(object={"const": "pooling"}, data=_NUMBERS)),
    "/v2/embed": _TYPED,
    "/classify": _CLASSES,
    **dict.fromkeys(SCORE_PATHS, _SCORES),
    **dict.fromkeys(RERANK_PATHS, _RANKS),
    "/v1/responses": _RESPONSE,
    "/v1/responses/{response_id}": _RESPONSE,
    "/v1/responses/input_tokens": _object(
        {"object": {"const": "response.input_tokens"}, "input_tokens": WHOLE}
    ),
    "DELETE /v1/responses/{response_id}": _object(
        {"id": TEXT, "object": {"const": "response.deleted"}, "deleted": {"const": True}}
    ),
    "/v1/responses/{response_id}/cancel": _RESPONSE,
    "/v1/messages": _ANTHROPIC,
    "/v1/messages/count_tokens": _object({"input_tokens": WHOLE}),
    "/engine/facts": _FACTS,
    "/v1/models": {
        "anyOf": [
            _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
            _object({"data": _list(_ANTHROPIC_MODEL), "has_more": {"const": False}}),
        ]
    },
    "/v1/models/{name}": {"anyOf": [_MODEL, _ANTHROPIC_MODEL]},
    "/tokenize": _object(
        {"count": WHOLE, "max_model_len": WHOLE, "tokens": _list(WHOLE)},
        token_strs=_maybe(_list(_maybe(TEXT))),
    ),
    "/detokenize": _object({"prompt": TEXT}),
    "/health": _object(
        {
            "status": {
                "enum": ["ok", "draining", "dead", "restarting", "loading", "silent", "paused"]
            }
        },
        reason=TEXT,
    ),
    "/ping": _object({"status": TEXT}),
    "/version": _object({"version": TEXT}),
    "/load": _object({"server_load": WHOLE}),
    "/sleep": _object({"status": TEXT, "level": WHOLE}),
    "/release_kv_cache_memory": _object({"status": TEXT}),
    "/wake_up": _object({"status": {"enum": ["awake", "sleeping"]}, "tags": _maybe(_list(TEXT))}),
    "/stop_profile": _object({"trace": TEXT}),
    "/is_sleeping": _object({"is_sleeping": {"type": "boolean"}}),
    "/tokenizer_info": _object({"tokenizer_class": TEXT, "chat_template": _maybe(TEXT)}),
    "/openapi.json": {"type": "object"},
}
_OTHER_TYPES = {"/metrics": "text/plain", "/docs": "text/html"}
# answers of vectors, also as raw numbers
_RAW = ("/v1/embeddings", "/pooling", "/invocations")
_STREAMS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/invocations",
    "/v1/responses",
    "/v1/messages",
    "/engine/stream",
)
_ERROR = _object(
    {
        "error": _object(
            {"message": TEXT, "type": TEXT, "param": _maybe(TEXT), "code": {"type": "integer"}}
        )
    }
)
# of the Messages API, as its clients read it
_MESSAGES = "/v1/messages"
_MESSAGES_ERROR = _object({"type": TEXT, "error": _object({"type": TEXT, "message": TEXT})})


def document(routes: Iterable[BaseRoute]) -> Schema:
    """The document of an application with these routes."""
    schemas: dict[str, Schema] = {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    for models in BODIES.values():
        for model in models:
            _add_model(schemas, model)
    paths: dict[str, Schema] = {}
    for route in routes:
        if not isinstance(route, Route) or not route.include_in_schema:
            continue
        path = route.path_format
        for method in sorted(set(route.methods or ()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(path, method, route)
    return {
        "openapi": VERSION,
        "info": {"title": "jaxserve", "version": jaxserve.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, method: str, route: Route) -> Schema:
    text = inspect.getdoc(route.endpoint) or ""
    known = ANSWERS.get(f"{method} {path}", ANSWERS.get(path))
    content: Schema = {}
    if path in _OTHER_TYPES:
        content[_OTHER_TYPES[path]] = {}
    elif known is not None:
        content["application/json"] = {"schema": known}
    if path in _STREAMS:
        content["text/event-stream"] = {}
    if path in _RAW:
        content["application/octet-stream"] = {}
    done: Schema = {"description": text.partition("\n")[0] or "done"}
    if content:
        done["content"] = content
    model = "MessagesError" if path.startswith(_MESSAGES) else "Error"
    error = {"application/json": {"schema": {"$ref": REF.format(model=model)}}}
    told: Schema = {
        "summary": text.partition("\n")[0],
        "operationId": f"{route.name}_{method.lower()}",
        "responses": {"200": done, "default": {"description": "an error", "content": error}},
    }
    if path in ("/health", "/ping"):
        told["responses"]["503"] = {**done, "description": "no engine serves"}
    if route.param_convertors:
        told["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if method == "POST" and path not in _NO_BODY:
        kinds = [{"$ref": REF.format(model=one.__name__)} for one in BODIES.get(path, ())]
        body: Schema = {"type": "object"} if not kinds else kinds[0]
        if len(kinds) > 1:
            body = {"anyOf": kinds}
        told["requestBody"] = {
            "required": path not in _MAY_HAVE_BODY,
            "content": {"application/json": {"schema": body}},
        }
    return told


def _add_model(schemas: dict[str, Schema], model: type[BaseModel]) -> None:
    schema = model.model_json_schema(ref_template=REF)
    schemas.update(schema.pop("$defs", {}))
    kinds = _TYPES | _TYPES_OF.get(model.__name__, {})
    for name, kind in kinds.items():
        if name in schema["properties"] and "type" not in schema["properties"][name]:
            schema["properties"][name] |= kind
    schemas[model.__name__] = schema
