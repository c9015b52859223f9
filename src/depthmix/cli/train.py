"""`depthmix train`: a dial, a preset or a file, and every field open to change; a second start resumes."""

from __future__ import annotations

import dataclasses
import json as json_format
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from depthmix.cli.processes import BY_DEFAULT, Processes
from depthmix.cli.shared import BACKBONE, SET, Backbone, Data, Several, flag, print_result, switch
from depthmix.cli.train_progress import TrainingProgress
from depthmix.models import DecoderConfig
from depthmix.ops import keep_freed_memory
from depthmix.parallel.ranks import main_process
from depthmix.support.checks import split_pair
from depthmix.support.terminal import format_duration, say
from depthmix.training import (
    BadLoss,
    CheckpointError,
    Interrupted,
    Result,
    RetrofitConfig,
    TrainConfig,
    override,
    preset_config,
    retrofit_config,
    rule_config,
    train,
)
from depthmix.training.continued import retrofit_tokenizer, warn_of_changes
from depthmix.training.dial import dial_tokens
from depthmix.training.estimate import estimate_seconds
from depthmix.training.manifest import list_checkpoints, step_of
from depthmix.training.overrides import check_excluding, override_all
from depthmix.training.recipes import RULE, chosen_mixers, describe_recipe

DAY = 86_400.0  # seconds

EXAMPLES = (
    "depthmix train --mixer block_attnres --depth 4 --steps 20 --folder runs/small",
    "depthmix train --mixer mhc --lr 5e-3 --set mixer.streams=2 --print-config",
)


@dataclass(frozen=True, kw_only=True)
class Model:
    mixer: Annotated[
        str | None,
        flag("A mechanism. A KV mechanism alone uses the plain residual; join two with +, such as "
             "attnres+value_residual.", "NAME", default="residual"),
    ] = None  # fmt: skip
    depth: Annotated[
        int | None,
        flag("The main dial: the number of sublayers, attention and MLP counted separately. Width, learning rate, "
             "batch and length follow from it.", "L", default="12"),
    ] = None  # fmt: skip
    dim: Annotated[int | None, flag("Width.", "D", default="follows from the depth")] = None
    backbone: Annotated[Backbone | None, BACKBONE] = None
    preset: Annotated[
        str | None,
        flag("Instead of --depth: a model of one of the papers with its whole recipe, such as attnres-194m; or attnres "
             "together with --depth, which applies the rule of that paper's table to another size. "
             "`depthmix show --preset all` lists them.", "NAME", default=""),
    ] = None  # fmt: skip
    config: Annotated[
        Path | None,
        flag("Instead of --depth: a TOML file, such as the config.toml of another run.", "FILE", default=""),
    ] = None
    from_hf: Annotated[
        str | None,
        flag("Instead of --depth: continue the pretraining of a model of Hugging Face transformers, with --mixer put "
             "into it. A local folder that save_pretrained wrote, with safetensors. With the --folder of a run: where "
             "its model is now.", "FOLDER", default=""),
    ] = None  # fmt: skip
    freeze_base: Annotated[bool, switch("With --from-hf: train the mixers only.")] = False


