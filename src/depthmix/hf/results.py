"""Results of tasks as plain JSON values, and the file that collects them, one task after the other.

A file belongs to one model and one set of options: results of another are refused, not mixed in.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from depthmix.support.files import FORMAT, format_of, read_object, version, write_text

REMEDY = "Remove it, or choose another file"
PACKAGES = ("torch", "transformers", "datasets", "lm_eval")
CHANGING = {"transformers_version", "_name_or_path", "dtype", "use_cache"}  # of a configuration: not its function
FIELDS = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "n-samples", "higher_is_better")


def describe_model(model: Any, tokenizer: Any) -> dict[str, Any]:
    """What was evaluated: digests of weights, configuration and tokenizer, which do not depend on where they lie."""
    config = {name: value for name, value in model.config.to_diff_dict().items() if name not in CHANGING}
    inner = getattr(tokenizer, "backend_tokenizer", None)
    words = inner.to_str() if inner is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return {
        "type": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": digest_of_weights(model),
        "config": hashlib.sha256(json.dumps(plain(config), sort_keys=True).encode()).hexdigest(),
        "tokenizer": hashlib.sha256(f"{words}{sorted(tokenizer.special_tokens_map.items())}".encode()).hexdigest(),
    }


def digest_of_weights(model: Any) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of a state dict."""
    content = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        content.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def versions() -> dict[str, str]:
    """Of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version(), "depthmix": version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def task_entry(name: str, output: Mapping[str, Any]) -> dict[str, Any]:
    """Of the harness's output: a task's rows, and all that it says besides."""
    return {
        "rows": [*rows_of(name, output)],
        "versions": versions(),
        "harness": {field: plain(output[field]) for field in FIELDS if field in output},
    }


def rows_of(name: str, output: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each metric: of the task or group itself; of its members where a group has no result of its own."""
    results = output["results"]
    for task in [name] if any(metrics_of(results.get(name, {}))) else [*results]:
        for metric, rule, value, error in metrics_of(results[task]):
            yield {
                "task": task,
                "metric": metric if rule == "none" else f"{metric} ({rule})",
                "value": plain(value),
                "stderr": plain(error) if isinstance(error, (int, float)) else None,
                "n": results[task].get("sample_len"),
                "shots": plain(output["n-shot"].get(task)),
                "version": plain(output["versions"].get(task)),
            }


def metrics_of(result: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """Metric, the rule that read the answer, value and standard error."""
    for key, value in result.items():
        metric, comma, rule = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            yield metric, rule, value, result.get(f"{metric}_stderr,{rule}")


def plain(value: Any) -> Any:
    """As JSON can say it: numbers that are not finite become None, objects their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(each) for each in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # of numpy and torch
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def new_document(model: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "depthmix": version(), "model": {**model}, "settings": {**settings}, "tasks": {}}


def read_document(path: Path, new: Mapping[str, Any], definitions: Mapping[str, str]) -> dict[str, Any]:
    """The document in a file if it belongs to the same model, options and task files; `new` if there is no file."""
    if not path.exists():
        return {**new}
    old = read_object(path, REMEDY, ("model", "settings", "tasks"))
    format_of(old, path)
    before, after = decisive(old), decisive(new)
    changed = [
        f"{key}: was {before.get(key)!r}, is now {after.get(key)!r}" for key in after if before.get(key) != after[key]
    ]
    changed += [
        f"{name}: its task file has changed"
        for name, definition in definitions.items()
        if name in old["tasks"] and old["tasks"][name].get("definition") != definition
    ]
    if changed:
        lines = "\n  ".join([f"{path} holds results of another evaluation:", *changed])
        raise ValueError(f"{lines}\n{REMEDY}: results of both would stand side by side")
    return old


def decisive(document: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a result: model, options and the harness; not where it ran, nor in which batches."""
    digests = {name: document["model"].get(name) for name in ("weights", "config", "tokenizer")}
    return {**digests, **document["settings"]}


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
