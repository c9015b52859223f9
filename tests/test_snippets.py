"""What README, pages and examples show works: Python blocks run, scripts run, and every command line is accepted.

Blocks of one page share a scope, in the order of the page and in an empty folder. A block whose first line is
`# no-run: REASON` is left out, and listed here with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import depthmix as dm
from depthmix.cli import VERBS, main
from depthmix.mechanisms import kv_mechanism, mechanism
from depthmix.training import TrainConfig

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
TAKEN_FOR_GRANTED = {  # what blocks of the mechanisms' pages use without making it
    "docs/mechanisms/attnres.md": "import torch",
    "docs/mechanisms/ddl.md": "import depthmix as dm",
    "docs/mechanisms/mhc_lite.md": (
        "import torch\ngamma = torch.zeros(32)\npre, post, res = (torch.randn(32, rows) for rows in (4, 4, 24))"
    ),
}
ELSEWHERE = {  # pages whose blocks another test runs
    "CONTRIBUTING.md": "tests/mechanisms/test_contributing.py",
    "docs/evaluation.md": "tests/hf/test_harness.py",
}
NOT_RUN = {  # every block that no test runs, by its page
    "docs/own_model.md": ["needs several processes, started by torchrun"] * 2,
    "docs/pipelines.md": ["needs several processes, started by torchrun"],
}
EXAMPLES = {  # the test that runs each script
    "compare_demo.py": "tests/test_snippets.py",
    "figures.py": "tests/analysis/test_plot_effects.py",
    "hf_interpret.py": "tests/hf/test_examples.py",
    "hf_retrofit.py": "tests/hf/test_examples.py",
    "hf_trainer.py": "tests/hf/test_examples.py",
    "long_prompt.py": "tests/inference/test_prefill.py",
    "mixing_matrices.py": "tests/test_house.py",
    "own_attention.py": "tests/mechanisms/test_own_attention.py",
    "pipeline_gpt.py": "tests/parallel/test_pipeline.py",
}
DIAL = TrainConfig.from_dial(2, "residual")
MECHANISMS = {
    "mixer": [mechanism(name) for name in dm.list_mechanisms()],
    "kv_mixer": [kv_mechanism(name) for name in dm.list_mechanisms(kind="kv")],
    "loop": [types.SimpleNamespace(Config=dm.LoopConfig)],
    "kda": [types.SimpleNamespace(Config=dm.KDAConfig)],
    "mla": [types.SimpleNamespace(Config=dm.MLAConfig)],
    "moe": [types.SimpleNamespace(Config=dm.MoEConfig)],
}
FIELDS = {  # what `--set` and `--sweep` take, without a leading "model."
    *(f"{part.name}.{field.name}" for part in fields(DIAL) for field in fields(getattr(DIAL, part.name))),
    *(field.name for field in fields(DIAL.model)),
    *(f"{child}.{field.name}" for child, classes in MECHANISMS.items() for c in classes for field in fields(c.Config)),
}


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGES[page], re.S | re.M)


def reason_not_to_run(block: str) -> str | None:
    match = re.match(r"# no-run: (.+)\n", block)
    return match and match[1]


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page) and page not in ELSEWHERE])
def test_the_python_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": page}
    exec(TAKEN_FOR_GRANTED.get(page, ""), scope)
    for number, block in enumerate(python_blocks(page), start=1):
        if reason_not_to_run(block) is None:
            exec(compile(block, f"{page}, block {number}", "exec"), scope)


def test_blocks_that_are_not_run_are_listed_with_their_reason() -> None:
    reasons = {
        page: [reason for block in python_blocks(page) if (reason := reason_not_to_run(block))] for page in PAGES
    }
    assert {page: found for page, found in reasons.items() if found} == NOT_RUN
    assert all(re.search(r"```python", (ROOT / page).read_text()) for page in (*ELSEWHERE, *TAKEN_FOR_GRANTED))


def test_no_python_block_hides_behind_another_spelling() -> None:
    fences = {fence for text in PAGES.values() for fence in re.findall(r"^ *```(.+)$", text, re.M)}
    assert fences <= {"python", "sh", "text", "toml", "json"}


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)
    for script, test in EXAMPLES.items():
        assert f'"{script}"' in (ROOT / test).read_text(), f"{test} does not run {script}"


def test_the_demo_ends_with_the_page_and_what_each_model_writes(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of {i * i % 97}" for i in range(400)))
    small = ["data.tokens_per_row=16", "data.rows=4", "run.validate_every=0", "run.validate_batches=1"]
    given = ["out", "--depth", "2", "--dim", "16", "--tokens", "640", "--tokenizer", "bpe:300", "--data", "text.txt"]
    given += [word for pair in small for word in ("--set", pair)]
    script = ROOT / "examples" / "compare_demo.py"
    done = subprocess.run([sys.executable, script, *given], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the whole page: out/comparison.md" in done.stdout
    assert done.stdout.count("continues the prompt ---\ndef __init__(self, ") == 3
    page = (tmp_path / "out" / "comparison.md").read_text()
    assert "depthmix compare --mixers residual block_attnres depth_attention" in page


# Command lines.


def commands(page: str) -> Iterator[list[str]]:
    """Words of every command in the page's shell blocks and indented lines."""
    indented = re.findall(r"^    (depthmix .*\n)", PAGES[page], re.M)
    for block in [*re.findall(r"^ *```sh\n(.*?)^ *```", PAGES[page], re.S | re.M), *indented]:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = next((i for i, word in enumerate(words) if word in ("|", "&&", "&", ">")), len(words))
                if words[:end]:
                    yield words[:end]
                words = words[end + 1 :]


