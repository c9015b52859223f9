"""A mechanism of another package that is broken is named, with the reason; nothing else breaks with it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import depthmix as dm
from depthmix.analysis.invariants import verify
from depthmix.cli import main
from depthmix.mechanisms import PluginError, registry
from depthmix.mechanisms.residual import Residual

GOOD = "from depthmix.mechanisms.residual import Residual\nclass Good(Residual):\n    pass\n"
# How each is broken: the module, the attribute that its entry point names, and the reason to be told.
BROKEN = {
    "on_meta": (
        "import torch\nfrom depthmix.mechanisms.residual import Residual\nclass Mixer(Residual):\n"
        "    def reset_parameters(self):\n        assert torch.ones(3).sum().item() == 3\n",
        "Mixer",
        "meta",
    ),
    "facts": (
        "from depthmix.mechanisms.residual import Residual\nclass Mixer(Residual):\n"
        "    @classmethod\n    def facts(cls, config, *, dim, depth):\n        return {}['parameters']\n",
        "Mixer",
        "KeyError: 'parameters'",
    ),
    "facts_of_no_kind": (
        "from depthmix.mechanisms.residual import Residual\nclass Mixer(Residual):\n"
        "    @classmethod\n    def facts(cls, config, *, dim, depth):\n        return 7\n",
        "Mixer",
        "TypeError: facts returned a int; expected a depthmix.Facts",
    ),
    "options": (
        "from depthmix.mechanisms.residual import Residual\nclass Mixer(Residual):\n    Config = dict\n",
        "Mixer",
        "TypeError",
    ),
    "importing": ("raise OSError('no licence key')\n", "Mixer", "OSError: no licence key"),
    "leaving": ("import sys\nsys.exit('goodbye')\n", "Mixer", "SystemExit: goodbye"),
    "nothing": ("", "Mixer", "AttributeError"),
    "function": ("def mixer(site, config):\n    return None\n", "mixer", "is a function; expected a subclass of"),
    "other_class": ("class Mixer:\n    pass\n", "Mixer", "is the class Mixer; expected a subclass of"),
}
LOADS = ("on_meta", "facts", "facts_of_no_kind", "options")
EACH = pytest.mark.parametrize("how", BROKEN)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages as pip would install them, one good and the others broken, and an empty folder to work in."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    modules = {"good": (GOOD, "Good", ""), **BROKEN}
    for name, (source, attribute, _) in modules.items():
        info = site / f"plugin_{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"plugin_{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[depthmix.mechanisms]\n{name} = plugin_{name}:{attribute}\n")
        monkeypatch.delitem(sys.modules, f"plugin_{name}", raising=False)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(work)
    return work


def told(text: str, how: str) -> bool:
    """One line that names the mechanism, its package and the reason."""
    (line,) = [line for line in text.splitlines() if f"mechanism {how!r} of plugin_{how}:" in line]
    return f"(package plugin-{how})" in line and BROKEN[how][2] in line


def test_list_names_what_is_broken_once_and_lists_the_others(plugins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    out, err = capsys.readouterr()
    names = {row["name"] for row in json.loads(out)}
    assert names == {*registry.DEPTH, *registry.KV, "good"}
    assert all(told(err, how) for how in BROKEN)
    assert "Traceback" not in err
    assert main(["list"]) == 0
    assert "good" in capsys.readouterr().out


@EACH
@pytest.mark.parametrize(
    "command",
    [["show"], ["train", "--depth", "2", "--steps", "1", "--folder", "run", "--mixer"]],
    ids=["show", "train"],
)
def test_a_verb_that_is_given_a_broken_one_ends_with_its_name(
    plugins: Path, how: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, how]) == 2
    out, err = capsys.readouterr()
    assert told(err, how)
    assert not out
    assert not list(plugins.iterdir()), "nothing is written"


def test_other_mechanisms_do_not_notice(plugins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("residual", "depth_attention", "good"):
        assert main(["show", name]) == 0
        assert main(["train", "--mixer", name, "--depth", "2", "--print-config"]) == 0
        assert not capsys.readouterr().err
    with pytest.raises(ValueError, match=r"unknown mechanism 'goood'\. Did you mean 'good'"):
        dm.DepthStack("goood", dim=4, depth=2)


def test_verify_refuses_what_cannot_be_built_on_the_meta_device(
    plugins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "on_meta", "--json"]) == 1
    failed = [row["check"] for row in json.loads(capsys.readouterr().out)["checks"] if not row["holds"]]
    assert len(failed) == 1
    assert failed[0].startswith("builds on the meta device, as `list`, `show` and `train` require: ")
    assert "meta tensors" in failed[0]
    assert [c.name for c in verify("good") if not c.holds] == []


def test_verify_tells_what_is_broken_and_goes_on(
    plugins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "DEPTH", {"residual": registry.DEPTH["residual"]})
    assert main(["verify", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["checks"]
    failed = {row["mechanism"]: row["check"] for row in rows if not row["holds"]}
    assert set(failed) == set(BROKEN)
    assert all(told(text, how) for how, text in failed.items() if how != "on_meta")
    assert {row["mechanism"] for row in rows} == {"residual", "good", *BROKEN}
    assert main(["verify", "residual", "importing"]) == 1
    assert "FAILS" in capsys.readouterr().out


@EACH
def test_in_python_the_error_keeps_its_cause(plugins: Path, how: str) -> None:
    with pytest.raises(PluginError) as caught, torch.device("meta"):
        dm.DepthStack(how, dim=4, depth=2)
    assert told(str(caught.value), how)
    assert (caught.value.__cause__ is None) == (how in ("function", "other_class"))


def test_in_python_the_list_warns_of_what_cannot_be_loaded_and_leaves_it_out(plugins: Path) -> None:
    with pytest.warns(UserWarning, match="mechanism") as warned:
        names = dm.list_mechanisms()
    assert set(names) == {*registry.DEPTH, "good", *LOADS}
    assert all(told("\n".join(str(w.message) for w in warned), how) for how in BROKEN if how not in LOADS)


def test_a_broken_value_mixer_is_named_too(plugins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = plugins.parent / "site"
    (site / "plugin_good.py").write_text(
        "from depthmix.mechanisms.value_residual import ValueResidual\nclass Good(ValueResidual):\n"
        "    def reset_parameters(self):\n        raise RuntimeError('no weights')\n"
    )
    for verb in (["show", "good"], ["train", "--mixer", "attnres+good", "--depth", "2", "--folder", "run"]):
        assert main(verb) == 2
        assert re.search(r"mechanism 'good' of plugin_good:Good .* RuntimeError: no weights", capsys.readouterr().err)
    assert main(["list"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"mechanism 'good' .* no weights\. It is left out", printed.err)
    assert "depth_attention" in printed.out


def test_wrong_options_of_a_plugin_are_the_users_and_not_its_own(plugins: Path) -> None:
    with pytest.raises(ValueError, match="good has no option 'start'") as caught:
        dm.DepthStack("good", dim=4, depth=2, start=1)
    assert not isinstance(caught.value, PluginError)


@pytest.mark.parametrize("error", [KeyError, RuntimeError, AttributeError])
@pytest.mark.parametrize("verb", [["list"], ["show", "residual"], ["verify", "residual"]], ids=lambda verb: verb[0])
def test_errors_of_our_own_mechanisms_are_bugs_and_look_like_it(
    error: type[Exception], verb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def facts(cls: type, config: object, *, dim: int, depth: int) -> dm.Facts:
        raise error("a bug")

    monkeypatch.setattr(Residual, "facts", classmethod(facts))
    with pytest.raises(error, match="a bug"):
        main(verb)
