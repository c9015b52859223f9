"""A GPT of your own as a pipeline over two processes, with and without the cache, against one process.

    torchrun --nproc-per-node 2 examples/pipeline_gpt.py

The model knows nothing of pipelines: a `dm.DepthStack` beside its sublayers, an embedding and a head. Each process
takes two stages of it. The cache changes what is sent, not what is computed.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import depthmix as dm
from depthmix import parallel

VOCAB, DIM, HEADS, LAYERS, TOKENS = 64, 16, 2, 8, 8
ROWS, MICROBATCHES, STEPS = 2, 4, 3


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(TOKENS, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding()
        self.sublayers = nn.ModuleList(part for _ in range(LAYERS) for part in (Attention(), mlp()))
        self.depth = dm.DepthStack("block_attnres", dim=DIM, depth=2 * LAYERS, block_sublayers=2)
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.depth(self.embed(tokens), self.sublayers))


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT().double()  # so that rounding does not hide a difference


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCAB, (ROWS * MICROBATCHES, TOKENS + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def train_alone() -> list[float]:
    model = make_model()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        x, target = make_batch(step)
        loss = loss_of(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_pipeline(plan: parallel.Plan, cache: bool) -> tuple[list[float], int]:
    """Losses, on the rank of the last stage, and the bytes that all ranks sent."""
    model = make_model()
    pipeline = parallel.Pipeline(
        model.depth,
        model.sublayers,
        plan=plan,
        embed=model.embed,
        head=model.head,
        loss=loss_of,
        schedule="Interleaved1F1B",
        microbatches=MICROBATCHES,
        cache=cache,
    )
    optimizer, losses = torch.optim.AdamW(pipeline.parameters(), lr=1e-2), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = pipeline.step(*make_batch(step))
        optimizer.step()
        if loss is not None:
            losses.append(loss.item())
    sent = torch.tensor(sum(pipeline.sent_bytes().values()))
    dist.all_reduce(sent)
    return losses, int(sent)


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start it with: torchrun --nproc-per-node 2 examples/pipeline_gpt.py")
    dist.init_process_group("gloo")
    plan = parallel.make_plan(
        make_model().depth, shape=(ROWS, TOKENS), ranks=dist.get_world_size(), virtual=2, dtype=torch.float64
    )
    results = {cache: train_pipeline(plan, cache) for cache in (True, False)}
    if results[True][0]:  # the rank of the last stage
        print(plan.describe())
        alone = train_alone()
        for cache, (losses, sent) in results.items():
            off = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
            planned = plan.sent_bytes(cache) * 2 * MICROBATCHES * STEPS
            print(
                f"cache={cache}: {sent:,} bytes sent, {planned:,} planned; losses differ by {off:.0e} from one process"
            )
        print("losses:", *(f"{loss:.6f}" for loss in alone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