def depthmix_arguments(words: list[str]) -> list[str] | None:
    """What depthmix is given, by whichever way it is started; None: another program."""
    if Path(words[0]).name == "depthmix":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1] == "depthmix":
        return words[words.index("-m") + 2 :]
    return None


COMMANDS = sorted(
    {(page, tuple(given)) for page in PAGES for words in commands(page) if (given := depthmix_arguments(words))}
)


def verb_module(verb: str) -> Any:
    return importlib.import_module(f"depthmix.cli.{verb}")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The command line with verbs that do nothing but keep what they were given."""
    kept: dict[str, Any] = {}

    def replaced(run: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(run)
        def keep(*args: Any, **given: Any) -> int:
            for name, value in inspect.signature(run).bind(*args, **given).arguments.items():
                kept.update(vars(value) if is_dataclass(value) else {name: value})  # flags in groups, or one by one
            return 0

        return keep

    for verb in VERBS:
        monkeypatch.setattr(verb_module(verb), "run", replaced(verb_module(verb).run))
    return kept


@pytest.mark.parametrize(
    ("page", "given"), COMMANDS, ids=[f"{page}: {' '.join(given)[:60]}" for page, given in COMMANDS]
)
def test_a_command_of_a_page_is_accepted(page: str, given: tuple[str, ...], parsed: dict[str, Any]) -> None:
    assert main(given) == 0
    assert given[0] in VERBS
    assert parsed
    if given[0] in ("train", "compare", "scaling"):
        for pair in (*parsed.get("set_", ()), *parsed.get("sweep", ())):
            key = ".".join(pair.partition("=")[0].removeprefix("model.").split(".")[:2])
            assert key in FIELDS, f"{page}: no field {pair}"


@functools.cache
def flags(verb: str) -> frozenset[str]:
    """Those that the verb's help names."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main([verb, "--help"])
    lines = re.findall(r"^[│ ] {1,2}(-\S.*)", out.getvalue(), re.M)
    heads = [line.split("  ")[0] for line in lines]  # without their meaning, which may name other flags
    return frozenset(name for head in heads for name in re.findall(r"--[a-z-]+[a-z]", head) if name[:5] != "--no-")


def test_commands_in_sentences_have_flags_that_exist() -> None:
    inline = [(page, *m) for page, text in PAGES.items() for m in re.findall(r"`depthmix ([a-z]+)( [^`\n]*)?`", text)]
    assert len(inline) > 40
    for page, verb, rest in inline:
        assert verb in VERBS, f"{page}: depthmix {verb}"
        unknown = set(re.findall(r"--[a-z][a-z-]+", rest)) - flags(verb)
        assert not unknown, f"{page}: depthmix {verb}{rest}"


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_of_the_command_line_names_every_flag(verb: str) -> None:
    (text,) = [part for part in PAGES["docs/cli.md"].split("\n## ") if part.startswith(f"depthmix {verb}")]
    common = {"--help", "--json"}  # of all verbs, named once at the top
    assert "--json" in flags(verb)
    assert flags(verb) - common - set(re.findall(r"--[a-z-]+[a-z]", text)) == set()
