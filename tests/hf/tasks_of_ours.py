"""Task files with data of their own, for the harness without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ("depth", "layer", "mixer", "token", "width", "block")
KINDS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "complete": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": " {{choices[answer]}}",  # nothing stands between here
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{written}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def questions(count: int = 6) -> list[dict[str, Any]]:
    """Each with three choices, of which one counts as right, and a text that counts as written."""
    return [
        {
            "question": f"What is {WORDS[k % 6]} {k}?",
            "choices": [f"{WORDS[(k + shift) % 6]}" for shift in (1, 2, 3)],
            "answer": k % 3,
            "written": " x",
        }
        for k in range(count)
    ]


def write_tasks(folder: Path, docs: list[dict[str, Any]] | None = None, **kinds: dict[str, Any]) -> Path:
    """A folder with the tasks of KINDS, or with `kinds`: names, each with what differs from its `kind`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs or questions()))
    for name, changes in (kinds or {kind: {"kind": kind} for kind in KINDS}).items():
        fields = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"validation": str(data)}, "cache_dir": str(folder / "cache")},
            "validation_split": "validation",
            **({} if "kind" not in changes else KINDS[changes["kind"]]),
            **{key: value for key, value in changes.items() if key != "kind"},
            "metadata": {"version": 1.5},
        }
        (folder / f"{name}.yaml").write_text(json.dumps(fields))  # JSON is YAML
    return folder


def value_of(document: dict[str, Any], task: str, metric: str) -> float:
    (value,) = [row["value"] for row in document["tasks"][task]["rows"] if row["metric"] == metric]
    return float(value)
