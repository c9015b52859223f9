"""A segment of a decoder: some of its executions as a module that stands alone, such as a pipeline stage.

Axes: B batch, T token, D channel, K key-value head, d channel of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms import KVStack, State
from depthmix.models.config import DecoderConfig
from depthmix.models.context import Cache, locate, locate_shape, make_context
from depthmix.models.decoder import SublayerLoop, make_mixers, make_sublayer
from depthmix.models.norm import RMSNorm


class Segment(SublayerLoop):
    """Executions lo … hi − 1 of a decoder's sublayers: a module with only their parameters, under the decoder's names.

    The first segment (lo = 0) also holds the embedding, the last (hi = depth) the norm and the head. Segments that
    follow each other compute what the decoder computes, each from the tensors that the one before it returned::

        state = first(tokens)
        state = second(*state)
        (loss,) = third(*state, tokens=tokens)

    These are the essential tensors of the stream's state, [B, T, …], then those of the value mixers, [B, K, T, d], and
    if the decoder has auxiliary losses, their sum so far, [1]. All are dense and no views, so they can be sent.

    A sublayer that is executed in several segments is a part of each of them, and a tied embedding is a part of the
    first and the last. The gradients of such a parameter must be summed over the segments.

    Attributes:
        sublayers: indexed by their numbers in the decoder; `depth` and `kv_mixers` are indexed by execution, likewise.
        checkpoint_every: as in `Decoder`.
    """

    def __init__(self, config: DecoderConfig, lo: int, hi: int) -> None:
        super().__init__(config)
        if not (isinstance(lo, int) and isinstance(hi, int) and 0 <= lo < hi <= config.depth):
            raise ValueError(
                f"segment lo={lo!r}, hi={hi!r}; expected 0 <= lo < hi <= {config.depth}, the number of executions of "
                "sublayers (attention and MLP count separately, a looped layer each time)"
            )
        self.lo, self.hi, self.is_first, self.is_last = lo, hi, lo == 0, hi == config.depth
        self.first_slot = (lo + 1) // 2
        self.slots = (hi + 1) // 2 - self.first_slot
        self.adds_loss = config.moe is not None and config.moe.balance == "loss"
        tied = config.tie_embeddings
        self.embed = nn.Embedding(config.vocab_size, config.dim) if lo == 0 or (self.is_last and tied) else None
        numbers = sorted({2 * self.layer_order[i // 2] + i % 2 for i in range(lo, hi)})
        self.sublayers = NumberedModules({str(i): make_sublayer(config, i) for i in numbers})
        depth, kv_mixers = make_mixers(config)
        self.depth, self.kv_mixers = depth.slice(lo, hi), nn.ModuleList()
        self.kv_shapes: dict[int, tuple[tuple[int, ...], ...]] = {lo: (), hi: ()}
        if isinstance(kv_mixers, KVStack):
            below = {index: (index + 1) // 2 for index in (lo, hi)}  # number of executions of attention
            self.kv_shapes = {index: kv_mixers.spec(count).shapes for index, count in below.items()}
            if below[lo] < below[hi]:
                self.kv_mixers = kv_mixers.slice(below[lo], below[hi])
        self.norm = RMSNorm(config.dim, eps=config.norm_eps) if self.is_last else None
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if self.is_last and not tied else None
        self.reset_parameters()

    def forward(
        self,
        *inputs: Tensor,
        documents: Tensor | None = None,
        valid: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> State:
        """The tensors before execution `hi`, from those before `lo`.

        The last segment returns the final hidden states [B, T, D], which `logits` takes, and the sum of the auxiliary
        losses if the decoder has them; with `tokens`, it returns the loss alone.

        Args:
            inputs: what the segment before this one returned; for the first segment, the tokens [B, T].
            documents, valid: as in `Decoder.forward`; every segment needs them.
            tokens: [B, T], used by the last segment only: its result is then that of `Decoder.loss`.
        """
        return tuple(dense(t) for t in self.advance(*inputs, documents=documents, valid=valid, tokens=tokens))

    def advance(
        self,
        *inputs: Tensor,
        documents: Tensor | None = None,
        valid: Tensor | None = None,
        tokens: Tensor | None = None,
        length: int | None = None,
        cache: Cache | None = None,
        hidden: bool = False,
    ) -> State:
        """`forward` without copies: tensors that only pass through are returned as they are.

        Args:
            inputs, documents, valid, tokens: as in `forward`.
            length: number of tokens in a row, where `inputs` hold a share of them; by default as many as they hold.
            cache: what attention keeps of earlier tokens, of this segment's attention layers only.
            hidden: whether the last segment returns what its norm reads, for `output`.
        """
        state, kv, total = self.unpack(inputs)
        first = state[0]
        shape = torch.Size((first.shape[0], first.shape[1] if length is None else length))
        if cache is None:
            positions, mask = locate_shape(shape, first.device, documents, valid)
        else:
            positions, mask = locate(torch.empty(shape, dtype=torch.int64, device=first.device), None, valid, cache)
        ctx = make_context(self.config, positions, mask, cache, dtype=first.dtype, documents=documents, valid=valid)
        state, kv, losses = self.execute(self.lo, self.hi, state, kv, ctx)
        total = sum(losses, total)
        if not self.is_last:
            passed = (*state[: self.depth.spec(self.hi).essential], *kv)
        elif tokens is not None:
            return (self.output_loss(self.end(state), tokens, documents, valid) + total[0] / self.shard.ranks,)
        elif hidden:
            return (self.end(state),)
        else:
            passed = (self.normed(self.end(state)),)
        return (*passed, total) if self.adds_loss else passed

    def unpack(self, inputs: State) -> tuple[State, State, Tensor]:
        """The stream's state, that of the value mixers, and the sum of the auxiliary losses."""
        essential, values = self.depth.spec(self.lo).essential, len(self.kv_shapes[self.lo])
        want = 1 if self.is_first else essential + values + self.adds_loss
        if len(inputs) != want:
            source = "the tokens" if self.is_first else f"what the segment that ends at {self.lo} returns"
            raise ValueError(f"segment {self.lo} to {self.hi - 1} got {len(inputs)} tensors; expected {want}: {source}")
        if self.is_first:
            state, kv = self.begin(inputs[0])
        else:
            state, kv = inputs[:essential], inputs[essential : essential + values]
        if self.adds_loss and not self.is_first:
            return state, kv, inputs[-1]
        return state, kv, state[0].new_zeros(1, dtype=ops.accumulator(state[0].dtype))

    def used_repeatedly(self) -> list[nn.Parameter]:
        """Parameters that take part at several depths: all mixers', and those of sublayers that run more than once."""
        runs = [2 * self.layer_order[i // 2] + i % 2 for i in range(self.lo, self.hi)]
        repeated = [self.sublayers[i] for i in sorted(set(runs)) if runs.count(i) > 1]
        modules = (self.depth, self.kv_mixers, *repeated)
        return [*dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)]

    def shapes(self, index: int, batch: int, tokens: int) -> list[tuple[int, ...]]:
        """The shapes of the tensors that are passed on before execution `index`, which is `lo` or `hi`."""
        spec, ranks = self.depth.spec(index), self.shard.ranks
        share, heads = -(-tokens // ranks), self.config.num_kv_heads // ranks
        stream = [(batch, share, *shape) for shape in spec.shapes[: spec.essential]]
        values = [(batch, heads, tokens, *shape) for shape in self.kv_shapes[index]]
        return [*stream, *values, *([(1,)] if self.adds_loss else [])]

    def logits(self, h: Tensor) -> Tensor:
        if not self.is_last:
            raise ValueError(
                f"segment {self.lo} to {self.hi - 1} of {self.config.depth} has no head; call logits on the last one"
            )
        return super().logits(h)

    def extra_repr(self) -> str:
        return f"sublayers {self.lo} to {self.hi - 1} of {self.config.depth}, {super().extra_repr()}"


class NumberedModules(nn.ModuleDict):
    """Modules by number. Unlike a ModuleList it can have gaps, and its state-dict names are those of a ModuleList."""

    def __getitem__(self, number: int | str) -> nn.Module:
        return super().__getitem__(str(number))


def dense(tensor: Tensor) -> Tensor:
    """Contiguous, and no view: keys come out of a transpose, and a pipeline detaches in place what it has sent."""
    if torch.compiler.is_compiling() or tensor._is_view():  # a compiler cannot ask
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()
