"""The decoder: a flat list of sublayers, and a mechanism that decides what each of them reads.

Axes: B batch, T token, D channel, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from depthmix.models.roles import Role
from depthmix.models.shard import WHOLE, WholeSequence


class SublayerLoop(Recorded):
    """What a decoder and a segment of it share: the loop over executions of sublayers, and the head."""

    embed: Any  # an Embedding; None in a segment that does not use it
    sublayers: Any  # a ModuleList; in a segment a ModuleDict that is indexed by the same numbers
    depth: DepthStack
    kv_mixers: KVStack | nn.ModuleList
    norm: RMSNorm | None
    head: nn.Linear | None
    first_slot = 0  # the number of executions of attention before this part
    slots: int | None = None  # that of this part, for a cache; None: all

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if not isinstance(config, DecoderConfig):
            raise TypeError(f"{type(self).__name__} got a {type(config).__name__}; expected a DecoderConfig")
        self.config = config
        self.checkpoint_every: int | None = None
        self.layer_order = config.layer_order
        self.shard: WholeSequence = WHOLE

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialise every parameter, from torch's generator or, with a seed, from one generator per (seed, name)."""
        initialise(self, seed)

    def record(self) -> dict[str, Any]:
        """Options of the value mixers; `depth` records those of its mechanism."""
        if self.config.kv_mixer is None:
            return {"kv_mixer": None}
        config, sizes = self.config.mixers()["kv_mixer"]
        return {"kv_mixer": self.config.kv_mixer.name, **config.function(**sizes)}

    def all_sublayers(self) -> list[nn.Module]:
        """The sublayers of this part, each once."""
        return [*(self.sublayers.values() if isinstance(self.sublayers, nn.ModuleDict) else self.sublayers)]

    def parameter_roles(self) -> Iterator[tuple[str, nn.Parameter, Role]]:
        """Name and role of each parameter outside the mixers of the stream."""
        for name, parameter in self.named_parameters():
            if name.startswith("depth."):
                continue
            role: Role = "vector"
            if parameter.dim() >= 2 and not name.startswith("kv_mixers.") and not name.endswith("_conv"):
                inner = name.startswith("sublayers.") and parameter.dim() == 2 and ".router." not in name
                role = "matrix" if inner else "table"
            yield name, parameter, role

    def mixer_names(self) -> dict[nn.Parameter, str]:
        """The mixers' parameters with their names in the decoder."""
        return {parameter: f"depth.{name}" for name, parameter in self.depth.named_parameters()}

    def execute(self, lo: int, hi: int, state: State, kv: State, ctx: Context) -> tuple[State, State, list[Tensor]]:
        """`segment`, with activation checkpointing if `checkpoint_every` is set."""
        every = self.checkpoint_every
        if every is None or not torch.is_grad_enabled():
            return self.segment(lo, hi, state, kv, ctx)
        losses = []
        for start in range(lo, hi, every):
            essential = state[: self.depth.spec(start).essential]
            bounds = start, min(start + every, hi)
            state, kv, added = checkpoint(self.segment, *bounds, essential, kv, ctx, use_reentrant=False)
            losses += added
        return state, kv, losses

    def segment(self, lo: int, hi: int, state: State, kv: State, ctx: Context) -> tuple[State, State, list[Tensor]]:
        """Run sublayers lo … hi − 1 in order of execution; return both states and the auxiliary losses."""
        losses = []
        with self.shard.parameters(self.depth, self.kv_mixers):
            for index in range(lo, hi):
                mixer = self.depth[index]
                h, carry = mixer.read(state)
                y, kv, aux = self.sublayer(index, h, kv, ctx)
                state = mixer.write(state, carry, y)
                losses += [] if aux is None else [aux]
        return state, kv, losses

    def sublayer(self, index: int, h: Tensor, kv: State, ctx: Context) -> tuple[Tensor, State, Tensor | None]:
        """Run execution `index` (a looped layer has several): output, state of the value mixers, auxiliary loss."""
        slot, second = divmod(index, 2)
        module = self.sublayers[2 * self.layer_order[slot] + second]
        if second:
            return module(h, kv, ctx)
        mixer = self.kv_mixers[slot] if len(self.kv_mixers) else None
        return module(h, kv, ctx, mixer=mixer, slot=slot - self.first_slot)

    def begin(self, tokens: Tensor) -> tuple[State, State]:
        """The state before sublayer 0, and that of the value mixers."""
        checked_tokens(tokens, self.config.vocab_size)
        with self.shard.parameters(self.embed, self.depth):
            state = self.depth.begin(self.embed(self.shard.own(tokens, tokens.shape[1])))
        return state, self.kv_mixers.begin() if isinstance(self.kv_mixers, KVStack) else ()

    def end(self, state: State) -> Tensor:
        """What the final norm reads."""
        with self.shard.parameters(self.depth):
            return self.depth.end(state)

    def logits(self, h: Tensor) -> Tensor:
        """The head: [B, T, V]."""
        return nn.functional.linear(h, self.embed.weight if self.head is None else self.head.weight)

    def output(self, h: Tensor, tokens: int, last_only: bool = False) -> Tensor:
        """Logits of all tokens or of the last one, from the hidden states of this process."""
        h = self.shard.last(h, tokens) if last_only else self.shard.whole(h, tokens)
        with self.shard.parameters(self.norm, self.embed if self.head is None else self.head):
            return self.logits(self.normed(h))

    def output_loss(self, h: Tensor, tokens: Tensor, documents: Tensor | None, valid: Tensor | None) -> Tensor:
        """The mean loss; where tokens are shared among processes, this one's part of it: the parts sum to the mean."""
        with self.shard.parameters(self.norm, self.embed if self.head is None else self.head):
            logits = self.logits(self.normed(h))
        return mean_loss(logits, tokens, documents, valid, self.shard)

    def normed(self, h: Tensor) -> Tensor:
        assert self.norm is not None
        return self.norm(h)

    def extra_repr(self) -> str:
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"


