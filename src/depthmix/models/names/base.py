"""What a format of checkpoints is: a table of names and shapes, and the options that follow from a configuration.

A table has a row for each tensor that the other project stores. Where depthmix has no parameter for some of its first
rows, as at site 0, which reads a single source, these are dropped on reading and filled on writing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from depthmix.mechanisms import DepthStack
from depthmix.mechanisms.base import MOST_DEPTH, MOST_DIM
from depthmix.mechanisms.record import is_record
from depthmix.models.decoder import Decoder
from depthmix.models.names.checkpoint import Checkpoint
from depthmix.models.saved import CONFIG, WEIGHTS, assign_tensors
from depthmix.models.stack_files import check_whole
from depthmix.support.checks import check_range, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was read or written.

    module: what depthmix has of it.
    tensors: number of the other project's tensors.
    units: sizes of blocks, in the other project's unit and in depthmix's.
    notes: what a user should know, one sentence each.
    config: the other project's configuration, if it was written.
    state: its tensors, if they were written.
    files: the names of the files that were written.
    """

    module: DepthStack | Decoder
    tensors: int
    units: Mapping[str, int]
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    state: Mapping[str, Tensor] | None = None
    files: tuple[str, ...] = (WEIGHTS, CONFIG)


class Format(ABC):
    """A format of checkpoints; `depthmix.models.names.FORMATS` lists them."""

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def read(self, checkpoint: Checkpoint) -> Converted:
        """What depthmix can take from a checkpoint."""

    @abstractmethod
    def write(self, module: DepthStack | Decoder) -> Converted:
        """The other project's configuration and tensors for a stack or a decoder, or an error that says why not."""


class WholeFormat(Format):
    """A format of which whole models are taken: what is read is a decoder, and what is written are shards."""

    @abstractmethod
    def save(self, checkpoint: Checkpoint, folder: Path) -> Converted:
        """Write a checkpoint as `save_model` would write the decoder, tensor by tensor; `module` is on the meta
        device."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tensor under the other project's name, with its shape there.

    unused: number of its first rows that depthmix does not have.
    ours: the name of the rest; None: depthmix has nothing of it.
    fill: the value of unused rows where they are written.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: str | None
    unused: int = 0
    fill: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Depth mixing as a configuration describes it: width, layers of two sublayers, mechanism and options."""

    dim: int
    layers: int
    mechanism: str
    options: Mapping[str, Any]


