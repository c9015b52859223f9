"""Random command lines over every verb, with options and files that may be damaged. A line follows from its number.

Verbs and options are read from the command line itself, so new ones join by themselves. `python -m tests.fuzz NUMBER…`
runs single lines again and shows where an error comes from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import pkgutil
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import tyro

import depthmix as dm
import depthmix.cli
from depthmix.cli import main
from depthmix.cli.processes import Processes, Serving
from depthmix.models.names import FORMATS, write_checkpoint
from depthmix.models.presets import PRESETS
from depthmix.training import TrainConfig
from depthmix.training.identity import leaves

CODES = (0, 1, 2, 130)
MOST_SECONDS = 30  # of CPU time for a line
MOST_PARAMETERS = 200_000  # of a model that is trained here
# Words of Python itself: such a message names neither the value nor what to do.
PYTHON_WORDS = re.compile(
    r"unsupported operand|not supported between|object is not|indices must be|unexpected keyword|has no attribute|"
    r"positional argument|must be real number|required argument|codec can't|too large to convert|string longer than"
)

ABSURD = [
    *(
        "",
        " ",
        "-",
        "=",
        "+",
        ",",
        "x",
        "None",
        "null",
        "true",
        "nan",
        "inf",
        "-1",
        "0",
        "1e400",
        "4611686018427387904",
    ),
    *(
        "[/b]",
        "[bold]red",
        "[/",
        "{0}",
        "%s%n",
        "\\",
        "'\"",
        "é漢字🙂",
        "\u202e\x1b[31m",
        "two\nlines",
        "\udcff",
        "x" * 300,
    ),
    *("~nobody_here/x", "~", ".", "/no/such/folder", "text", "text/0.txt", "text/0.txt/below", "missing.json"),
]
WHOLE = ["1", "2", "2", "3", "4", "4", "8", "16"]
WHOLE_ABSURD = [
    *("-9223372036854775809", "-1", "0", "2147483648", "4611686018427387904", "9223372036854775807"),
    *("18446744073709551616", "9" * 30, "9" * 5000, "1.5", "1e3", "nan", "", "x", "½"),
]
NUMBERS = ["0", "0.1", "0.5", "1", "2", "100", "1e-3"]
NUMBERS_ABSURD = ["-1", "nan", "inf", "-inf", "1e400", "1e300", "1e-320", "", "x", "9" * 400]
DEVICES = [
    "cpu",
    "cpu:0",
    "cpu:7",
    "cuda",
    "cuda:99",
    "mps",
    "meta",
    "meta:3",
    "xla",
    "nowhere",
    "",
    "privateuseone",
    "hpu",
]
MECHANISMS = [*dm.list_mechanisms(), *dm.list_mechanisms(kind="kv"), "attnres+value_residual"]
FILES = [
    "run",
    "half",
    "study",
    "tokens",
    "model",
    "stack",
    "foreign",
    "report.json",
    "config.toml",
    "tokenizer.json",
    "rows.jsonl",
    "text",
]
PATHS = [*FILES, "run/final", "run/config.toml", "run/result.json", "new", "new/below", "new.json", "new.png", "empty"]
# Where an option's name says what it takes; others draw from all of it.
WORDS = {
    "device": DEVICES,
    "dtype": ["float32", "bfloat16", "int8", "float8_e4m3fn", "Tensor", "nn"],
    "preset": [*PRESETS, "all"],
    "mixer": MECHANISMS,
    "mixers": MECHANISMS,
    "name": MECHANISMS,
    "names": dm.list_mechanisms(),
    "shapes": ["2x16", "2x16,4", "4x4611686018427387904", "99999999999999999999", "0x0"],
    "sizes": ["2x16", "4x16", "2", "4x4611686018427387904", "99999999999999999999", "0x0"],
    "data": ["stdlib", "text", "rows.jsonl", "rows.parquet", "hf:none/such", "tokens"],
    "from_": [*FORMATS],
    "to": [*FORMATS],
    "tokenizer": ["bytes", "bpe:300", "bpe:9", "bpe:99999999999999999999", "tokenizer.json", "run/config.toml"],
}
RUNS = ["run", "model", "model", "half", "study", "run/final"]
PLACES = {
    "directory": RUNS,
    "folders": RUNS,
    "folder": ["run", "run", "half", "half", "study", "model", "new"],
    "saved": ["report.json"],
    "source": ["run", "half", "model", "stack", "foreign"],
    "target": ["new", "new/below", "empty", "foreign", "stack"],
    "config": ["config.toml", "run/config.toml"],
}
KEYS = [
    *(key for key, _ in leaves(TrainConfig.from_dial(2, "attnres+depth_attention").to_dict())),
    *(
        f"mixer.{field.name}"
        for name in dm.list_mechanisms()
        for field in dataclasses.fields(dm.mechanism(name).Config)
    ),
    *(
        "model.moe.hidden",
        "model.moe.experts",
        "model.loop.first",
        "model.loop.last",
        "model.loop.repeats",
        "run",
        "",
        ".",
    ),
]
LAYOUT = {field.name for group in (Processes, Serving) for field in dataclasses.fields(group)} - {
    *("schedule", "divide", "pp_cache", "microbatches"),
}
ELSEWHERE = ("from_hf", "freeze_base")  # need a model of transformers: lines with them end early here
RARE = 0.03
TINY = [
    *("data.rows=2", "data.tokens_per_row=8", "data.folder=tokens", "data.validation=0.3", "run.validate_batches=1"),
    *("model.hidden=24", "run.validate_every=1"),
]
SETTINGS = [("--set", pair) for pair in TINY]
SMALL = {  # what a line gets besides, so that most of them go all the way
    "train": [("--depth", "2"), ("--dim", "16"), ("--data", "text"), ("--steps", "2"), *SETTINGS],
    "compare": [
        ("--folder", "study"),
        ("--depth", "2"),
        ("--dim", "16"),
        ("--data", "text"),
        ("--seeds", "2"),
        *SETTINGS,
    ],
    "scaling": [("--sizes", "2x16", "4x16"), ("--tokens", "64"), ("--data", "text"), *SETTINGS],
}
SMALL["compare"].append(("--tokens", "64"))
SMALL["generate"] = [("--max-new-tokens", "3")]
SMALL["convert"] = [("--to", "fla")]


@dataclasses.dataclass(frozen=True)
class Option:
    name: str
    flag: str  # empty: by its place
    hint: Any  # of one value
    many: bool = False  # several values after one flag
    repeated: bool = False  # or several flags
    needed: bool = False


def verbs() -> dict[str, Callable[..., int]]:
    """One file a verb."""
    names = [module.name for module in pkgutil.iter_modules(depthmix.cli.__path__)]
    modules = {name: importlib.import_module(f"depthmix.cli.{name}") for name in names if not name.startswith("_")}
    return {name: module.run for name, module in modules.items() if hasattr(module, "run")}


def options_of(group: Any) -> list[Option]:
    """The options that a function or a group, a dataclass, declares; those of groups inside it in their order."""
    found = []
    hints = typing.get_type_hints(group, include_extras=True)
    for name, parameter in inspect.signature(group).parameters.items():
        hint, marks = hints[name], getattr(hints[name], "__metadata__", ())
        hint = typing.get_args(hint)[0] if marks else hint
        if dataclasses.is_dataclass(hint):
            found += options_of(hint)
            continue
        if isinstance(hint, types.UnionType):
            hint = next(h for h in typing.get_args(hint) if h is not type(None))
        many = typing.get_origin(hint) is tuple
        given = next((mark.name for mark in marks if getattr(mark, "name", None)), name.strip("_").replace("_", "-"))
        found.append(
            Option(
                name=name,
                flag="" if tyro.conf.Positional in marks else f"--{given}",
                hint=typing.get_args(hint)[0] if many else hint,
                many=many,
                repeated=tyro.conf.UseAppendAction in marks,
                needed=parameter.default is inspect.Parameter.empty,
            )
        )
    return found


OPTIONS = {verb: options_of(run) for verb, run in verbs().items()}


@dataclasses.dataclass(frozen=True)
class Line:
    number: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(["depthmix", *self.words])


def make_line(number: int) -> Line:
    chance = random.Random(f"line {number}")
    verb = list(OPTIONS)[number % len(OPTIONS)]
    folly = chance.choice([0.0, 0.03, 0.3])  # share of absurd values: a line with many of them does not get far
    words = [verb if chance.random() > folly / 30 else chance.choice(ABSURD)]
    for option in OPTIONS[verb]:
        likely = (
            0.95 if option.needed or not option.flag else 0.4 if option.name in (*PLACES, "set_", "options") else 0.15
        )
        if option.name in ELSEWHERE:
            apart = random.Random(f"line {number} {option.name}")
            words += spelled(option, apart, folly) if apart.random() < RARE else []
        elif chance.random() < likely:
            words += spelled(option, chance, folly)
    given = {word for word in words if word.startswith("--")}
    for flag, *values in SMALL.get(verb, ()):
        if flag == "--to" and "--from" in given:  # they exclude each other
            continue
        if (flag == "--set" or flag not in given) and chance.random() < 0.97:
            words += [flag, *values]
    if chance.random() < folly / 10:
        words.insert(
            chance.randrange(len(words) + 1), chance.choice([*ABSURD, "--help", "--nothing", "--set", "--json"])
        )
    words += ["--idle", "0.05"] if verb == "explore" else []  # the last one counts: it would serve until Ctrl-C
    return Line(number, tuple(words))


def spelled(option: Option, chance: random.Random, folly: float) -> list[str]:
    if option.hint is bool:
        return [option.flag if chance.random() < 0.9 else f"--no-{option.flag[2:]}"]
    count = chance.choice([0, 1, 1, 2, 3] if folly else [1, 1, 2]) if option.many else 1
    values = [value_of(option, chance, folly) for _ in range(count)]
    if option.repeated:
        return [word for value in values for word in (option.flag, value)]
    return [*filter(None, [option.flag]), *values]


def value_of(option: Option, chance: random.Random, folly: float) -> str:
    """Mostly what is expected, else a boundary or an absurdity."""
    usual, absurd = WORDS.get(option.name, ABSURD + MECHANISMS + DEVICES), ABSURD
    if option.name in LAYOUT:
        usual, absurd = ["1", "1", "1", "1", "1", "1", "2"], WHOLE_ABSURD  # a line runs in one process
    elif option.hint is int:
        usual, absurd = WHOLE, WHOLE_ABSURD
    elif option.hint is float:
        usual, absurd = NUMBERS, NUMBERS_ABSURD
    elif option.hint is Path:
        usual, absurd = PLACES.get(option.name, PATHS), PATHS + ABSURD
    elif typing.get_origin(option.hint) is typing.Literal:
        usual = list(typing.get_args(option.hint))
    elif option.name in ("set_", "sweep", "options") and chance.random() < 0.9:
        return pair(option.name, chance, folly)
    return chance.choice(absurd if chance.random() < folly else usual)


def pair(name: str, chance: random.Random, folly: float) -> str:
    key = chance.choice(ABSURD if chance.random() < folly / 5 else KEYS)
    if name == "options":
        key = key.rsplit(".", 1)[-1]
    pool = [*WHOLE, *NUMBERS, *DEVICES, "true", "false", "none", "[0.9, 0.95]", "float32", "skip", "attnres"]
    absurd = [*ABSURD, *WHOLE_ABSURD, *NUMBERS_ABSURD]
    values = [chance.choice(absurd if chance.random() < folly else pool) for _ in "12"]
    return f"{key}={','.join(values) if name == 'sweep' else values[0]}"


# Damage


def damage(folder: Path, chance: random.Random) -> str:
    """Break one of the files of a folder; what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return "nothing"
    texts = [path for path in files if path.suffix in (".json", ".jsonl", ".toml")]
    path = chance.choice(texts if texts and chance.random() < 0.7 else files)
    ways = [
        truncate,
        flip,
        blank,
        binary,
        remove,
        folder_instead,
        *([retype, retype, retype, retype] if path in texts else []),
    ]
    way = chance.choice(ways)
    way(path, chance)
    return f"{way.__name__} {path.relative_to(folder)}"


