"""Train a small decoder with Block Attention Residuals from scratch, with Trainer of Hugging Face transformers.

    pip install 'depthmix[hf,bpe]' accelerate
    python examples/hf_trainer.py [FOLDER] [--steps 200] [--mixer block_attnres]

The text is Python's standard library, as bytes. FOLDER gets the model, its tokenizer and a card; any program that
imports depthmix and transformers loads it with the Auto classes. Training resumes from FOLDER/checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments, pipeline
from transformers.trainer_utils import get_last_checkpoint

import depthmix as dm
from depthmix.data import ByteTokenizer, Corpus, prepare
from depthmix.hf import DepthmixConfig, DepthmixForCausalLM
from depthmix.hf.tokenizer import from_tokenizer

CONTEXT = 128


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Consecutive rows of a text."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens) // CONTEXT

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = torch.as_tensor(self.tokens[i * CONTEXT : (i + 1) * CONTEXT].astype("int64"))
        return {"input_ids": row, "labels": row}


def new_model(mixer: str) -> DepthmixForCausalLM:
    config = dm.DecoderConfig(vocab_size=256, dim=128, layers=4, heads=4, hidden=384, mixer=mixer)
    return DepthmixForCausalLM(DepthmixConfig(depthmix=config.to_dict()))


def optimizer_for(model: DepthmixForCausalLM, rate: float) -> torch.optim.AdamW:
    """Trainer would decay queries and gates: the mechanism says which of its parameters may be."""
    mixers = dm.param_groups(model.decoder.depth, weight_decay=0.1)
    taken = {id(parameter) for group in mixers for parameter in group["params"]}
    others = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    matrices = {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.1}
    vectors = {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW([*mixers, matrices, vectors], lr=rate, betas=(0.9, 0.95))


def main(folder: Path, steps: int, mixer: str) -> None:
    corpus: Corpus = prepare("stdlib", tokenizer="bytes", folder=folder / "tokens")
    torch.manual_seed(0)
    model = new_model(mixer)
    arguments = TrainingArguments(
        str(folder / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=8,
        warmup_steps=max(1, steps // 10),
        lr_scheduler_type="cosine",
        logging_steps=max(1, steps // 10),
        save_steps=max(1, steps // 2),
        save_total_limit=2,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    held_out = torch.utils.data.Subset(Rows(corpus.validation), range(32))
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Rows(corpus.train),
        eval_dataset=held_out,
        optimizers=(optimizer_for(model, 3e-3), None),
    )
    print(f"before: validation loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir) if folder.is_dir() else None)
    print(f"after {steps} steps: validation loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.save_model(str(folder / "model"))
    from_tokenizer(ByteTokenizer()).save_pretrained(folder / "model")
    write = pipeline("text-generation", model=str(folder / "model"), device=trainer.args.device)
    (answer,) = write("def __init__(self", max_new_tokens=40, do_sample=False)
    print(f"\n{answer['generated_text']}\n\nsaved: {folder / 'model'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("out/hf_trainer"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mixer", default="block_attnres", choices=dm.list_mechanisms())
    chosen = parser.parse_args()
    main(chosen.folder, chosen.steps, chosen.mixer)
