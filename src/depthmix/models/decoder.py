"""The decoder: a flat list of sublayers, and a mechanism that decides what each of them reads.

Axes: B batch, T token, D channel, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depthmix import ops
from depthmix.mechanisms import DepthStack, KVStack, State
from depthmix.mechanisms.record import Recorded
from depthmix.models.attention import Attention
from depthmix.models.config import DecoderConfig
from depthmix.models.context import Cache, Context, make_context
from depthmix.models.init import initialise
from depthmix.models.mlp import MLP
from depthmix.models.moe import MixtureOfExperts
from depthmix.models.norm import RMSNorm


class Decoder(Recorded):
    """A language model: tokens [B, T] to logits [B, T, V].

    Attributes:
        sublayers: attention and MLP in turn, each with its PreNorm; weights exist once, however often they run.
        depth: the mixers, one for each execution of a sublayer, and the output's.
        kv_mixers: a `KVStack`, one mixer for each execution of an attention; or an empty list.
        checkpoint_every: sublayers in a segment whose activations are made again in the backward pass; None: all are
            kept. A segment hands on what the state's spec calls essential and nothing else.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if not isinstance(config, DecoderConfig):
            raise TypeError(f"Decoder got a {type(config).__name__}; expected a DecoderConfig")
        self.config = config
        self.checkpoint_every: int | None = None
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        mlp = MLP if config.moe is None else MixtureOfExperts
        pairs = ((Attention(config), mlp(config)) for _ in range(config.layers))
        self.sublayers = nn.ModuleList(sublayer for pair in pairs for sublayer in pair)
        mixer = config.mixer
        self.depth = DepthStack(mixer.name, dim=config.dim, depth=config.depth, kinds=config.kinds, **mixer.options)
        self.kv_mixers: KVStack | nn.ModuleList = nn.ModuleList()
        if (kv := config.kv_mixer) is not None:
            self.kv_mixers = KVStack(kv.name, head_dim=config.width, order=config.layer_order, **kv.options)
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise(self)

    def record(self) -> dict[str, Any]:
        """Of the value mixers: the other one has its own."""
        if self.config.kv_mixer is None:
            return {"kv_mixer": None}
        config, sizes = self.config.mixers()["kv_mixer"]
        return {"kv_mixer": self.config.kv_mixer.name, **config.function(**sizes)}

    def executions(self) -> list[Any]:
        """The sublayers as they run, each with what belongs to this execution: (h, kv, ctx) -> (y, kv, aux)."""
        found: list[Any] = []
        for slot, layer in enumerate(self.config.layer_order):
            mixer = self.kv_mixers[slot] if len(self.kv_mixers) else None
            found += [partial(self.sublayers[2 * layer], mixer=mixer, slot=slot), self.sublayers[2 * layer + 1]]
        return found

    def forward(
        self,
        tokens: Tensor,
        *,
        documents: Tensor | None = None,
        valid: Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [B, T, V].

        Args:
            tokens: [B, T] ids below the vocabulary's size.
            documents: [B, T] numbers of packed documents: positions restart, attention does not cross.
            valid: [B, T], False where a token is padding.
            cache: keys and values of earlier tokens, from `depthmix.inference`; it grows by these.
            last_only: logits of the last token alone, [B, 1, V].
        """
        return self.run(tokens, documents=documents, valid=valid, cache=cache, last_only=last_only)[0]

    def run(self, tokens: Tensor, *, last_only: bool = False, **shared: Any) -> tuple[Tensor, list[Tensor]]:
        """`forward`, and the auxiliary losses of its sublayers."""
        check_tokens(tokens, self.config.vocab_size)
        config = self.config
        x = self.embed(tokens)
        ctx = make_context(tokens, head_dim=config.width, theta=config.rope_theta, dtype=x.dtype, **shared)
        h, losses = self.mixed(x, ctx)
        h = self.norm(h[:, -1:] if last_only else h)
        return nn.functional.linear(h, self.embed.weight if self.head is None else self.head.weight), losses

    def mixed(self, x: Tensor, ctx: Context) -> tuple[Tensor, list[Tensor]]:
        """What the head reads of an embedding, and the auxiliary losses of the sublayers."""
        state, kv = self.depth.begin(x), self.begin_kv()
        every = self.checkpoint_every
        if every is None or not torch.is_grad_enabled():
            state, kv, losses = self.segment(0, self.config.depth, state, kv, ctx)
        else:
            losses = []
            for lo in range(0, self.config.depth, every):
                hi = min(lo + every, self.config.depth)
                state = state[: self.depth.spec(lo).essential]
                state, kv, added = checkpoint(self.segment, lo, hi, state, kv, ctx, use_reentrant=False)
                losses += added
        return self.depth.end(state), losses

    def begin_kv(self) -> State:
        return self.kv_mixers.begin() if isinstance(self.kv_mixers, KVStack) else ()

    def segment(self, lo: int, hi: int, state: State, kv: State, ctx: Context) -> tuple[State, State, list[Tensor]]:
        """Sublayers lo … hi − 1, in the order of their execution."""
        losses = []
        for mixer, sublayer in zip([*self.depth][lo:hi], self.executions()[lo:hi], strict=True):
            h, carry = mixer.read(state)
            y, kv, aux = sublayer(h, kv, ctx)
            state = mixer.write(state, carry, y)
            losses += [] if aux is None else [aux]
        return state, kv, losses

    def loss(self, tokens: Tensor, *, documents: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """Mean loss of the next token, within each document, with the auxiliary losses of its sublayers."""
        logits, auxiliary = self.run(tokens, documents=documents, valid=valid, cache=None)
        losses, counts = next_token_losses(logits, tokens, documents, valid)
        return sum(auxiliary, losses.sum() / counts.sum().clamp(min=1))

    def extra_repr(self) -> str:
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"


def next_token_losses(
    logits: Tensor, tokens: Tensor, documents: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loss [B, T−1] of each token given those before it, and whether it counts: 0 across documents and at padding."""
    target = tokens[:, 1:]
    losses = nn.functional.cross_entropy(ops.wide(logits[:, :-1]).flatten(0, 1), target.flatten(), reduction="none")
    counts = torch.ones_like(target, dtype=torch.bool)
    if documents is not None:
        counts &= documents[:, 1:] == documents[:, :-1]
    if valid is not None:
        counts &= valid[:, 1:].bool() & valid[:, :-1].bool()
    return losses.view_as(target) * counts, counts


def check_tokens(tokens: Tensor, vocabulary: int) -> None:
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"tokens: got {got}; expected whole numbers [batch, tokens], as int64 or int32")
    if torch.compiler.is_compiling() or tokens.device.type != "cpu" or not tokens.numel():
        return  # a look at the values would stop a compiler, or wait for the device
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"tokens hold {low if low < 0 else high}; expected ids from 0 to {vocabulary - 1}")
