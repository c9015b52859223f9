"""What a run or a study has left on disk, read as far as it is whole; what is missing is said in a sentence.

Nothing in a folder is executed: the configuration is read as data, and no function that it names is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from depthmix.analysis import Survey
from depthmix.analysis.evidence import number
from depthmix.support.checks import is_finite
from depthmix.support.files import digest, parse_toml, read_object, read_tensors, read_text
from depthmix.training import read_metrics
from depthmix.training.manifest import list_checkpoints

T = TypeVar("T")
RUN_FILES = ("config.toml", "metrics.jsonl", "result.json")
STUDY_FILE = "comparison.json"
TRACE, ABLATION = "trace.json", "ablation.json"
PROBLEMS = {TRACE: "The trace cannot be shown", ABLATION: "The ablation cannot be shown"}
FORMAT = 1  # of ablation.json
AGAIN = "Remove it, and `depthmix report` measures it again if the weights are there"
DAMAGE = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


@dataclass(kw_only=True)
class Snapshot:
    """M and weights over sources at one step: means over the fixed batch."""

    step: int
    M: np.ndarray  # [n, n]
    weights: np.ndarray | None = None  # [n, C]
    values: np.ndarray | None = None  # [N, N]
    source_names: list[str] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    partial: list[bool] = field(default_factory=list)


@dataclass(kw_only=True)
class SavedTrace:
    """trace.json and the tensors beside it."""

    content: dict[str, Any]
    tensors: dict[str, np.ndarray]


@dataclass(kw_only=True)
class SavedRun:
    """A run's folder. `missing` collects what cannot be shown, and why."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)  # as in config.toml
    lines: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl
    result: dict[str, Any] | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    trace: SavedTrace | None = None
    ablation: dict[str, Any] | None = None
    weights: str | None = None  # SHA-256 of the final weights
    missing: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind, oldest first."""
        return [line for line in self.lines if line.get("kind") == kind]

    def section(self, name: str) -> Mapping[str, Any]:
        part = self.config.get(name)
        return part if isinstance(part, Mapping) else {}

    def choice(self, child: str) -> Mapping[str, Any]:
        """Name and options of the mechanism ("mixer"), or of that inside attention ("kv_mixer"); empty: not known."""
        saved: Any = [self.section("model").get(child), (self.result or {}).get(child)]
        if child == "mixer" and self.trace is not None:
            content = self.trace.content
            options = content.get("options")
            saved.append({"name": content.get("mechanism"), **(options if isinstance(options, Mapping) else {})})
        for given in saved:
            if isinstance(given, str):
                return {"name": given}
            if isinstance(given, Mapping) and isinstance(given.get("name"), str):
                return given
        return {}

    @property
    def mechanism(self) -> str:
        return str(self.choice("mixer").get("name", "unknown"))

    @property
    def kv_mechanism(self) -> str | None:
        name = self.choice("kv_mixer").get("name")
        return None if name is None or name == "none" else str(name)

    @property
    def depth(self) -> int:
        """The number of executed sublayers, from whatever is there."""
        for count in (self.recorded_depth, self.configured_depth):
            if count:
                return count
        return 0

    @property
    def recorded_depth(self) -> int:
        recorded = [line["output_norm"] for line in self.of_kind("depth") if isinstance(line.get("output_norm"), list)]
        if recorded:
            return len(recorded[-1])
        if self.snapshots:
            return len(self.snapshots[-1].M) - 1
        return self.trace.content["depth"] if self.trace is not None else 0

    @property
    def configured_depth(self) -> int:
        model = self.section("model")
        layers, loop = number(model.get("layers")), model.get("loop")
        if isinstance(loop, Mapping):
            once = number(loop.get("last")) - number(loop.get("first"))
            layers += once * (number(loop.get("repeats")) - 1)
        return int(2 * layers) if 0 < layers < 2**13 else 0

    @property
    def kinds(self) -> list[str]:
        return [("attn", "mlp")[i % 2] for i in range(self.depth)]

    @property
    def dim(self) -> int | None:
        dim = number(self.section("model").get("dim"))
        return int(dim) if 0 < dim < 2**31 else None

    @property
    def seed(self) -> int | None:
        seed = self.section("run").get("seed")
        return seed if isinstance(seed, int) and not isinstance(seed, bool) and abs(seed) < 2**53 else None

    @property
    def has_weights(self) -> bool:
        return (self.folder / "final").is_dir() or bool(list_checkpoints(self.folder / "checkpoints"))


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def is_study(folder: Path) -> bool:
    return (folder / STUDY_FILE).is_file()


def check_folder(folder: Path) -> None:
    """Raise an error that says what was expected, unless the folder is that of a run or a study."""
    expected = (
        "expected the folder of a `depthmix train` run (config.toml, metrics.jsonl) or of a `depthmix compare` study "
        f"({STUDY_FILE})"
    )
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        raise FileNotFoundError(f"{folder} {what}; {expected}")
    if is_run(folder) or is_study(folder):
        return
    hint = ""
    if (folder / "scaling.json").is_file():
        hint = ". It is a scaling study: give the folders of its runs, which are under runs/"
    elif (folder / "model.safetensors").is_file():
        hint = ". It contains a model without its run: give the run's folder"
    raise FileNotFoundError(f"{folder} is neither a run nor a study; {expected}{hint}")


def read_run_folder(folder: Path, name: str | None = None) -> SavedRun:
    """Everything in a run's folder that can be read."""
    run = SavedRun(folder=folder, name=name or folder.resolve().name)
    missing = run.missing
    attempt(missing, "The configuration cannot be shown", lambda: run.config.update(read_raw_config(folder)))
    run.lines = attempt(missing, "The metrics cannot be shown", lambda: read_metrics(folder / "metrics.jsonl")) or []
    if not run.lines:
        missing.append("metrics.jsonl is missing or empty, so there are no curves of losses and magnitudes.")
    elif not run.of_kind("depth"):
        missing.append(
            "The run has recorded nothing over depth, so magnitudes and gradients are not shown; train with "
            "run.depth_every above 0."
        )
    if (folder / "result.json").is_file():
        run.result = attempt(missing, "The result cannot be shown", lambda: read_object(folder / "result.json", AGAIN))
    else:
        missing.append("The run is not finished: it has no result.json, and the curves end where it is now.")
    run.snapshots = read_snapshots(folder / "snapshots", run.depth, missing)
    if (folder / TRACE).is_file():
        run.trace = attempt(missing, PROBLEMS[TRACE], lambda: read_trace(folder, run.depth))
    if (folder / ABLATION).is_file():
        run.ablation = attempt(missing, PROBLEMS[ABLATION], lambda: read_ablation(folder))
    run.weights = attempt(missing, "The weights have no hash", lambda: hash_of_weights(folder))
    return run