class StackFormat(Format):
    """A format of which only the depth mixing is taken: a `DepthStack` of two sublayers per layer."""

    model_types: ClassVar[Sequence[str]]
    spellings: ClassVar[Sequence[str]]  # which names a table can have; the first is written
    fixed: ClassVar[Mapping[str, Mapping[str, Any]]]  # for each mechanism, the options that the other project has

    @abstractmethod
    def mixing(self, checkpoint: Checkpoint) -> Mixing:
        """What the configuration says."""

    @abstractmethod
    def table(self, mixing: Mixing, spelling: str) -> list[Row]:
        """The rows of all tensors, in the order of the layers."""

    @abstractmethod
    def configuration(self, mixing: Mixing) -> dict[str, Any]:
        """The smallest configuration that describes the mixing."""

    @abstractmethod
    def units(self, mixing: Mixing) -> dict[str, int]:
        """Sizes of blocks, in the other project's unit and in depthmix's."""

    def check_options(self, mixing: Mixing) -> None:
        """Raise an error for options of a stack that the other project cannot express."""

    def notes(self) -> tuple[str, ...]:
        """What is lost on reading, and what is written in its place."""
        return ()

    def read(self, checkpoint: Checkpoint) -> Converted:
        self.check_type(checkpoint)
        mixing = self.mixing(checkpoint)
        table = self.table(mixing, self.find_spelling(checkpoint, mixing))
        tensors = checkpoint.read({row.theirs: row.shape for row in table})
        with torch.device("meta"):
            stack = DepthStack(mixing.mechanism, dim=mixing.dim, depth=2 * mixing.layers, **mixing.options)
        expected = stack.state_dict()
        state = {row.ours: tensors[row.theirs][row.unused :] for row in table if row.ours is not None}
        assign_tensors(stack, {name: tensor.reshape(expected[name].shape) for name, tensor in state.items()})
        notes = ("only the depth mixing was taken; the rest of the model is another architecture", *self.notes())
        return Converted(module=stack.eval(), tensors=len(table), units=self.units(mixing), notes=notes)

    def write(self, module: DepthStack | Decoder) -> Converted:
        stack, notes = stack_of(module)
        mixing = self.mixing_of(stack)
        ours = {name: tensor for name, tensor in stack.state_dict().items() if not is_record(name)}
        like = next(iter(ours.values()))
        state = {row.theirs: fill_row(row, ours, like) for row in self.table(mixing, self.spellings[0])}
        return Converted(
            module=stack,
            tensors=len(state),
            units=self.units(mixing),
            notes=(*notes, *self.notes()),
            config=self.configuration(mixing),
            state=state,
        )

    def check_type(self, checkpoint: Checkpoint) -> None:
        kind = checkpoint.config.get("model_type")
        if kind not in self.model_types:
            raise ValueError(
                f"{checkpoint.path} has model_type={kind!r}; {did_you_mean(kind, self.model_types)}expected one of "
                f"{', '.join(self.model_types)} with --from {self.name}"
            )

    def find_spelling(self, checkpoint: Checkpoint, mixing: Mixing) -> str:
        """The spelling of the names in a checkpoint. Both at once, or layers that it should not have, are an error."""
        wanted = {spelling: [row.theirs for row in self.table(mixing, spelling)] for spelling in self.spellings}
        uses = Counter(name for names in wanted.values() for name in names)  # some names belong to two spellings
        found = {s: [n for n in names if n in checkpoint.files and uses[n] == 1] for s, names in wanted.items()}
        present = [spelling for spelling in self.spellings if found[spelling]]
        if len(present) > 1:
            first, second = (found[spelling][0] for spelling in present[:2])
            raise ValueError(
                f"{checkpoint.folder} mixes two spellings: it has {first} and {second}; expected one spelling"
            )
        if not present:
            raise ValueError(
                f"{checkpoint.folder} has no depth mixing of {self.title}; expected tensors such as "
                f"{' or '.join(names[0] for names in wanted.values())}"
            )
        (spelling,) = present
        longer = replace(mixing, layers=mixing.layers + 1)
        added = {row.theirs for row in self.table(longer, spelling)} - {*wanted[spelling]}
        if surplus := sorted(added & checkpoint.files.keys()):
            raise ValueError(
                f"{checkpoint.folder} has {surplus[0]}, but {checkpoint.path.name} says num_hidden_layers="
                f"{mixing.layers}; expected tensors of layers 0 to {mixing.layers - 1}. Check num_hidden_layers"
            )
        return spelling

    def mixing_of(self, stack: DepthStack) -> Mixing:
        """A stack as the other project would describe it, or an error that says why it cannot."""
        if stack.registered not in self.fixed:
            raise ValueError(
                f"a stack of {stack.registered} cannot be written as {self.name}: {self.title} has only "
                f"{' and '.join(self.fixed)}"
            )
        kinds = [mixer.site.kind for mixer in stack]
        if stack.depth % 2 or kinds != ["attn", "mlp"] * (stack.depth // 2):
            raise ValueError(
                f"a stack of {stack.depth} sublayers ({', '.join(kinds[:4])} …) cannot be written as {self.name}: "
                "expected attention and MLP in turn, two sublayers in each layer"
            )
        if stack.shared:
            raise ValueError(
                f"a stack whose executions share mixers (order=…) cannot be written as {self.name}: expected one mixer "
                "for each sublayer"
            )
        options = stack.config.canonical(dim=stack.dim, depth=stack.depth)
        for option, value in self.fixed[stack.registered].items():
            if options[option] != value:
                raise ValueError(
                    f"{stack.registered} with {option}={options[option]!r} cannot be written as {self.name}: "
                    f"{self.title} has {option}={value!r} only"
                )
        mixing = Mixing(dim=stack.dim, layers=stack.depth // 2, mechanism=stack.registered, options=options)
        self.check_options(mixing)
        return mixing


def check_sizes(dim: int, layers: int) -> None:
    """Limits of depthmix, before anything of that size is made."""
    check_range("hidden_size", dim, 1, MOST_DIM)
    check_range("num_hidden_layers", layers, 1, MOST_DEPTH // 2)


def stack_of(module: DepthStack | Decoder) -> tuple[DepthStack, tuple[str, ...]]:
    """The stack of a decoder, with what is left out."""
    if not isinstance(module, Decoder):
        check_whole(module, "write_checkpoint")
        return module, ()
    notes = ["only the mixers were written: attention, MLP and embeddings of the decoder are not in these files"]
    if module.config.kv_mixer is not None:
        notes.append(f"the KV mechanism {module.config.kv_mixer.name} has no place in them and was left out")
    if module.config.loop is not None:
        notes.append("each execution of a looped layer counts as a layer")
    return module.depth, tuple(notes)


def fill_row(row: Row, ours: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """The tensor of a row for writing: depthmix's part, behind the rows that depthmix does not have."""
    if row.ours is None:
        return torch.full(row.shape, row.fill, dtype=like.dtype)
    given = ours[row.ours].detach().cpu()
    own = given.reshape(row.shape[0] - row.unused, *row.shape[1:])
    if not row.unused:
        return own
    return torch.cat([torch.full((row.unused, *row.shape[1:]), row.fill, dtype=given.dtype), own])
