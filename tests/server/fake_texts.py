"""Text sides for servers over the fake engine: bytes, and bytes with a family's markers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from metainfer.engine.model_text import TextTools, byte_deepseek, byte_text
from metainfer.text.byte_text import byte_tokenizer
from metainfer.text.chat import ChatTemplate
from metainfer.text.deepseek_v4 import MARKERS, DeepseekV4Format
from metainfer.text.dialogue import JinjaFormat
from metainfer.text.wire_pieces import WirePieces

# Our own template in the manner of Qwen3's: it teaches the tags and knows `enable_thinking`.
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{...}</tool_call>.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}
<tool_call>{{ {"name": f.name, "arguments": f.arguments} | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
QWEN_MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def byte_qwen(vocab_size: int) -> TextTools:
    tokenizer = byte_tokenizer(vocab_size, QWEN_MARKERS)
    return TextTools(tokenizer, JinjaFormat(tokenizer, ChatTemplate(TEMPLATE)))


def bare_deepseek(vocab_size: int) -> TextTools:
    """DeepSeek-V4 whose fixed prompt texts nobody has."""
    tokenizer = byte_tokenizer(vocab_size, MARKERS)
    pieces = WirePieces(reasons=("the folder has no encoder",))
    return TextTools(tokenizer, DeepseekV4Format(tokenizer, pieces))


TEXTS = {"bare": bare_deepseek, "bytes": byte_text, "deepseek": byte_deepseek, "qwen": byte_qwen}
FIRST_BYTE = {"bare": len(MARKERS), "deepseek": len(MARKERS), "qwen": len(QWEN_MARKERS)}
VOCAB = 512


def write_script(
    path: Path, text: str, replies: Mapping[str, str], cues: Mapping[str, str] | None = None
) -> Path:
    """A script of answers given as text; markers in them become tokens. `cues`: texts of prompts
    and the answers that they call for."""
    tokenizer = TEXTS[text](VOCAB).tokenizer
    script = {
        "vocab": VOCAB,
        "eos": 1,
        "first_byte": FIRST_BYTE[text],
        "cues": dict(cues or {}),
        "replies": {
            name: tokenizer.encode(reply, add_special=False) for name, reply in replies.items()
        },
    }
    path.write_text(json.dumps(script))
    return path
