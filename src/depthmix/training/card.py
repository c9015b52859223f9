"""What a model's card says of its training."""

from __future__ import annotations

from depthmix.training.config import TrainConfig
from depthmix.training.retrofit import RetrofitConfig


def training_facts(config: TrainConfig) -> dict[str, object]:
    """Of a complete run; what does not apply is None."""
    run, data, optimizer = config.run, config.data, config.optimizer
    base = config.model if isinstance(config.model, RetrofitConfig) else None
    own = base is None or not config.uses_own_tokenizer
    return {
        "began with": base and f"{base.path.name}, SHA-256 {base.digest[:12]} …",
        "trained": "the mixers only" if base is not None and base.freeze_base else None,
        "tokens": run.steps * config.tokens_per_step,
        "steps": run.steps,
        "seed": str(run.seed),
        "seed of the weights": str(run.weights_seed) if run.weights_seed and base is None else None,
        "data": data.source,
        "tokenizer": data.tokenizer if own else "that of the model it began with",
        "rows": f"{data.rows * run.accumulate} of {data.tokens_per_row} tokens per step",
        "optimiser": f"{optimizer.name}, peak rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}",
        "precision": run.precision,
    }