def truncate(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)])


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 8]) if data else 0):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def blank(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def binary(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(200))


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def folder_instead(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def retype(path: Path, chance: random.Random) -> None:
    """A value of another type or an absurd one, a field too few or too many; the file stays what it was otherwise."""
    text = path.read_text(errors="replace")
    if path.suffix == ".toml":
        lines = text.splitlines()
        at = chance.choice([i for i, line in enumerate(lines) if "=" in line] or [0])
        value = json.dumps(wrong(chance), ensure_ascii=True)
        lines[at : at + 1] = [] if chance.random() < 0.2 or not lines else [f"{lines[at].partition('=')[0]}= {value}"]
        path.write_text("\n".join(lines))
    elif path.suffix == ".jsonl":
        lines = text.splitlines() or ["{}"]
        at = chance.randrange(len(lines))
        lines[at] = json.dumps(altered(json.loads(lines[at]), chance))
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text(json.dumps(altered(json.loads(text), chance)))


def altered(found: Any, chance: random.Random) -> Any:
    if isinstance(found, dict) and found and chance.random() < 0.9:
        key = chance.choice(list(found))
        if chance.random() < 0.15:
            return {k: v for k, v in found.items() if k != key}
        if chance.random() < 0.05:
            return {**found, "[/b]": 1}
        return {**found, key: altered(found[key], chance)}
    if isinstance(found, list) and found and chance.random() < 0.9:
        at = chance.randrange(len(found))
        return [*found[:at], altered(found[at], chance), *found[at + 1 :]]
    return wrong(chance)


def wrong(chance: random.Random) -> Any:
    return chance.choice(
        [None, True, 0, -1, 1.5, 10**30, 1e300, "", "[/b]", "é🙂", "../x", [], [[1, "a"]], {}, {"a": None}]
    )


# Running


class TooLong(BaseException):
    """A line takes far longer than any should."""


def stop_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """As if somebody pressed Ctrl-C when a function is called once more."""
    seen = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] > calls:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return counted


def small_models_only(function: Callable[..., Any]) -> Callable[..., Any]:
    from depthmix.models import count_parameters

    def checked(config: Any, *others: Any) -> Any:
        if count_parameters(config.model).total > MOST_PARAMETERS or config.tokens_per_step > 10_000:
            raise KeyboardInterrupt
        return function(config, *others)

    return checked


class Ended:
    """A run of a study in this process: the stand-in of a child that has ended."""

    def __init__(self, task: Any, threads: int) -> None:
        from depthmix.training import train

        self.returncode = 1
        (task.folder / "log.txt").write_text("depthmix: stopped\n")
        with contextlib.suppress(Exception):
            train(task.config)
            self.returncode = 0

    def poll(self) -> int:
        return self.returncode

    wait = terminate = poll


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Nothing takes long, uses the network, or starts a process: what would is stopped, as by Ctrl-C."""
    from depthmix import bench
    from depthmix.cli import bench as bench_verb
    from depthmix.cli import verify as verify_verb
    from depthmix.data import sources
    from depthmix.studies import runs
    from depthmix.training import build, loop

    generate = importlib.import_module("depthmix.inference.generate")  # its function has the same name

    def no_network(*args: Any) -> None:
        raise OSError("no network here")

    def too_long(*args: Any) -> None:
        raise TooLong

    few = sources.stdlib_files()[:3]
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (verify_verb, "verify", stop_after(3, verify_verb.verify)),
            (bench_verb, "verify", stop_after(2, bench_verb.verify)),
            (bench.processes, "run_child", stop_after(0, bench.processes.run_child)),
            (generate, "decode", stop_after(4, generate.decode)),
            (generate, "compiled_step", lambda model, cache: generate.decode),
            (loop, "step", stop_after(20, loop.step)),
            (loop, "distribute", small_models_only(build.distribute)),
            (loop, "check_precision", lambda *args: None),  # a process
            (runs, "start", Ended),
            (runs, "PAUSE", 0.0),
            (sources, "stdlib_files", lambda: few),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch("torch.compile", lambda function, **kwargs: function))
        stack.enter_context(mock.patch("socket.socket.connect", no_network))
        stack.enter_context(mock.patch("subprocess.Popen", side_effect=OSError("no processes here")))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        before = signal.signal(signal.SIGPROF, too_long)
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


@dataclasses.dataclass(frozen=True)
class Outcome:
    line: Line
    damage: str
    code: Any
    out: str
    err: str
    problem: str  # empty where all is well

    def __str__(self) -> str:
        words = [
            f"{self.line}",
            f"damage: {self.damage}",
            self.problem,
            f"again: python -m tests.fuzz {self.line.number}",
        ]
        return "\n".join(words)


def run_line(line: Line, samples: Path, folder: Path) -> Outcome:
    """In an empty `folder`, with copies of the samples that the line names."""
    chance = random.Random(f"damage {line.number}")
    named = {re.split(r"[/=,]", part)[0] for word in line.words for part in (word, word.partition("=")[2])}
    for sample in sorted(samples.iterdir()):
        if sample.name in named or sample.name in ("text", "tokens"):
            copy = shutil.copytree if sample.is_dir() else shutil.copyfile
            copy(sample, folder / sample.name)
    (folder / "empty").mkdir()
    wanted = [folder / name for name in sorted(named) if name in FILES]
    done = "none"
    if wanted and chance.random() < 0.6:
        place = chance.choice([path for path in wanted if path.name != "text"] or wanted)
        done = damage(place, chance) if place.is_dir() else f"{damage_file(place, chance)}"
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    problem, code = "", None
    here = Path.cwd()
    os.chdir(folder)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch("sys.argv", ["depthmix", *line.words]),
            mock.patch("sys.stdin", io.StringIO("what a layer reads\n")),
            mock.patch("webbrowser.open"),
            bounded(),
        ):
            try:
                code = main(list(line.words))
            except SystemExit as ended:
                code = 0 if ended.code is None else ended.code
            except (Exception, KeyboardInterrupt, TooLong):
                problem = traceback.format_exc()
    finally:
        os.chdir(here)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]
    return Outcome(line, done, code, texts[0], texts[1], problem or judge(code, *texts))


def damage_file(path: Path, chance: random.Random) -> str:
    ways = [truncate, flip, blank, binary, folder_instead, *([retype] * 6 if path.suffix != ".txt" else [])]
    way = chance.choice(ways)
    way(path, chance)
    return f"{way.__name__} {path.name}"


def judge(code: Any, out: str, err: str) -> str:
    """What is wrong with the end of a line."""
    if code not in CODES:
        return f"exit code {code!r}; expected one of {CODES}\n{err}"
    if "Traceback" in out + err:
        return f"a traceback:\n{out}{err}"
    if code and len((err if code != 1 else out + err).strip()) < 12:
        return f"exit code {code} without a message: {err!r}"
    if code and (empty := re.search(r"depthmix: *$", err, re.M)):
        return f"an empty message: {empty[0]!r}"
    message = next((line for line in err.splitlines() if line.startswith("depthmix:")), "")
    if PYTHON_WORDS.search(message) and "damaged" not in message:
        return f"a message of Python itself: {message}"
    return ""


def make_samples(folder: Path) -> None:
    """A finished run, an interrupted one, models, checkpoints, a study, a report, a tokenizer: small, and whole."""
    from depthmix.bench.report import Report, ratio_rows
    from depthmix.bench.suite import QUICK
    from depthmix.training import override, train

    here = Path.cwd()
    os.chdir(folder)
    try:
        Path("text").mkdir()
        words = random.Random(0)
        for i in range(3):
            line = " ".join(words.choice(["depth", "mixes", "what", "a", "layer", "reads"]) for _ in range(120))
            Path(f"text/{i}.txt").write_text(line + "\n")
        Path("rows.jsonl").write_text("".join(json.dumps({"text": f"row {i} reads"}) + "\n" for i in range(40)))
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()), bounded():
            base = TrainConfig.from_dial(2, "block_attnres", dim=16, heads=2, hidden=24)
            fixed = {"data.source": "text", "data.folder": "tokens", "data.tokens_per_row": 8, "data.rows": 2}
            steps = {"run.steps": 4, "run.checkpoint_every": 2, "run.keep": 1, "run.validate_batches": 1}
            for key, value in {**fixed, **steps, "data.validation": 0.3}.items():
                base = override(base, key, value)
            train(override(base, "run.folder", "run"))
            long = override(override(base, "run.folder", "half"), "run.steps", 100)
            with contextlib.suppress(KeyboardInterrupt):
                train(override(long, "run.validate_every", 3))
        shutil.copytree("run/final", "model")
        stack = dm.load_model("model").depth
        dm.save_stack(stack, "stack")
        write_checkpoint(stack, "foreign", "fla")
        Path("config.toml").write_text(base.to_toml())
        study = [
            "compare",
            "--mixers",
            "residual",
            "block_attnres",
            *(word for words in SMALL["compare"] for word in words),
        ]
        with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(told), bounded():
            assert main(study) == 0, told.getvalue()
        samples = {"residual again": [[1.0, 1.01, 0.99]], "attnres": [[1.1, 1.2, 1.15]]}
        rows = [
            row
            for part in ("step", "decode", "depth")
            for row in ratio_rows(part, samples, bounds={"attnres": 1.12}, at=4)
        ]
        about = {"machine": "a machine", "reads": "torch", "command": "depthmix bench", "rounds": 3, "processes": 1}
        Report(**about, quick=True, sizes=QUICK.to_dict(), notes=["a note"], rows=rows).save(Path("report.json"))
        save_tokenizer(Path("tokenizer.json"))
    finally:
        os.chdir(here)


def save_tokenizer(path: Path) -> None:
    model = {
        "type": "BPE",
        "vocab": {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz \n")},
        "merges": [],
    }
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], **nothing, "model": model}))


def run_lines(numbers: Sequence[int], samples: Path) -> Iterator[Outcome]:
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            yield run_line(make_line(number), samples, Path(folder))


if __name__ == "__main__":
    wanted = [int(word) for word in sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:
        make_samples(Path(made))
        for outcome in run_lines(wanted, Path(made)):
            print(f"{outcome}\nexit code {outcome.code}\n--- stdout\n{outcome.out}\n--- stderr\n{outcome.err}")