def attempt(missing: list[str], problem: str, read: Callable[[], T]) -> T | None:
    """What `read` returns; where it fails, None and a sentence."""
    try:
        return read()
    except DAMAGE as error:
        missing.append(f"{problem}: {sentence(error)}")
        return None


def sentence(error: BaseException) -> str:
    text = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__} ({error})"
    return text if text.endswith(".") else f"{text}."


def read_raw_config(folder: Path) -> dict[str, Any]:
    """config.toml as plain data: options of a mechanism that is not installed can be shown too."""
    path = folder / "config.toml"
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is missing")
    return parse_toml(read_text(path, "Restore the file"), path.name, "Restore the file")


def read_snapshots(folder: Path, depth: int, missing: list[str]) -> list[Snapshot]:
    """The intact ones of a run, oldest first; those of another size than the newest are left out."""
    found = []
    for path in sorted(folder.glob("step-*.safetensors")):
        snapshot = attempt(missing, f"The snapshot {path.name} is left out", partial(read_snapshot, path, depth))
        if snapshot is not None:
            found.append(snapshot)
    return [s for s in found if shapes(s) == shapes(found[-1])]


def shapes(snapshot: Snapshot) -> list[Any]:
    arrays = (snapshot.M, snapshot.weights, snapshot.values)
    return [None if a is None else a.shape for a in arrays]


