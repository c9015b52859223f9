"""Tasks of our own for the lm-evaluation-harness, and the suites of the papers by name.

A suite is a list of names that the harness knows, and of the task files in this folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent  # its *.yaml are task files
SUITES = {
    "attnres-paper": (  # arXiv 2603.15031, Table 3
        *("mmlu", "mmlu_pro", "gpqa_diamond_zeroshot", "bbh", "arc_challenge", "hellaswag", "triviaqa"),
        *("gsm8k", "mgsm_direct", "minerva_math", "cmath", "humaneval", "mbpp", "cmmlu", "ceval-valid"),
    ),
    "depth-attention-paper": (  # arXiv 2606.05014
        *("lambada_openai", "piqa", "winogrande", "sciq", "hellaswag", "arc_easy", "arc_challenge", "race"),
    ),
}


def expand(names: Iterable[str]) -> dict[str, str | None]:
    """Every task once, in order, with the suite that it was named by; None: by its own name."""
    tasks: dict[str, str | None] = {}
    for name in names:
        for task in SUITES.get(name, (name,)):
            suite = name if name in SUITES else None
            tasks[task] = None if suite is None else tasks.get(task, suite)
    return tasks