@dataclass(frozen=True, kw_only=True)
class TrainingData(Data):
    context: Annotated[
        int | None,
        flag(
            "Tokens per sequence; the same as --set data.tokens_per_row.",
            "TOKENS",
            default="256, or 512 for wide models and with --from-hf",
        ),
    ] = None
    batch: Annotated[
        int | None,
        flag("Sequences per step (per micro-batch where steps accumulate several), over all ranks; the same as --set "
             "data.rows.", "SEQUENCES", default="16, or 32 for wide models"),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Training:
    tokens: Annotated[
        float | None,
        flag(
            "Tokens to train on.",
            "TOKENS",
            default="20 per parameter without embeddings, or the preset's; with --from-hf 1000 steps",
        ),
    ] = None
    steps: Annotated[
        int | None,
        flag("Steps to train for; overrides --tokens. The same as --set run.steps.", "STEPS", default=""),
    ] = None
    lr: Annotated[
        float | None,
        flag(
            "Peak learning rate; the same as --set optimizer.lr.",
            "RATE",
            default="follows from width and optimiser; with --from-hf 1e-4, or 1e-3 with --freeze-base",
        ),
    ] = None
    seed: Annotated[
        int | None,
        flag(
            "Seed of the initial weights and of the order of the data; the same as --set run.seed.", "SEED", default="0"
        ),
    ] = None
    set_: Annotated[Several, SET] = ()


@dataclass(frozen=True, kw_only=True)
class Machine:
    device: Annotated[
        str | None, flag("Device, such as cpu, cuda or cuda:1; the same as --set run.device.", "DEVICE", default="cpu")
    ] = None
    precision: Annotated[
        Literal["float32", "bfloat16", "float64"] | None,
        flag("float32, bfloat16 (autocast; on several processes FSDP2's mixed precision) or float64; the same as --set "
             "run.precision.", "PRECISION", default="float32"),
    ] = None  # fmt: skip
    compile: Annotated[bool, switch("Use torch.compile; the same as --set run.compile=true.")] = False
    recompute: Annotated[
        int | None,
        flag("Activation checkpointing: keep the state over depth every N sublayers and recompute what is between; the "
             "same as --set run.recompute.", "N", default="none"),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Annotated[
        Path | None,
        flag("Folder of the run. If it contains an unfinished run, training resumes.", "FOLDER",
             default="runs/MIXER-DEPTH, or runs/MODEL-MIXER"),
    ] = None  # fmt: skip
    restart: Annotated[bool, switch("Remove the earlier run in the folder, and train from step 0.")] = False
    yes: Annotated[bool, switch("Start even if the run will take more than a day on this machine.")] = False
    print_config: Annotated[
        bool, switch("Print the resolved configuration as TOML and exit: every field that --set takes, with its value.")
    ] = False
    every: Annotated[int, flag("Without a terminal, print a line every N steps.", "N")] = 1
    json: Annotated[bool, switch("Print the result as one JSON object.")] = False


def run(
    *,
    model: Model = Model(),
    data: TrainingData = TrainingData(),
    training: Training = Training(),
    machine: Machine = Machine(),
    processes: Processes = BY_DEFAULT,
    run: Run = Run(),
) -> int:
    """Train a decoder, or a model of Hugging Face transformers further.

    Progress goes to stderr, the result to stdout.

    On several processes: torchrun --nproc-per-node 4 -m depthmix train --tp 2 …, with the flags of the part
    "processes"; any product of them. The result does not depend on them.

    --print-config shows every field of the configuration and its value; --set changes any of them.

    Exit code 1 if training stopped by itself (a bad loss, a full disk), 130 after Ctrl-C; both can be resumed by the
    same command.
    """
    chosen = resolve_config(model, run.folder, training.tokens, given_fields(data, training, machine, processes))
    numbers = "" if model.preset is None else describe_recipe(model.preset, chosen)
    if run.print_config:
        print(f"# {numbers}\n{chosen.to_toml()}" if numbers else chosen.to_toml(), end="")
        return 0
    if main_process():
        for line in (numbers, *changes_at_start(chosen)):
            say(line) if line else None
    if chosen.run.device == "cpu":
        keep_freed_memory()
    seconds = estimate_seconds(chosen)
    if main_process():
        check_duration(seconds(steps_left(chosen, run.restart)), run.yes)
    result = train_until_stopped(chosen, run.restart, TrainingProgress(chosen, run.every, seconds))
    if isinstance(result, int):
        return result
    if not main_process():
        return 0
    if run.json:
        print(json_format.dumps(dataclasses.asdict(result), indent=2))
        return 0
    print_result(
        f"{chosen.run.folder}: validation loss {result.validation_loss:.4f}, {result.bits_per_byte:.4f} bits per byte "
        f"after {result.tokens:,} tokens; {result.tokens_per_second:,.0f} tokens/s, "
        f"{result.peak_memory_bytes / 2**20:,.0f} MiB, {result.flops:.3g} FLOPs"
    )
    return 0


def given_fields(
    data: TrainingData, training: Training, machine: Machine, processes: Processes = BY_DEFAULT
) -> list[tuple[str, Any]]:
    """Dotted keys and values, of --set and of the flags that stand for a key; one key takes one of both."""
    flags = {
        "data": ("data.source", data.data),
        "tokenizer": ("data.tokenizer", data.tokenizer),
        "context": ("data.tokens_per_row", data.context),
        "batch": ("data.rows", data.batch),
        "steps": ("run.steps", training.steps),
        "lr": ("optimizer.lr", training.lr),
        "seed": ("run.seed", training.seed),
        "device": ("run.device", machine.device),
        "precision": ("run.precision", machine.precision),
        "compile": ("run.compile", machine.compile or None),
        "recompute": ("run.recompute", machine.recompute),
        "pp-cache": ("parallel.pp_cache", None if processes.pp_cache is None else processes.pp_cache == "on"),
    }
    for field in dataclasses.fields(processes):
        if field.name != "pp_cache":
            name = field.name.replace("_", "-")
            flags[name] = (f"parallel.{field.name}", getattr(processes, field.name))
    pairs = [split_pair(text, "optimizer.weight_decay=0.05") for text in training.set_]
    keys = {key for key, _ in pairs}
    for name, (key, value) in flags.items():
        if value is not None and key in keys:
            raise ValueError(f"--{name} {value} and --set {key}=…; expected only one of them: they set the same field")
    return [*pairs, *((key, value) for key, value in flags.values() if value is not None)]


def steps_left(config: TrainConfig, restart: bool) -> int:
    """Steps between the newest checkpoint and the end of the run."""
    folder = Path(config.run.folder)
    done = 0 if restart else max(map(step_of, list_checkpoints(folder / "checkpoints")), default=0)
    return max(0, config.run.steps - done)


def check_duration(seconds: float, accepted: bool) -> None:
    """More than a day must be meant: it takes --yes on a terminal, and a warning elsewhere."""
    if seconds <= DAY or accepted:
        return
    duration = f"this run will take roughly {format_duration(seconds)} on this machine"
    if sys.stderr.isatty():
        raise ValueError(f"{duration}. Add --yes to start it, or choose a smaller budget with --tokens or --depth")
    say(f"depthmix: {duration}; a smaller budget (--tokens, --depth) or a faster --device takes less")


def train_until_stopped(chosen: TrainConfig, restart: bool, progress: TrainingProgress) -> Result | int:
    """The result, or the exit code of a run that stopped; why it did is then on stderr."""
    resume = f"To resume: depthmix train --folder {shlex.quote(chosen.run.folder)}"
    says = main_process()
    try:
        result = train(chosen, resume=not restart, report=progress.report)
    except FileNotFoundError:
        raise
    except (BadLoss, CheckpointError) as error:  # the same on all ranks
        reason, code = str(error), 1
    except OSError as error:  # of this rank: a full disk; or another one has ended, and none of the others knows which
        reason, code, says = str(error), 1, True
    except Interrupted as error:
        reason, code = f"{error}. {resume}", 130
    except KeyboardInterrupt:  # before the first step, or a second time
        reason, code = f"stopped immediately; progress since the last checkpoint is lost. {resume}", 130
    else:
        if progress.display is None and main_process():
            say(f"depthmix: {chosen.run.folder} is already complete; --restart trains it again from step 0")
        return result
    finally:
        progress.end()
    if says:
        say(f"depthmix: {reason}")
    return code


def resolve_config(
    model: Model, folder: Path | None, tokens: float | None, pairs: list[tuple[str, Any]]
) -> TrainConfig:
    """File, preset, dial or a model of transformers first, then dotted keys, the later ones last. A folder alone says
    it all, to restart too."""
    mixer, depth, dim, preset, file = model.mixer, model.depth, model.dim, model.preset, model.config
    if tokens is not None and not 0 < tokens < math.inf:
        raise ValueError(f"tokens={tokens}; expected a number above 0")
    saved = None if folder is None else folder / "config.toml"
    chosen = (file, preset, depth, dim, mixer, model.backbone)
    if saved is not None and saved.is_file() and all(given is None for given in chosen):
        file = saved
    check_one_start(model.config, preset, depth, dim, model.backbone, model.from_hf)
    keys = dict(pairs)
    if model.freeze_base:
        pairs = [*pairs, ("model.freeze_base", True)]
    if model.from_hf is not None:
        config = from_transformers(model, model.from_hf, file, keys.get("data.tokenizer"))
    elif file is not None:
        config = from_file(file, mixer)
    elif preset is not None and preset != RULE:
        config = preset_config(preset, mixer, tokenizer=keys.get("data.tokenizer"))
    else:
        # Fields of the model that others follow from must be there when these are derived.
        sizes: dict[str, Any] = {
            name: parse_whole(name, keys[f"model.{name}"]) for name in ("dim", "vocab_size") if f"model.{name}" in keys
        }
        if dim is not None:
            sizes["dim"] = dim
        sizes["tokenizer"] = keys.get("data.tokenizer", "bytes")
        dial = 12 if depth is None else depth
        if model.backbone is not None:
            sizes["backbone"] = model.backbone
        if preset == RULE:
            config = rule_config(dial, mixer=mixer, tokens=tokens, **sizes)
        else:
            optimizer = keys.get("optimizer.name", "muon")
            config = TrainConfig.from_dial(dial, mixer or "residual", optimizer=optimizer, **sizes)
    if model.freeze_base and isinstance(config.model, DecoderConfig):
        raise ValueError("--freeze-base without --from-hf; expected both: a new decoder has no base to freeze")
    recipe_tokens = config.run.steps * config.tokens_per_step
    config = override_all(config, [*pairs, *([] if folder is None else [("run.folder", str(folder))])])
    check_excluding(config, keys)
    if tokens is None and file is None and isinstance(config.model, DecoderConfig):
        tokens = dial_tokens(config.model) if preset is None else recipe_tokens
    if tokens is not None and "run.steps" not in keys:
        config = override(config, "run.steps", max(1, round(tokens / config.tokens_per_step)))
    return config


def check_one_start(
    file: Path | None,
    preset: str | None,
    depth: int | None,
    dim: int | None,
    backbone: str | None,
    from_hf: str | None = None,
) -> None:
    """A file, a preset, a model and the dial exclude each other; the rule of a table takes the dial's sizes."""
    starts = {"config": file, "preset": preset, "depth": depth, "dim": dim, "backbone": backbone}
    for name, given in starts.items():
        if from_hf is not None and given is not None:
            raise ValueError(f"from_hf={from_hf} and {name}={given}; expected only one of them")
    if file is not None and preset is not None:
        raise ValueError(f"preset={preset} and config={file}; expected only one of them")
    start = f"config={file}" if file is not None else f"preset={preset}" if preset not in (None, RULE) else None
    for name, key, given in (("depth", "layers", depth), ("dim", "dim", dim)):
        if start is not None and given is not None:
            other = f", or --preset {RULE} for other sizes" if file is None else ""
            raise ValueError(f"{name}={given} and {start}; expected only one of them, or set model.{key}{other}")
    if start is not None and backbone is not None:
        raise ValueError(
            f"backbone={backbone} and {start}; expected only one of them: the {start.split('=')[0]} has one"
        )


def from_file(file: Path, mixer: str | None) -> TrainConfig:
    if not file.is_file():
        raise FileNotFoundError(f"no configuration at {file}; expected a TOML file such as a run's config.toml")
    config = TrainConfig.from_file(file)
    for name, value in chosen_mixers(mixer).items():
        config = override(config, f"model.{name}", value)
    return config


def from_transformers(model: Model, folder: str, file: Path | None, tokenizer: str | None) -> TrainConfig:
    """A new run of the model in `folder`, or the run that `file` describes, whose model is in `folder` now."""
    saved = None if file is None else TrainConfig.from_file(file)
    if saved is None or not isinstance(saved.model, RetrofitConfig):
        mixer = model.mixer or "residual"
        return retrofit_config(folder, mixer, tokenizer=tokenizer, freeze_base=model.freeze_base)
    data = saved.data
    if saved.uses_own_tokenizer:
        data = dataclasses.replace(data, tokenizer=retrofit_tokenizer(folder))
    return dataclasses.replace(saved, model=saved.model.moved(folder), data=data)


def changes_at_start(config: TrainConfig) -> list[str]:
    """What a new run's mechanism changes in a trained model from the start."""
    model, has_begun = config.model, list_checkpoints(Path(config.run.folder) / "checkpoints")
    return [] if isinstance(model, DecoderConfig) or has_begun else warn_of_changes(model)


def parse_whole(name: str, value: str) -> int:
    if not value.isdigit():
        raise ValueError(f"model.{name}={value}; expected a whole number")
    return int(value)