class Decoder(SublayerLoop):
    """A language model: tokens [B, T] to logits [B, T, V].

    Attributes:
        sublayers: attention and MLP in turn, each with its PreNorm; looped sublayers are listed once.
        depth: the mixers, one for each execution of a sublayer and one for the output; with `loop.share_mixers` those
            of the same sublayer share their parameters.
        kv_mixers: a `KVStack`, one mixer for each execution of an attention; or an empty list.
        checkpoint_every: number of sublayers per segment of activation checkpointing; None: no checkpointing. Only the
            essential tensors of the state pass from one segment to the next.
    """

    embed: nn.Embedding
    sublayers: nn.ModuleList
    norm: RMSNorm

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.sublayers = nn.ModuleList(make_sublayer(config, i) for i in range(2 * config.layers))
        self.depth, self.kv_mixers = make_mixers(config)
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

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
            tokens: [B, T] ids below the vocabulary size.
            documents: [B, T] indices of packed documents: positions restart in each, and attention stays within each.
            valid: [B, T], False for padding.
            cache: what attention keeps of earlier tokens, from `depthmix.inference`; these tokens are appended to it.
            last_only: return only the logits of the last token, [B, 1, V].
        """
        h, _ = self.hidden(tokens, documents, valid, cache)
        return self.output(h, tokens.shape[1], last_only)

    def loss(self, tokens: Tensor, *, documents: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """Mean next-token loss within each document, plus the auxiliary losses of the sublayers."""
        h, auxiliary = self.hidden(tokens, documents, valid)
        loss = self.output_loss(h, tokens, documents, valid)
        return sum((aux / self.shard.ranks for aux in auxiliary), loss)

    def hidden(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        valid: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """What the final norm reads, and the auxiliary losses. The arguments are those of `forward`."""
        state, kv = self.begin(tokens)
        ctx = self.context(tokens, state[0].dtype, documents, valid, cache)
        state, _, auxiliary = self.execute(0, self.config.depth, state, kv, ctx)
        return self.end(state), auxiliary

    def context(
        self,
        tokens: Tensor,
        dtype: torch.dtype,
        documents: Tensor | None = None,
        valid: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Context:
        """The context that all sublayers share. It depends on the tokens' shape and device, not on their ids."""
        positions, mask = locate(tokens, documents, valid, cache)
        return make_context(self.config, positions, mask, cache, dtype=dtype, documents=documents, valid=valid)


def make_sublayer(config: DecoderConfig, index: int) -> nn.Module:
    """Sublayer `index` of a decoder: attention and MLP in turn."""
    if index % 2 == 0:
        return make_attention(config, config.attention_kinds[index // 2])
    dense = config.moe is None or index // 2 < config.moe.dense_layers
    return MLP(config) if dense else MixtureOfExperts(config)


def make_attention(config: DecoderConfig, kind: str) -> nn.Module:
    """A sublayer of this kind; the module of a kind is imported by decoders that have it."""
    if kind == "kda" and config.kda is not None:
        from depthmix.models.kda import KDA

        return KDA(config.dim, config.kda, config.norm_eps)
    if kind == "mla":
        from depthmix.models.mla import MLA

        return MLA(config)
    return Attention(config)


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
    """A decoder on the CPU with uninitialised parameters, so that `reset_parameters` draws them only once.

    Its mixers are initialised, since a plug-in may create more than parameters when it is built.
    """
    with torch.device("meta"):
        model = Decoder(config)
    model.depth, model.kv_mixers = make_mixers(config)
    for part in (model.embed, model.sublayers, model.norm, model.head):
        if part is not None:
            part.to_empty(device="cpu")
    return model


def targets_of(tokens: Tensor, documents: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The next token of each but the last, and whether it counts, both [B, T−1]."""
    counts = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
    if documents is not None:
        counts &= documents[:, 1:] == documents[:, :-1]
    if valid is not None:
        counts &= valid[:, 1:].bool() & valid[:, :-1].bool()
    return tokens[:, 1:], counts


def next_token_losses(
    logits: Tensor, tokens: Tensor, documents: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loss [B, T−1] of each token given those before it, and its weight: 0 across documents and at padding."""
    target, counts = targets_of(tokens, documents, valid)
    return losses_of(logits[:, :-1], target) * counts, counts


def losses_of(logits: Tensor, target: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(ops.wide(logits).flatten(0, 1), target.flatten(), reduction="none")
    return losses.view_as(target)


def mean_loss(
    logits: Tensor, tokens: Tensor, documents: Tensor | None, valid: Tensor | None, shard: WholeSequence = WHOLE
) -> Tensor:
    """The mean of `next_token_losses` over the tokens that count: the part of it that this process's tokens add."""
    target, counts = targets_of(tokens, documents, valid)
    number = counts.sum().clamp(min=1)
    target, counts = (shard.own(values, tokens.shape[1]) for values in (target, counts))
    return (losses_of(logits[:, : target.shape[1]], target) * counts).sum() / number


def checked_tokens(tokens: Tensor, vocabulary: int) -> Tensor:
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"tokens: got {got}; expected integers [batch, tokens] of dtype int64 or int32")
    if torch.compiler.is_compiling() or tokens.device.type != "cpu" or not tokens.numel():
        return tokens  # reading values would break a compiled graph, or wait for the device
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"tokens contain {low if low < 0 else high}; expected ids from 0 to {vocabulary - 1}")
    return tokens
