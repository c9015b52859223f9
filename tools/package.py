"""Build sdist and wheel into dist/, compare them with what git tracks and try each in an empty environment.

    make package

The wheel is built from the sdist, so the sdist is complete enough to build from. Each is installed with
constraints.txt into a virtual environment of its own, where `depthmix verify` runs from another folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
NOT_SHIPPED = (".ci/", ".gitignore")  # of the repository only
SOURCE = "src/"


def main() -> None:
    files = tracked()
    sdist, wheel = build()
    report(sdist, missing_in_sdist(sdist, files))
    report(wheel, missing_in_wheel(wheel, files))
    for artefact in (sdist, wheel):
        run_verify(artefact)


def tracked() -> list[str]:
    """Files of the repository that a release ships."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{ROOT} is no git checkout; expected one: the archives are compared with the files that git tracks")
    return shipped(done.stdout.splitlines())


def shipped(files: Iterable[str]) -> list[str]:
    return [name for name in files if not name.startswith(NOT_SHIPPED)]


def build() -> tuple[Path, Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def missing_in_sdist(sdist: Path, files: Iterable[str]) -> list[str]:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    return sorted(set(files) - held)


def missing_in_wheel(wheel: Path, files: Iterable[str]) -> list[str]:
    """Of the package itself: modules, sources of native code, py.typed."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    return sorted({name.removeprefix(SOURCE) for name in files if name.startswith(SOURCE)} - held)


def report(artefact: Path, missing: list[str]) -> None:
    if missing:
        sys.exit(
            f"{artefact.name} lacks {', '.join(missing)}; add them under [tool.hatch.build.targets] in pyproject.toml, "
            f"or to NOT_SHIPPED in {Path(__file__).name} if no user and no test needs them"
        )
    print(f"{artefact.name}: complete, {artefact.stat().st_size / 1e6:.1f} MB", flush=True)


def run_verify(artefact: Path) -> None:
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")  # what is installed must be found by itself
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "venv"
        venv.create(place, with_pip=True)
        bin_folder = place / "bin"
        install = [str(bin_folder / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([*install, *constraints, str(artefact)], cwd=folder, env=environment, check=True)
        print(f"{artefact.name}: installed; depthmix verify", flush=True)
        subprocess.run([str(bin_folder / "depthmix"), "verify"], cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    main()
