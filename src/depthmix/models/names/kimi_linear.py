"""Kimi Linear under its public names: whole models, read into a decoder and written from one.

The tensors are the decoder's, one to one, but for three things: each expert is a tensor of its own there, convolutions
have an axis of one channel, and A_log has three axes of one. Layers count from 0 in names, from 1 in the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms import DepthStack
from depthmix.mechanisms.record import is_record
from depthmix.models.config import DecoderConfig
from depthmix.models.decoder import Decoder
from depthmix.models.kinds import WIDE
from depthmix.models.names.base import Converted, WholeFormat
from depthmix.models.names.checkpoint import Checkpoint
from depthmix.models.names.kimi_linear_config import read_config, write_config
from depthmix.models.names.tensor_file import Entry, TensorFile
from depthmix.models.saved import MODEL, assign_tensors, list_first, write_sealed
from depthmix.support.checks import did_you_mean
from depthmix.support.files import FORMAT, version
from depthmix.support.terminal import Progress

PROJECTIONS = tuple(f"{part}_proj" for part in ("q", "k", "v", "o", "b", "f_a", "f_b", "g_a", "g_b"))
ATTENTION = {  # theirs in self_attn -> ours in the sublayer
    "kda": {
        **{f"{name}.weight": f"{name}.weight" for name in (*PROJECTIONS, "o_norm")},
        **{f"{part}_conv1d.weight": f"{part}_conv" for part in ("q", "k", "v")},
        **{name: name for name in WIDE},
    },
    "mla": {
        "q_proj.weight": "q_proj.weight",
        "kv_a_proj_with_mqa.weight": "kv_a.weight",
        "kv_a_layernorm.weight": "kv_norm.weight",
        "kv_b_proj.weight": "kv_b.weight",
        "o_proj.weight": "o_proj.weight",
    },
}
SWIGLU = ("gate_proj", "up_proj", "down_proj")
EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MOE = "block_sparse_moe"
BIAS = "balance_bias"
SPELLINGS = ("mlp", MOE)  # of a dense MLP: in the public files, and as transformers saves it
HARMLESS = (".rotary_emb.inv_freq",)  # endings of constants that older code saves; nothing is rotated


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor under its public name, and where it is in the decoder: `ours`, or the row of one expert of it."""

    theirs: str
    ours: str
    expert: int | None = None

    def shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The public shape, from the decoder's."""
        if self.theirs.endswith("_conv1d.weight"):
            return own[0], 1, own[1]
        if self.theirs.endswith(".A_log"):
            return 1, 1, own[0], 1
        return own if self.expert is None else own[1:]


def places(config: DecoderConfig, spelling: str = "mlp") -> Iterator[Place]:
    """All tensors, in the order of the layers."""
    yield Place(theirs="model.embed_tokens.weight", ours="embed.weight")
    for i, kind in enumerate(config.attention_kinds):
        layer, attention, mlp = f"model.layers.{i}", f"sublayers.{2 * i}", f"sublayers.{2 * i + 1}"
        yield Place(theirs=f"{layer}.input_layernorm.weight", ours=f"{attention}.norm.weight")
        for theirs, ours in ATTENTION[kind].items():
            yield Place(theirs=f"{layer}.self_attn.{theirs}", ours=f"{attention}.{ours}")
        yield Place(theirs=f"{layer}.post_attention_layernorm.weight", ours=f"{mlp}.norm.weight")
        if config.moe is None or i < config.moe.dense_layers:
            yield from swiglu_places(f"{layer}.{spelling}", mlp)
        else:
            yield from moe_places(f"{layer}.{MOE}", mlp, config.moe.experts, shared=config.moe.shared > 0)
    yield Place(theirs="model.norm.weight", ours="norm.weight")
    if not config.tie_embeddings:
        yield Place(theirs="lm_head.weight", ours="head.weight")


def moe_places(theirs: str, ours: str, experts: int, *, shared: bool) -> Iterator[Place]:
    yield Place(theirs=f"{theirs}.gate.weight", ours=f"{ours}.router.weight")
    yield Place(theirs=f"{theirs}.gate.e_score_correction_bias", ours=f"{ours}.{BIAS}")
    for e in range(experts):
        for name, part in EXPERT.items():
            yield Place(theirs=f"{theirs}.experts.{e}.{name}.weight", ours=f"{ours}.{part}", expert=e)
    if shared:
        yield from swiglu_places(f"{theirs}.shared_experts", f"{ours}.shared")


