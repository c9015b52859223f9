"""Training a decoder: data, optimisers and schedules, the loop, checkpoints."""

from depthmix.training.data import Batches, Corpus, prepare, validation_batches

__all__ = ["Batches", "Corpus", "prepare", "validation_batches"]
