"""Multi-head latent attention without positions (arXiv 2405.04434, as in Kimi Linear, arXiv 2510.26692).

Axes: B batch, T new token, S column, H head, r rank of the latent, n own channels of a key, m shared ones, c channels
of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthmix.mechanisms import KVMixer, State
from depthmix.models.config import DecoderConfig
from depthmix.models.context import Context
from depthmix.models.norm import RMSNorm


class MLA(nn.Module):
    """Queries of every head; one latent, from which the keys and values of all heads are made; attention.

    (1) q_h = [qⁿ_h, qᵐ_h] = W_q x, x = PreNorm(h)
    (2) c', κ = W_a x;  c = norm(c')                    kept for later tokens, [r + m] per token
    (3) k_h = [Wᵏ_h c, κ];  v_h = Wᵛ_h c                rows of `kv_b`, in each head those of the key first
    (4) o_h = Σ_s softmax_s(q_h·k_hs / √(n + m)) v_hs;  y = W_o o

    Nothing is rotated: positions come from the other layers. For few new tokens over many columns the keys and values
    of all columns would cost more than attention itself; there the same sums are taken over the latents:

    (5) q_h·k_hs = [Wᵏ_hᵀ qⁿ_h, qᵐ_h]·[c_s, κ_s];  Σ_s p_s v_hs = Wᵛ_h Σ_s p_s c_s
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.mla is not None
        self.config, self.num_heads = config.mla, config.heads
        rank, nope, shared, value = (getattr(config.mla, name) for name in ("rank", "nope", "shared", "value"))
        self.scale = (nope + shared) ** -0.5
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.q_proj = nn.Linear(config.dim, config.heads * (nope + shared), bias=False)
        self.kv_a = nn.Linear(config.dim, rank + shared, bias=False)
        self.kv_norm = RMSNorm(rank, eps=config.mla.norm_eps)
        self.kv_b = nn.Linear(rank, config.heads * (nope + value), bias=False)
        self.o_proj = nn.Linear(config.heads * value, config.dim, bias=False)

    def forward(
        self, h: Tensor, kv: State, ctx: Context, mixer: KVMixer | None, slot: int
    ) -> tuple[Tensor, State, None]:
        """As a sublayer of a decoder, which has no mixer of values here; `slot` belongs to this execution."""
        x = self.norm(h)
        q = self.q_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T, n + m], (1)
        latent = self.latent(x)
        if ctx.cache is not None:
            (latent,) = ctx.cache.put(slot, latent)
        attend = self.absorbed if self.absorbs(q.shape[2], latent.shape[2]) else self.expanded
        out = attend(q, latent, ctx.mask)  # [B, H, T, c]
        return self.o_proj(out.transpose(1, 2).flatten(-2)), kv, None

    def latent(self, x: Tensor) -> Tensor:
        """(2) as one key-value head, [B, 1, T, r + m]."""
        c, shared = self.kv_a(x).split((self.config.rank, self.config.shared), -1)
        return torch.cat([self.kv_norm(c), shared], -1)[:, None]

    def absorbs(self, new: int, columns: int) -> bool:
        """Whether (5) needs fewer operations than (3) and (4), which make keys and values of all columns."""
        rank, own = self.config.rank, self.config.nope + self.config.value
        return (columns - new) * rank * own > new * columns * (2 * rank - own)

    def expanded(self, q: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """(3) and (4)."""
        c, shared = latent.squeeze(1).split((self.config.rank, self.config.shared), -1)
        made = self.kv_b(c).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = made.split((self.config.nope, self.config.value), -1)
        k = torch.cat([k, shared[:, None].expand(-1, self.num_heads, -1, -1)], -1)
        # Fast kernels need values as wide as keys.
        v = nn.functional.pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))
        causal = mask is None and q.shape[2] == k.shape[2]  # a single new token attends to all columns
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale)
        return out[..., : self.config.value]

    def absorbed(self, q: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """(5): all heads read the same latents, so heads and tokens are rows of one product."""
        w = self.kv_b.weight.unflatten(0, (self.num_heads, -1))  # [H, n + c, r]
        of_keys, of_values = w.split((self.config.nope, self.config.value), 1)
        own, shared = q.split((self.config.nope, self.config.shared), -1)
        rows = torch.cat([own @ of_keys, shared], -1).flatten(1, 2)[:, None]  # [B, 1, H·T, r + m]
        if mask is not None and q.shape[2] > 1:
            mask = mask.repeat(1, 1, self.num_heads, 1)
        out = nn.functional.scaled_dot_product_attention(rows, latent, latent, attn_mask=mask, scale=self.scale)
        out = out[:, 0, :, : self.config.rank].unflatten(1, (self.num_heads, -1))
        return out @ of_values.mT
