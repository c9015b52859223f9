"""Passes of a model that is looked at: without training it, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from depthmix.models import next_token_losses


def logits_of(output: Any, tokens: Tensor) -> Tensor | None:
    """The logits [B, T, V] that a model returned, itself or as an attribute `logits`; None for anything else."""
    logits = getattr(output, "logits", output)
    return logits if isinstance(logits, Tensor) and logits.shape[:-1] == tokens.shape else None


def mean_loss(model: nn.Module, tokens: Tensor) -> Any:
    """The model's own loss if it has one, otherwise the mean next-token loss of its logits; None without logits."""
    own = getattr(model, "loss", None)
    if callable(own):
        return own(tokens)
    logits = logits_of(model(tokens), tokens)
    return None if logits is None or tokens.shape[1] < 2 else next_token_losses(logits, tokens)[0].mean()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """While open, the model neither trains nor recomputes, and its parameters get no gradients."""
    training = {module: module.training for module in model.modules()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval()
        for parameter in trained:
            parameter.requires_grad_(False)
        with without_recomputation(model):
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, was in training.items():
            module.training = was


@contextmanager
def without_recomputation(model: nn.Module) -> Iterator[None]:
    """While open, nothing in the model is recomputed: what is followed through a pass is seen once."""
    off = {"checkpoint_every": None, "gradient_checkpointing": False}  # of decoders; of layers of transformers
    before = [(module, name, vars(module)[name]) for module in model.modules() for name in off if name in vars(module)]
    try:
        for module, name, _ in before:
            setattr(module, name, off[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
