"""Was the page of the report built from the sources beside it?

    python -m tools.web_sources     # prints the digest of web/'s sources; exit code 1 if the page carries another
    python -m tools.web_sources --check     # builds the page again and compares its bytes; needs npm ci in web/

`npm run build` in web/ writes the digest into the page (web/vite.config.ts computes it in the same way). The page is
package data and committed, so that nobody needs Node to use depthmix; a test compares the two digests.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from depthmix.support.files import replacing
from tools.checkouts import ROOT

WEB = ROOT / "web"
PAGE = ROOT / "src" / "depthmix" / "report" / "page.html"
SINGLE = ("index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts")
STAMP = re.compile(r'<meta name="depthmix-web" content="([0-9a-f]{64})"')


def sources_digest(root: Path) -> str:
    """SHA-256 over path and content of every file that the page is built from; `root` is the folder web/."""
    nested = [path.relative_to(root).as_posix() for path in (root / "src").rglob("*") if path.is_file()]
    whole = hashlib.sha256()
    for name in sorted([*SINGLE, *nested]):
        content = hashlib.sha256((root / name).read_bytes()).hexdigest()
        whole.update(f"{name}\n{content}\n".encode())
    return whole.hexdigest()


def bundle_digest(page: Path) -> str:
    """The digest that a built page carries."""
    found = STAMP.search(page.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{page} carries no digest of its sources. Build it again: make web")
    return found[1]


def rebuilt(page: Path) -> bool:
    """Whether a new build gives the same bytes. The page is left as it was."""
    before = page.read_bytes()
    try:
        subprocess.run(["npm", "--prefix", str(WEB), "run", "--silent", "build"], check=True)
        return page.read_bytes() == before
    finally:
        with replacing(page) as part:
            part.write_bytes(before)


def main(arguments: Sequence[str] = ()) -> int:
    built, current = bundle_digest(PAGE), sources_digest(WEB)
    print(current)
    if built != current:
        print(f"{PAGE.name} has {built}: other sources. Run: make web", file=sys.stderr)
        return 1
    if "--check" in arguments and not rebuilt(PAGE):
        print(f"a new build of {PAGE.name} has other bytes. Run: make web", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
