"""Model FLOPs, counted from the equations: recomputation and what the hardware does are not included."""

from __future__ import annotations

from depthmix.models.counting import count_multiplied, mixing_flops
from depthmix.training.retrofit import ModelConfig, RetrofitConfig


def flops_per_token(config: ModelConfig, tokens_per_row: int) -> int:
    """FLOPs per token of a training step: three times those of the forward pass.

    Sublayers, norms and head take 2 per parameter that a token is multiplied with; weights that run several times count
    each time, the embedding table not at all. Attention takes 4 · heads · width for each of the (T + 1) / 2 tokens that
    a token attends to on average. Mixers take what they declare (`forward_flops` of their facts): in two phases if
    reads share passes, otherwise each read separately.
    """
    if isinstance(config, RetrofitConfig):
        from depthmix.hf.counting import count

        return count(config.existing_path(), config.wrapping()).flops_per_token(tokens_per_row)
    attention = 2 * config.heads * config.width * (tokens_per_row + 1) * len(config.layer_order)
    return 3 * (2 * count_multiplied(config) + attention + mixing_flops(config))
