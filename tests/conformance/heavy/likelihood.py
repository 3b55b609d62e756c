"""``likelihood.py MODEL < PAIRS``: log-likelihoods of continuations from transformers in float32.

PAIRS is JSON: rows of context and continuation. Printed is JSON: of each row the sum in nats and
whether every token of the continuation is the likeliest one. An empty context is the BOS token.
"""

from __future__ import annotations

import json
import sys

import torch

from metainfer.bench.reference import transformers_model
from metainfer.formats.source import resolve
from metainfer.planner.opening import open_model
from metainfer.text.tokenizer import Tokenizer


@torch.inference_mode()
def likelihoods(name: str, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """Sum and greediness of each pair under catalogue entry `name`."""
    tokenizer = Tokenizer.from_gguf_metadata(resolve(name).gguf_metadata)
    begin = tokenizer.encode(str(tokenizer.special_tokens["bos_token"]))
    model = transformers_model(open_model(name))
    found = []
    for context, more in pairs:
        start = begin if not context else []
        ids = torch.tensor([start + tokenizer.encode(context + more)])
        first = len(start) + len(tokenizer.encode(context))
        logits = model(ids).logits[0, first - 1 : -1].double()
        wanted = ids[0, first:]
        scores = torch.log_softmax(logits, -1).gather(1, wanted[:, None])
        found.append((float(scores.sum()), bool((logits.argmax(-1) == wanted).all())))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(likelihoods(sys.argv[1], json.load(sys.stdin))))