def swiglu_places(theirs: str, ours: str) -> Iterator[Place]:
    for part in SWIGLU:
        yield Place(theirs=f"{theirs}.{part}.weight", ours=f"{ours}.{part}.weight")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checkpoint that was checked by the headers of its files.

    model: the decoder, on the meta device.
    places: all tensors, by their public names.
    entries: dtypes and shapes of the decoder's tensors.
    """

    checkpoint: Checkpoint
    model: Decoder
    places: Mapping[str, Place]
    entries: Mapping[str, Entry]
    notes: tuple[str, ...]

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """Every tensor in the dtype and the shape that it, or its row, has in the decoder; file by file."""
        with Progress(len(self.places)) as progress:
            for done, (name, tensor) in enumerate(self.checkpoint.tensors(self.places), 1):
                place = self.places[name]
                dtype, shape = self.entries[place.ours]
                yield place, tensor.reshape(shape if place.expert is None else shape[1:]).to(dtype)
                del tensor  # before the next one is read
                progress.update(done, f"reading {self.checkpoint.files[name]}: {done} of {len(self.places)} tensors")

    def converted(self, module: Decoder) -> Converted:
        return Converted(module=module, tensors=len(self.places), units={}, notes=self.notes)


class KimiLinear(WholeFormat):
    """Kimi Linear 48B, and models of its architecture."""

    name = "kimi_linear"
    title = "Kimi Linear"
    model_types: ClassVar = ("kimi_linear",)

    def read(self, checkpoint: Checkpoint) -> Converted:
        plan = self.plan(checkpoint)
        state = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in plan.entries.items()}
        for place, tensor in plan.tensors():
            target = state[place.ours]
            (target if place.expert is None else target[place.expert]).copy_(tensor)
        assign_tensors(plan.model, state, copy=False)
        return plan.converted(plan.model.eval())

    def save(self, checkpoint: Checkpoint, folder: Path) -> Converted:
        plan = self.plan(checkpoint)
        records = {name: value for name, value in plan.model.state_dict().items() if is_record(name)}
        entries = {name: Entry(value.dtype, tuple(value.shape)) for name, value in records.items()}

        def write(path: Path) -> None:
            with TensorFile(path, {**entries, **plan.entries}) as file:
                for name, value in records.items():
                    file.put(name, value)
                for place, tensor in plan.tensors():
                    file.put(place.ours, tensor, place.expert)

        fields = {"format": FORMAT, "depthmix": version(), MODEL.field: plan.model.config.saved()}
        write_sealed(folder, fields, write)
        return plan.converted(plan.model.eval())

    def write(self, module: DepthStack | Decoder) -> Converted:
        if not isinstance(module, Decoder):
            raise TypeError(f"got a {type(module).__name__}, of which kimi_linear has nothing; expected a Decoder")
        config, own = module.config, module.state_dict()
        fields = write_config(config, str(module.embed.weight.dtype).removeprefix("torch."))
        notes = ["a tokenizer and the ids of its special tokens are not part of it"]
        if config.moe is not None and config.moe.balance != "bias":
            notes.append(f"moe.balance={config.moe.balance!r} has no bias: zeros were written, and change nothing")
        state = {place.theirs: public_tensor(place, own) for place in places(config)}
        return Converted(module=module, tensors=len(state), units={}, notes=tuple(notes), config=fields, state=state)

    def plan(self, checkpoint: Checkpoint) -> Plan:
        kind = checkpoint.config.get("model_type")
        if kind not in self.model_types:
            raise ValueError(
                f"{checkpoint.path} has model_type={kind!r}; {did_you_mean(kind, self.model_types)}expected "
                f"{self.name} with --from {self.name}"
            )
        config, notes = read_config(checkpoint)
        table = find_places(checkpoint, config)
        with torch.device("meta"):
            model = Decoder(config)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if not is_record(name)}
        dtypes = checkpoint.check({name: place.shape(shapes[place.ours]) for name, place in table.items()})
        entries = {name: Entry(dtype, shapes[name]) for name, dtype in join_dtypes(checkpoint, table, dtypes).items()}
        return Plan(checkpoint=checkpoint, model=model, places=table, entries=entries, notes=notes)


def find_places(checkpoint: Checkpoint, config: DecoderConfig) -> dict[str, Place]:
    """The table in the spelling of the checkpoint, which has all of its tensors and no others."""
    table: dict[str, Place] = {}
    missing: list[str] = []
    for place in places(config, find_spelling(checkpoint)):
        if place.theirs in checkpoint.files:
            table[place.theirs] = place
        else:
            missing.append(place.theirs)
        if len(missing) > 4:  # a wrong configuration can ask for millions
            break
    checkpoint.check_names(missing)
    unknown = [name for name in checkpoint.files if name not in table and not name.endswith(HARMLESS)]
    if unknown:
        mixing = any("_res_proj." in name or "_res_norm." in name for name in unknown)
        hint = (
            "Depth mixing of Kimi K3 is read by --from kimi_k3" if mixing else "Check its sizes and its lists of layers"
        )
        raise ValueError(
            f"{checkpoint.folder} has {list_first(unknown, 4)}, which a Kimi Linear model with this "
            f"{checkpoint.path.name} does not have. {hint}"
        )
    return table


def find_spelling(checkpoint: Checkpoint) -> str:
    """How the names of dense MLPs are spelt; both spellings at once are an error."""
    found: dict[str, str] = {}
    for name in checkpoint.files:
        parts = name.split(".")
        if len(parts) == 6 and parts[3] in SPELLINGS and parts[4] in SWIGLU:
            found.setdefault(parts[3], name)
    if len(found) > 1:
        raise ValueError(
            f"{checkpoint.folder} mixes two spellings: it has {' and '.join(found.values())}; expected one"
        )
    return next(iter(found), SPELLINGS[0])


def join_dtypes(
    checkpoint: Checkpoint, table: Mapping[str, Place], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """The dtype of each of the decoder's tensors: that of the file, which all experts share.

    Float32 at least for what the decoder keeps in it: widening loses nothing, and training in less would.
    """
    joined: dict[str, torch.dtype] = {}
    for name, place in table.items():
        wide = place.ours.rpartition(".")[2] in (*WIDE, BIAS)
        dtype = ops.accumulator(dtypes[name]) if wide else dtypes[name]
        if joined.setdefault(place.ours, dtype) != dtype:
            raise ValueError(
                f"{checkpoint.folder} has {name} in {dtypes[name]} and other experts of its layer in "
                f"{joined[place.ours]}; expected one dtype for all experts of a layer"
            )
    return joined


def public_tensor(place: Place, own: Mapping[str, Tensor]) -> Tensor:
    """A view of the decoder's tensor in the public shape."""
    if place.ours not in own:  # the bias of a router that balances by a loss
        return torch.zeros(own[place.ours.replace(BIAS, "router.weight")].shape[0])
    tensor = own[place.ours]
    shape = place.shape(tuple(tensor.shape))
    return (tensor if place.expert is None else tensor[place.expert]).reshape(shape)
