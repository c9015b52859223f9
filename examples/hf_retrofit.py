"""Put Block Attention Residuals into a trained Hugging Face model and continue its pretraining, with and without.

    pip install 'depthmix[hf,bpe]'
    python examples/hf_retrofit.py [FOLDER] [--model MODEL] [--steps 60]

MODEL is a local folder that `save_pretrained` wrote, with its tokenizer. Without it a small Llama is trained first, on
the bytes of Python's standard library. Both arms start from the same weights and read the same data in the same order;
one seed and few steps show how it works, not which arm is better. FOLDER gets the comparison, and each run a model in
`final` that the Auto classes load.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import depthmix as dm
from depthmix.data import Batches, ByteTokenizer, prepare
from depthmix.hf.tokenizer import from_tokenizer

MIXER, PROMPT = "block_attnres", "def __init__(self"


def pretrain(folder: Path, tokens: Path, steps: int) -> None:
    """A Llama of 8 layers that predicts bytes, with its tokenizer."""
    corpus = prepare("stdlib", tokenizer="bytes", folder=tokens)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, bos_token_id=0, eos_token_id=0, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    batches = Batches(corpus.train, tokens_per_row=128, rows=8, seed=1)
    for step in range(1, steps + 1):
        rows = next(batches)
        loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == steps:
            print(f"a model to begin with: loss {loss.item():.3f} after {steps} steps")
    model.save_pretrained(folder)
    from_tokenizer(ByteTokenizer()).save_pretrained(folder)


def compare(folder: Path, model: Path, steps: int) -> int:
    """Continue with the mechanism and without it."""
    command = [sys.executable, "-m", "depthmix", "compare", "--from-hf", str(model), "--mixers", "residual", MIXER]
    command += ["--seeds", "1", "--folder", str(folder), "--set", f"run.steps={steps}", "--set", "optimizer.lr=1e-3"]
    command += ["--set", "data.rows=8", "--set", "data.tokens_per_row=128"]
    return subprocess.run(command, check=False).returncode


def show(final: Path) -> None:
    """What the retrofitted model writes, and how far its mixers have moved."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    text = model.generate(ids, max_new_tokens=40, do_sample=False)[0]
    matrix = dm.trace(model, ids).M.mean((0, 1))
    print(f"\n--- {final} continues the prompt ---\n{tokenizer.decode(text)}")
    moved = (matrix - torch.ones_like(matrix)).tril().abs().max()
    print(f"an entry of M is up to {float(moved):.3f} away from the plain residual's 1")


def main(folder: Path, model: Path | None, steps: int) -> int:
    if model is None:
        model = folder / "base"
        if not (model / "tokenizer.json").is_file():
            pretrain(model, folder / "tokens", 2 * steps)
    code = compare(folder / "comparison", model, steps)
    if code == 0:
        found = json.loads((folder / "comparison" / "comparison.json").read_text(encoding="utf-8"))
        run = next(run for run in found["runs"] if run["arm"] == MIXER)
        show(folder / "comparison" / run["folder"] / "final")
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("out/hf_retrofit"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    sys.exit(main(chosen.folder, chosen.model, chosen.steps))
