"""Bodies of requests: types and bounds, checked by msgspec and shown in the OpenAPI document.

Two tables say what happens to the other fields of OpenAI's API: `UNSUPPORTED` ones are accepted
at the values that ask for nothing, `IGNORED` ones are hints without effect here. Any other field
is refused, because a typo must not look like a setting that took effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_MESSAGES = 65_536  # ceilings; `bounds` has what is in force
MAX_TOOLS = 4096
MAX_PROMPTS = 128
MAX_TOKENS = 2**31 - 1

Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Unit = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Choices = Annotated[int, Meta(ge=1, le=256)]
Stop = Annotated[str, Meta(min_length=1, max_length=4096)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=256)]
Bias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=65_536),
]
Salt = Annotated[str, Meta(max_length=1024, pattern=r"^[^@/\\\x00]*$")]
Label = Annotated[str, Meta(max_length=512)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage`: a last chunk with usage. `continuous_usage_stats`: usage on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's wrapper of a schema. `strict` changes nothing: a schema is always enforced."""

    name: Label | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``json_object``: any object. ``json_schema``: one that fits the schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's spelling: one of these. `json` is a schema, as an object or as its text."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and legacy completions share. Below the blank line: extensions."""

    model: str
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Choices | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    user: Label | None = None

    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[Stop], Meta(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Salt | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """One piece of a message; only text."""

    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`arguments` is the JSON text that the model wrote."""

    name: Label
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call in an earlier answer; `index` is what streamed deltas carry."""

    id: Label
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """`function` is shown to the model as it is sent: its keys, their order, nothing added."""

    type: Literal["function"]
    function: dict[str, Any]


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn. `reasoning_content` (or `reasoning`) of earlier answers goes to the prompt.
    `content` may be missing beside `tool_calls` only. `prefix` on the last answer: go on in it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Meta(min_length=1, max_length=1024)] | None = None
    name: Label | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    tool_call_id: Label | None = None
    prefix: bool | None = None


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
Variables = Annotated[dict[str, Any], Meta(max_length=64)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/completions``. `prompt`: text, texts, token ids, or lists of token ids."""

    prompt: (
        str
        | Annotated[
            list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
            Meta(min_length=1),
        ]
    )
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/tokenize``: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Variables | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/detokenize``."""

    tokens: list[TokenId]
    model: str | None = None


_ABSENT: tuple[object, ...] = (None, [], {})

#: field -> values that ask for nothing and are therefore accepted
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None, "none"),
    "functions": _ABSENT,
    "guided_decoding_backend": (None,),
    "guided_grammar": (None,),
    "guided_whitespace_pattern": (None,),
    "metadata": _ABSENT,
    "modalities": (None, [], ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "prompt_logprobs": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # of other engines' servers
    "add_special_tokens": (None, False),
    "cache_prompt": (None, True),
    "chat_template": (None,),
    "custom_logit_processor": (None,),
    "documents": _ABSENT,
    "ebnf": (None,),
    "echo": (None, False),
    "grammar": (None, ""),
    "include_reasoning": (None, True),
    "include_stop_str_in_output": (None, False),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": _ABSENT,
    "logprob_token_ids": _ABSENT,
    "lora_path": (None,),
    "min_new_tokens": (None, 0),
    "mirostat": (None, 0),
    "mm_processor_kwargs": _ABSENT,
    "no_stop_trim": (None, False),
    "regex": (None,),
    "repeat_penalty": (None, 1, 1.0),
    "repetition_detection": (None,),
    "request_id": (None,),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "separate_reasoning": (None, True),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "stop_regex": _ABSENT,
    "thinking_token_budget": (None,),
    "timeout": (None,),
    "truncate_prompt_tokens": (None,),
    "typical_p": (None, 1, 1.0),
    "use_beam_search": (None, False),
}

#: what to use instead of an unsupported field
INSTEAD = {
    "documents": "Put them into the messages.",
    "grammar": "Use structured_outputs.regex or a JSON schema.",
    "ebnf": "Use structured_outputs.regex or a JSON schema.",
    "lora_path": "Name the adapter as model.",
    "min_new_tokens": "Use min_tokens.",
    "regex": "Use structured_outputs.regex.",
    "repeat_penalty": "Use repetition_penalty.",
    "request_id": "Send the header X-Request-Id.",
    "timeout": "Send the header X-Request-Timeout.",
    "prompt_logprobs": "Use /v1/completions with echo and logprobs.",
}

#: hints that change no answer
IGNORED = (
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "safety_identifier",
    "session_id",
)

#: message field -> neutral values; clients send back whole message objects
MESSAGE_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "annotations": _ABSENT,
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None, ""),
}
