"""Attention Residuals under the names of Kimi K3 and of flash-linear-attention.

Both store a query as the weight of a linear map, [1, D], and a key weight as that of a norm, [D]. Both also store the
two for site 0, which reads the embedding alone, and never use them: zeros and ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from depthmix.models.names.base import Mixing, Row, StackFormat, check_sizes
from depthmix.models.names.checkpoint import Checkpoint
from depthmix.models.saved import CONFIG

PLAIN = {
    **{"query": "static", "mixing": "softmax", "key_norm": True, "heads": 1, "scale": 1.0, "score": None},
    "scale_by_count": False,
}


class AttnResFormat(StackFormat):
    """Names of the sites, and the field of the configuration that gives the size of a block."""

    sites: ClassVar[tuple[str, str, str]]  # of attention, MLP and the output; the part is "proj" or "norm"
    size_field: ClassVar[str]
    eps_field: ClassVar[str]

    @abstractmethod
    def fields(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a configuration that describes the language model."""

    @abstractmethod
    def block(self, size: int, depth: int, where: str) -> tuple[str, dict[str, int]]:
        """The mechanism and its block in sublayers, from the size of a block in the other project's unit."""

    def mixing(self, checkpoint: Checkpoint) -> Mixing:
        fields, number = self.fields(checkpoint.config), checkpoint.number
        layers, dim = number(fields, "num_hidden_layers", int), number(fields, "hidden_size", int)
        check_sizes(dim, layers)
        size = number(fields, self.size_field, int, "A model without it has plain residuals, no depth mixing")
        name, options = self.block(size, 2 * layers, f"{checkpoint.path} has {self.size_field}={size}")
        eps = float(number(fields, self.eps_field, float))
        return Mixing(dim=dim, layers=layers, mechanism=name, options={**options, "eps": eps})

    def table(self, mixing: Mixing, spelling: str) -> list[Row]:
        attention, mlp, out = (spelling + site for site in self.sites)
        rows = []
        for i in range(mixing.layers):
            rows += site_rows(attention, i, f"mixers.{2 * i}" if i else None, mixing.dim)
            rows += site_rows(mlp, i, f"mixers.{2 * i + 1}", mixing.dim)
        return rows + site_rows(out, mixing.layers, "out", mixing.dim)

    def notes(self) -> tuple[str, ...]:
        return ("the query and key weight of site 0 (layer 0, attention) are never used: depthmix has none",)


def site_rows(site: str, layer: int, ours: str | None, dim: int) -> list[Row]:
    """The query and the key weight of a site."""
    query, key_weight = (site.format(layer=layer, part=part) for part in ("proj", "norm"))
    if ours is None:
        return [
            Row(theirs=query, shape=(1, dim), ours=None, unused=1, fill=0.0),
            Row(theirs=key_weight, shape=(dim,), ours=None, unused=dim, fill=1.0),
        ]
    return [
        Row(theirs=query, shape=(1, dim), ours=f"{ours}.query"),
        Row(theirs=key_weight, shape=(dim,), ours=f"{ours}.key_weight"),
    ]


class KimiK3(AttnResFormat):
    """Kimi K3: blocks of whole layers."""

    name = "kimi_k3"
    title = "Kimi K3"
    model_types = ("kimi_k3", "kimi_linear")
    spellings = ("language_model.model.", "model.")  # of the whole model, and of its language model
    fixed: ClassVar = {"block_attnres": PLAIN}
    sites = (
        "layers.{layer}.self_attention_res_{part}.weight",
        "layers.{layer}.mlp_res_{part}.weight",
        "output_attn_res_{part}.weight",
    )
    size_field, eps_field = "attn_res_block_size", "rms_norm_eps"

    def fields(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise ValueError(f"{CONFIG} has text_config={text!r}; expected the fields of the language model")
        return text

    def block(self, size: int, depth: int, where: str) -> tuple[str, dict[str, int]]:
        return "block_attnres", {"block_sublayers": min(2 * size, depth)}

    def check_options(self, mixing: Mixing) -> None:
        size = mixing.options["block_sublayers"]
        if size % 2:
            raise ValueError(
                f"block_sublayers={size} cannot be written as {self.name}: expected an even number, since "
                f"{self.title} counts blocks in layers of two sublayers"
            )

    def units(self, mixing: Mixing) -> dict[str, int]:
        size = mixing.options["block_sublayers"]
        return {f"{self.size_field} (layers)": size // 2, "block_sublayers": size}

    def configuration(self, mixing: Mixing) -> dict[str, Any]:
        text = {
            "model_type": "kimi_linear",
            "hidden_size": mixing.dim,
            "num_hidden_layers": mixing.layers,
            self.size_field: mixing.options["block_sublayers"] // 2,
            self.eps_field: mixing.options["eps"],
        }
        return {"model_type": "kimi_k3", "text_config": text}


class FlashLinearAttention(AttnResFormat):
    """flash-linear-attention: blocks of sublayers, of which one is full AttnRes."""

    name = "fla"
    title = "flash-linear-attention"
    model_types = (
        *("transformer", "abc", "bitnet", "comba", "delta_net", "deltaformer", "forgetting_transformer"),
        *("gated_deltanet", "gated_deltaproduct", "gla", "gsa", "hgrn", "hgrn2", "kda", "lightnet", "linear_attn"),
        *("log_linear_mamba2", "mesa_net", "mla", "moba", "mom", "nsa", "parallax", "path_attn", "raven", "retnet"),
        *("samba", "wall_transformer"),
    )
    spellings = ("model.", "backbone.")
    fixed: ClassVar = {"attnres": {**PLAIN, "window": None}, "block_attnres": PLAIN}
    sites = ("layers.{layer}.attn_res_{part}.weight", "layers.{layer}.mlp_res_{part}.weight", "res_{part}.weight")
    size_field, eps_field = "attnres_block_size", "norm_eps"

    def fields(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config

    def check_type(self, checkpoint: Checkpoint) -> None:
        third = next((name for name in checkpoint.files if "shared_kv_res_" in name), None)
        if checkpoint.config.get("model_type") == "yoco" or third is not None:
            raise ValueError(
                f"{checkpoint.folder} is a yoco model{'' if third is None else f' (it has {third})'}, which reads over "
                "depth at one more place, for its shared keys and values; expected a model that reads before each "
                "sublayer and the head"
            )
        super().check_type(checkpoint)

    def block(self, size: int, depth: int, where: str) -> tuple[str, dict[str, int]]:
        if size > 1 and size % 2:
            raise ValueError(f"{where}; expected 1 or an even number, as {self.title} does")
        if size == 1:
            return "attnres", {}
        return "block_attnres", {"block_sublayers": min(size, depth)}

    def check_options(self, mixing: Mixing) -> None:
        size = block_of(mixing)
        if size > 1 and size % 2:
            raise ValueError(
                f"block_sublayers={size} cannot be written as {self.name}: expected 1 or an even number, since a "
                f"block of {self.title} is a whole number of layers"
            )

    def units(self, mixing: Mixing) -> dict[str, int]:
        return {f"{self.size_field} (sublayers)": block_of(mixing), "block_sublayers": block_of(mixing)}

    def configuration(self, mixing: Mixing) -> dict[str, Any]:
        return {
            "model_type": "transformer",
            "hidden_size": mixing.dim,
            "num_hidden_layers": mixing.layers,
            self.size_field: block_of(mixing),
            self.eps_field: mixing.options["eps"],
        }


def block_of(mixing: Mixing) -> int:
    """Sublayers in a block; full AttnRes has blocks of one."""
    return int(mixing.options.get("block_sublayers", 1))
