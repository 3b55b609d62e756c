"""Faults outside the kernels: text, caches, drafts, reports, loading, ends. `verify` names each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from planting import named, verified

from metainfer.kernels.impl import Layout
from metainfer.text.chat import ChatTemplate
from metainfer.text.tokenizer import Tokenizer
from metainfer.verifier.rows import FAILED

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from harness import save_tiny

MISTRAL = "random:tiny-mistral"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer that begins every text, and a template."""
    import json

    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    target = tmp_path_factory.mktemp("llama")
    save_tiny("llama", target, 3, vocab_size=300)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{c: i + 3 for i, c in enumerate(letters)}}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<pad>", "<s>", "</s>")])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(target / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def verdict(model: str, tmp_path: Path, check: str, **wish: Any) -> tuple[str, dict[str, Any]]:
    document = verified(model, {}, tmp_path, only=(check,), **wish)
    return document["verdict"], named(document)


def test_text_passes_and_its_faults_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = "tokenizer and template"
    document = verified(str(folder), {}, tmp_path, only=(check,))
    assert [row["verdict"] for row in document["checks"]] == ["passed"] * 5

    encode = Tokenizer.encode

    def without_begin(
        self: Tokenizer, text: str, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        return encode(self, text, False, parse_special)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", without_begin)
        found, names = verdict(str(folder), tmp_path, check)
    assert (found, list(names)) == (FAILED, ["beginning of text missing"])

    run = ChatTemplate._run

    def stripped(self: ChatTemplate, *args: Any) -> str:
        return run(self, *args).replace("\n[assistant]", "[assistant]")

    with monkeypatch.context() as patch:
        patch.setattr(ChatTemplate, "_run", stripped)
        found, names = verdict(str(folder), tmp_path, check)
    assert (found, list(names)) == (FAILED, ["template altered"])

    literal = Tokenizer.encode_literal
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_literal", lambda self, text: encode(self, text, False))
        found, names = verdict(str(folder), tmp_path, check)
    assert literal is Tokenizer.encode_literal
    assert (found, list(names)) == (FAILED, ["special token from text"])


def test_a_prefix_found_under_another_salt_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metainfer.kv.book import prefix

    root = prefix.root
    monkeypatch.setattr(prefix, "root", lambda namespace, salt: root(namespace, ""))
    found, names = verdict(MISTRAL, tmp_path, "invariance")
    assert found == FAILED and "prefix hit across salts" in names


def test_b23_drafts_accepted_unseen_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metainfer.executor import sampler

    honest = sampler.accepted

    def eager(drafts: Sequence[int], drawn: list[int]) -> int:
        """One more than the model drew itself."""
        count = min(honest(drafts, drawn) + 1, len(drafts))
        drawn[:count] = drafts[:count]
        return count

    monkeypatch.setattr(sampler, "accepted", eager)
    found, names = verdict(MISTRAL, tmp_path, "speculation", draft="ngram:3")
    assert (found, list(names)) == (FAILED, ["acceptance of drafts"])


def test_reports_one_row_off_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from metainfer.executor import sampler

    scores = sampler._scores

    def late(rows: Any, targets: Sequence[int], count: int) -> Any:
        return scores(rows.roll(-1, 0), targets, count)

    monkeypatch.setattr(sampler, "_scores", late)
    found, names = verdict(MISTRAL, tmp_path, "answers")
    assert (found, list(names)) == (FAILED, ["log-probabilities one row off"])


def test_a_head_that_is_the_embedding_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Layout.storage

    def tied(self: Layout, tensors: tuple[str, ...], site: str) -> tuple[object, ...]:
        if site in ("embed", "linear.lm_head"):
            return ("the one table",)
        return storage(self, tensors, site)

    monkeypatch.setattr(Layout, "storage", tied)
    dense = {"layouts": {"weight": "dense@1"}}
    found, names = verdict("random:tiny-llama", tmp_path, "ops in place", **dense)
    assert found == FAILED
    assert names["output head tied to the embedding"][0].startswith("linear.lm_head")


def test_an_ignored_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from metainfer.scheduler import receive

    accept = receive.accept

    def deaf(seq: Any, tokens: tuple[int, ...]) -> Any:
        seq.stops = frozenset()
        return accept(seq, tokens)

    monkeypatch.setattr(receive, "accept", deaf)
    found, names = verdict(MISTRAL, tmp_path, "answers")
    assert (found, list(names)) == (FAILED, ["end of text ignored", "stop id ignored"])


def test_a_ledger_that_promises_less_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metainfer.executor.local import LocalExecutor

    held = LocalExecutor.held_bytes.fget
    assert held is not None

    def more(self: LocalExecutor) -> dict[str, int]:
        return {kind: size * 2 for kind, size in held(self).items()}

    monkeypatch.setattr(LocalExecutor, "held_bytes", property(more))
    found, names = verdict(MISTRAL, tmp_path, "memory")
    assert (found, list(names)) == (FAILED, ["memory ledger"])
