"""Model FLOPs, counted from the equations: recomputation and what the hardware does are not included."""

from __future__ import annotations

from depthmix.models.counting import attention_flops, count_multiplied, mixing_flops
from depthmix.training.retrofit import ModelConfig, RetrofitConfig


def flops_per_token(config: ModelConfig, tokens_per_row: int) -> int:
    """FLOPs per token of a training step: three times those of the forward pass.

    Sublayers, norms and head take 2 per parameter that a token is multiplied with; weights that run several times count
    each time, the embedding table not at all. Attention takes what `attention_flops` counts for its kind. Mixers take
    what they declare (`forward_flops` of their facts): in two phases if reads share passes, otherwise each read
    separately.
    """
    if isinstance(config, RetrofitConfig):
        from depthmix.hf.counting import count

        return count(config.existing_path(), config.wrapping()).flops_per_token(tokens_per_row)
    attention = sum(attention_flops(config, tokens_per_row))
    return 3 * (2 * count_multiplied(config) + attention + mixing_flops(config))
