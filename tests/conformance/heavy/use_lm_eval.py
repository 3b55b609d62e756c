"""lm-eval through `local-completions`: own tasks from local files, scored by log-probabilities of
echoed prompts, by generated text and by the log-probability of a whole text."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REQUIRES = ["lm-eval[api]>=0.4.13", "transformers>=5.20,<6"]
REPORTS = ["lm-eval", "transformers"]
SERVER = ["--context", "1024", "--concurrency", "4"]

import checks  # noqa: E402

#: Nats that a sum may differ from transformers in float32; 2e-5 is seen.
NATS = 0.001
CHOICES = [
    ("The capital of France is", ["Paris", "London", "a river", "seven"], 0),
    ("Two plus two equals", ["green", "four", "a long way from home"], 1),
    ("The opposite of hot is", ["Tuesday", "very loud", "cold"], 2),
    ("Water freezes into", ["ice", "electricity and then into glass"], 0),
]
SPOKEN = [("The capital of France is", "Paris"), ("One, two, three, four, five,", "six")]
TEXT = "Once upon a time there was a little girl who lived in a village near the forest."
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "local_choice": (
        [{"text": text, "choices": row, "answer": best} for text, row, best in CHOICES],
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
    ),
    "local_speech": (
        [{"text": text, "answer": word} for text, word in SPOKEN],
        {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": [".", ",", "\n"], "max_gen_toks": 8, "temperature": 0},
            "filter_list": [
                {"name": "stripped", "filter": [{"function": "remove_whitespace"},
                                                {"function": "take_first"}]}
            ],
            "metric_list": [{"metric": "exact_match"}],
        },
    ),
    "local_rolling": (
        [{"text": TEXT}],
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "byte_perplexity"}],
        },
    ),
}  # fmt: skip


def write_tasks(folder: Path) -> None:
    """A YAML file (JSON is YAML) and a data file of each task."""
    folder.mkdir(exist_ok=True)
    for name, (rows, told) in TASKS.items():
        data = (folder / f"{name}.jsonl").resolve()
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        task = {"task": name, **files, "test_split": "test", **told}
        (folder / f"{name}.yaml").write_text(json.dumps(task))


@functools.cache
def evaluated(batch: int) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Scores and samples of every task, `batch` prompts in a request, two requests at a time."""
    write_tasks(Path("tasks"))
    out = Path(tempfile.mkdtemp(dir=".", prefix="out-")).resolve()
    told = f"model={checks.MODEL},base_url={checks.URL}/v1/completions"
    told += f",tokenizer={checks.TOKENIZER},num_concurrent=2,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", told, "--batch_size", str(batch), "--tasks", *TASKS]
    command += ["--include_path", "tasks", "--output_path", str(out), "--log_samples"]
    offline = {"HF_HOME": str(out / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    env = os.environ | offline
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    scores = json.loads(next(out.rglob("results_*.json")).read_text())["results"]
    samples = {}
    for name in TASKS:
        lines = next(out.rglob(f"samples_{name}_*.jsonl")).read_text().splitlines()
        samples[name] = sorted(map(json.loads, lines), key=lambda one: int(one["doc_id"]))
    return scores, samples


def choices(batch: int = 1) -> list[tuple[str, str, float, bool]]:
    """Context, continuation, log-likelihood and whether it is the greedy one, of every choice."""
    found = []
    for sample in evaluated(batch)[1]["local_choice"]:
        for asked, ((score, greedy),) in zip(
            sample["arguments"].values(), sample["resps"], strict=True
        ):
            found.append((asked["arg_0"], asked["arg_1"], float(score), greedy in (True, "True")))
    return found


def transformers_scores(pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """The same of `pairs` from transformers in float32, which is in the environment of run.py."""
    done = subprocess.run(
        [checks.PYTHON, str(Path(__file__).with_name("likelihood.py")), checks.MODEL],
        input=json.dumps(pairs), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]
    return [(score, greedy) for score, greedy in json.loads(done.stdout)]


def check_multiple_choice() -> dict[str, Any]:
    """Every choice's log-likelihood and greediness are transformers', computed without a server."""
    found = choices()
    assert len(found) == sum(len(row) for _, row, _ in CHOICES)
    wanted = transformers_scores([(context, more) for context, more, _, _ in found])
    worst = 0.0
    for (context, more, score, greedy), (theirs, best) in zip(found, wanted, strict=True):
        assert abs(score - theirs) < NATS, (context, more, score, theirs)
        assert greedy == best, (context, more, greedy, best)
        worst = max(worst, abs(score - theirs))
    assert {greedy for *_, greedy in found} == {True, False}, "one kind of choice only"
    sums = {f"{context}{more}": round(score, 4) for context, more, score, _ in found[:4]}
    return {"choices": len(found), "worst difference in nats": round(worst, 5), "sums": sums}


def check_accuracy() -> dict[str, float]:
    """The accuracy that lm-eval prints is that of transformers' log-likelihoods."""
    scores = evaluated(1)[0]["local_choice"]
    pairs = [(text, f" {choice}") for text, row, _ in CHOICES for choice in row]
    sums = iter(transformers_scores(pairs))
    right = 0
    for _, row, best in CHOICES:
        own = [next(sums)[0] for _ in row]
        right += own.index(max(own)) == best
    assert scores["acc,none"] == right / len(CHOICES), (scores, right)
    assert 0 < scores["acc,none"] <= 1, scores
    return {"acc": scores["acc,none"], "acc_norm": scores["acc_norm,none"]}


def check_generate_until() -> dict[str, Any]:
    """Generated text ends before each `until`, and the score counts the exact ones."""
    scores, samples = evaluated(1)
    texts = [sample["resps"][0][0] for sample in samples["local_speech"]]
    assert all(text.strip() and not set(text) & set(".,\n") for text in texts), texts
    right = sum(text.strip() == word for text, (_, word) in zip(texts, SPOKEN, strict=True))
    assert scores["local_speech"]["exact_match,stripped"] == right / len(SPOKEN), (scores, texts)
    return {"texts": texts, "exact_match": right / len(SPOKEN)}


def check_rolling() -> dict[str, float]:
    """A whole text's perplexity, from the first token on, is transformers'."""
    ((theirs, _),) = transformers_scores([("", TEXT)])
    (sample,) = evaluated(1)[1]["local_rolling"]
    score = float(sample["resps"][0][0])
    assert abs(score - theirs) < NATS, (score, theirs)
    return {"log-likelihood": round(score, 4), "transformers": round(theirs, 4)}


def check_batches() -> float:
    """Four prompts in a request give the scores of one."""
    worst = 0.0
    for one, four in zip(choices(), choices(batch=4), strict=True):
        assert one[:2] == four[:2], (one, four)
        worst = max(worst, abs(one[2] - four[2]))
    assert worst < NATS, worst
    return round(worst, 6)


if __name__ == "__main__":
    checks.run(dict(globals()))
