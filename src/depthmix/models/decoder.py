"""The decoder: a flat list of sublayers, and a mechanism that decides what each of them reads.

Axes: B batch, T token, D channel, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depthmix import ops
from depthmix.mechanisms import DepthStack, KVStack, State
from depthmix.mechanisms.record import Recorded
from depthmix.models.attention import Attention
from depthmix.models.config import DecoderConfig
from depthmix.models.context import Cache, Context, locate, make_context
from depthmix.models.init import initialise
from depthmix.models.mlp import MLP
from depthmix.models.moe import MixtureOfExperts
from depthmix.models.norm import RMSNorm


class Decoder(Recorded):
    """A language model: tokens [B, T] to logits [B, T, V].

    Attributes:
        sublayers: attention and MLP in turn, each with its PreNorm; weights exist once, however often they run.
        depth: the mixers, one for each execution of a sublayer, and the output's; with `loop.share_mixers` those of one
            sublayer share their parameters.
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
        self.layer_order = config.layer_order
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        mlp = MLP if config.moe is None else MixtureOfExperts
        pairs = ((Attention(config), mlp(config)) for _ in range(config.layers))
        self.sublayers = nn.ModuleList(sublayer for pair in pairs for sublayer in pair)
        self.depth, self.kv_mixers = make_mixers(config)
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Give every parameter its start: drawn from torch's generator or, with a seed, by (seed, its name)."""
        initialise(self, seed)

    def record(self) -> dict[str, Any]:
        """Options of the value mixers; `depth` records those of its mechanism."""
        if self.config.kv_mixer is None:
            return {"kv_mixer": None}
        config, sizes = self.config.mixers()["kv_mixer"]
        return {"kv_mixer": self.config.kv_mixer.name, **config.function(**sizes)}

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
        x = self.embed(checked_tokens(tokens, self.config.vocab_size))
        ctx = self.context(tokens, x.dtype, documents, valid, cache)
        state, _ = self.segments(self.depth.begin(x), ctx)
        h = self.depth.end(state)
        return self.logits(self.norm(h[:, -1:] if last_only else h))

    def loss(self, tokens: Tensor, *, documents: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """Mean loss of the next token, within each document, with the auxiliary losses of its sublayers."""
        x = self.embed(checked_tokens(tokens, self.config.vocab_size))
        ctx = self.context(tokens, x.dtype, documents, valid)
        state, auxiliary = self.segments(self.depth.begin(x), ctx)
        logits = self.logits(self.norm(self.depth.end(state)))
        losses, counts = next_token_losses(logits, tokens, documents, valid)
        return sum(auxiliary, losses.sum() / counts.sum().clamp(min=1))

    def context(
        self,
        tokens: Tensor,
        dtype: torch.dtype,
        documents: Tensor | None = None,
        valid: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Context:
        """What all sublayers share. Of the tokens it uses the shape and the device, not the ids."""
        positions, mask = locate(tokens, documents, valid, cache)
        return make_context(self.config, positions, mask, cache, dtype=dtype)

    def segments(self, state: State, ctx: Context) -> tuple[State, list[Tensor]]:
        """All sublayers, from the state before the first to that before the output; and their auxiliary losses."""
        depth, every = self.config.depth, self.checkpoint_every
        kv = self.kv_mixers.begin() if isinstance(self.kv_mixers, KVStack) else ()
        if every is None or not torch.is_grad_enabled():
            state, _, losses = self.segment(0, depth, state, kv, ctx)
            return state, losses
        losses = []
        for lo in range(0, depth, every):
            essential = state[: self.depth.spec(lo).essential]
            segment = lo, min(lo + every, depth)
            state, kv, added = checkpoint(self.segment, *segment, essential, kv, ctx, use_reentrant=False)
            losses += added
        return state, losses

    def segment(self, lo: int, hi: int, state: State, kv: State, ctx: Context) -> tuple[State, State, list[Tensor]]:
        """Sublayers lo … hi − 1, counted in the order of their execution; and their auxiliary losses."""
        losses = []
        for index in range(lo, hi):
            mixer = self.depth[index]
            h, carry = mixer.read(state)
            y, kv, aux = self.sublayer(index, h, kv, ctx)
            state = mixer.write(state, carry, y)
            losses += [] if aux is None else [aux]
        return state, kv, losses

    def sublayer(self, index: int, h: Tensor, kv: State, ctx: Context) -> tuple[Tensor, State, Tensor | None]:
        """Execution `index`: output, state of the value mixers, auxiliary loss. A layer that is looped has several."""
        slot, second = divmod(index, 2)
        module = self.sublayers[2 * self.layer_order[slot] + second]
        if second:
            return module(h, kv, ctx)
        mixer = self.kv_mixers[slot] if len(self.kv_mixers) else None
        return module(h, kv, ctx, mixer=mixer, slot=slot)

    def logits(self, h: Tensor) -> Tensor:
        """The head: [B, T, V]."""
        return nn.functional.linear(h, self.embed.weight if self.head is None else self.head.weight)

    def extra_repr(self) -> str:
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"


def make_mixers(config: DecoderConfig) -> tuple[DepthStack, KVStack | nn.ModuleList]:
    mixer, kv_mixer = config.mixer, config.kv_mixer
    share = config.loop is not None and config.loop.share_mixers
    sublayers = [2 * layer + second for layer in config.layer_order for second in (0, 1)]
    sizes: dict[str, Any] = {"dim": config.dim, "depth": config.depth, "kinds": config.kinds}
    depth = DepthStack(mixer.name, **sizes, order=sublayers if share else None, **mixer.options)
    if kv_mixer is None:
        return depth, nn.ModuleList()
    order = config.layer_order
    return depth, KVStack(kv_mixer.name, head_dim=config.width, order=order, share=share, **kv_mixer.options)


def empty_decoder(config: DecoderConfig) -> Decoder:
    """A decoder on the CPU whose own parameters have no values yet: for `reset_parameters`, which draws them once.

    Its mixers are complete: a plug-in may make more than parameters when it is built.
    """
    with torch.device("meta"):
        model = Decoder(config)
    model.depth, model.kv_mixers = make_mixers(config)
    for part in (model.embed, model.sublayers, model.norm, model.head):
        if part is not None:
            part.to_empty(device="cpu")
    return model


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


def checked_tokens(tokens: Tensor, vocabulary: int) -> Tensor:
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"tokens: got {got}; expected whole numbers [batch, tokens], as int64 or int32")
    if torch.compiler.is_compiling() or tokens.device.type != "cpu" or not tokens.numel():
        return tokens  # reading values would stop a compiler, or wait for the device
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"tokens hold {low if low < 0 else high}; expected ids from 0 to {vocabulary - 1}")
    return tokens