def read_snapshot(path: Path, depth: int = 0) -> Snapshot:
    """`depth`: that of the run, if it is known."""
    tensors, metadata = read_tensors(path, "Remove it, and the others are shown", ("M", "weights", "values"))
    arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    step = metadata.get("step", path.stem.removeprefix("step-"))
    if "M" not in arrays or arrays["M"].ndim != 2 or len({*arrays["M"].shape}) != 1 or not step.isdigit():
        raise ValueError(f"{path.name} has no square M; expected a snapshot that `depthmix train` wrote")
    sources = json.loads(metadata.get("sources", "{}"))
    n, weights = len(arrays["M"]), arrays.get("weights")
    if depth and n != depth + 1:
        raise ValueError(
            f"{path.name} has a matrix of {n} rows; expected {depth + 1}, as the run has {depth} sublayers"
        )
    named: dict[str, Any] = {
        "source_names": [str(name) for name in sources.get("source_names", [])],
        "reads": [[int(i) for i in row] for row in sources.get("reads", [])],
        "partial": [bool(flag) for flag in sources.get("partial", [])],
    }
    listed = {i for row in named["reads"] for i in row} <= {*range(len(named["source_names"]))}
    fits = weights is None or (weights.shape == (n, len(named["source_names"])) and len(named["reads"]) == n)
    if not (fits and listed):
        raise ValueError(f"{path.name} is damaged: its weights do not fit its list of sources")
    return Snapshot(step=int(step), **arrays, **named)


def read_trace(folder: Path, depth: int) -> SavedTrace:
    """The trace in a folder, after its parts were checked against each other and against the run's depth."""
    saved = Survey.load(folder)
    if depth and saved.figures["depth"] != depth:
        raise ValueError(f"{TRACE} is of {saved.figures['depth']} sublayers, but the run has {depth}. {AGAIN}")
    arrays = {name: tensor.double().numpy() for name, tensor in saved.tensors.items()}
    return SavedTrace(content=saved.figures, tensors=arrays)


def read_ablation(folder: Path) -> dict[str, Any]:
    content = read_object(folder / ABLATION, AGAIN, ("format", "mechanism", "effects", "loss"))
    if content["format"] != FORMAT:
        raise ValueError(f"{ABLATION} has format {content['format']!r}; this version reads {FORMAT}. {AGAIN}")
    for effect in content["effects"]:
        if not isinstance(effect["name"], str) or not all(is_finite(effect[name]["mean"]) for name in ("loss", "kl")):
            raise ValueError(f"{ABLATION} is damaged: an effect has no name or no number. {AGAIN}")
    return content


def hash_of_weights(folder: Path) -> str | None:
    """SHA-256 of the final weights, None where there are none; an error if they are not those that were saved."""
    weights = folder / "final" / "model.safetensors"
    if not weights.is_file():
        return None
    found = digest(weights)
    saved = read_object(folder / "final" / "config.json", AGAIN)["weights"]["sha256"]
    if found != saved:
        raise ValueError("final/model.safetensors is damaged or of another save: its SHA-256 is not the recorded one")
    return found


def unique_names(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its own, or with that of the folder above where two are the same."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name or str(path) for path in paths]
    longer = [f"{path.parent.name}/{path.name}" for path in paths]
    names = [wide if names.count(name) > 1 else name for name, wide in zip(names, longer, strict=True)]
    return [f"{name} ({k})" if names.count(name) > 1 else name for k, name in enumerate(names, 1)]
