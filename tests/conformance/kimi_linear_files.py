"""A tiny Kimi Linear of transformers in float64: its files, its logits, and its logits with the files of another.

    python -m tests.conformance.kimi_linear_files FOLDER

FOLDER/ours is a checkpoint to load. FOLDER gets theirs (as `save_pretrained` writes it, in shards), results.safetensors
and loading.json, what transformers says about the names in FOLDER/ours. A process of its own, as in
`kimi_linear_model`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.conformance import kimi_linear_model as theirs

FORM = "six"
SIX: dict[str, Any] = {  # layers in no regular order, two of them dense, and every size another one
    **theirs.SIZES["uneven"],
    "layer_types": [theirs.MLA, theirs.KDA, theirs.KDA, theirs.MLA, theirs.KDA, theirs.MLA],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse", "sparse"],
}


@torch.no_grad()
def main(folder: Path) -> None:
    torch.set_num_threads(1)
    modeling = theirs.load_modeling()
    theirs.SIZES[FORM] = SIX
    model = theirs.make(modeling, FORM)
    model.save_pretrained(folder / "theirs", max_shard_size="20KB")
    loaded, about = modeling.KimiLinearForCausalLM.from_pretrained(
        folder / "ours",
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    results = {"theirs": model(theirs.whole(), use_cache=False), "ours": loaded.eval()(theirs.whole(), use_cache=False)}
    save_file({name: result.logits.contiguous() for name, result in results.items()}, folder / "results.safetensors")
    problems = {key: sorted(map(str, names)) for key, names in about.items() if names}
    (folder / "loading.json").write_text(json.dumps(problems))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
