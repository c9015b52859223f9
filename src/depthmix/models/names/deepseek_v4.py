"""The hyper-connections of DeepSeek-V4, under the names in its files and under those of transformers.

Axes: m stream, D channel. The rows of `fn` and `base` are those of `projection` and `bias`: H_pre, H_post, H_res.
"""

from __future__ import annotations

from typing import Any, ClassVar

from depthmix.mechanisms.stream_starts import MOST_STREAMS, logit
from depthmix.models.names.base import Mixing, Row, StackFormat, check_sizes
from depthmix.models.names.checkpoint import Checkpoint
from depthmix.support.checks import check_range

PARTS = {"fn": "projection", "base": "bias", "scale": "scale"}
SITES = {  # attention, MLP and head
    "files": ("layers.{layer}.hc_attn_{part}", "layers.{layer}.hc_ffn_{part}", "hc_head_{part}"),
    "modules": (  # of transformers
        "model.layers.{layer}.attn_hc.{part}",
        "model.layers.{layer}.ffn_hc.{part}",
        "model.hc_head.hc_{part}",
    ),
    "save_pretrained": (  # of transformers: the names of the files, but not for the head
        "model.layers.{layer}.hc_attn_{part}",
        "model.layers.{layer}.hc_ffn_{part}",
        "model.hc_head.hc_{part}",
    ),
}


class DeepSeekV4(StackFormat):
    """Site 0 of DeepSeek-V4 has an H_pre, which scales the embedding: all streams are copies of it there. Site 0 of
    depthmix reads the embedding as it is, so the rows of that H_pre are dropped, and written such that it sums to 1."""

    name = "deepseek_v4"
    title = "DeepSeek-V4"
    model_types = ("deepseek_v4",)
    spellings = tuple(SITES)
    fixed: ClassVar = {"mhc": {"transition": "full", "readout": "learned"}}

    def mixing(self, checkpoint: Checkpoint) -> Mixing:
        fields, number = checkpoint.config, checkpoint.number
        layers, dim = number(fields, "num_hidden_layers", int), number(fields, "hidden_size", int)
        check_sizes(dim, layers)
        check_range("hc_mult", streams := number(fields, "hc_mult", int), 2, MOST_STREAMS)
        options = {
            "streams": streams,
            "iterations": number(fields, "hc_sinkhorn_iters", int),
            "eps": float(number(fields, "hc_eps", float, zero=True)),
            "norm_eps": float(number(fields, "rms_norm_eps", float)),
            "readout": "learned",
        }
        return Mixing(dim=dim, layers=layers, mechanism="mhc", options=options)

    def table(self, mixing: Mixing, spelling: str) -> list[Row]:
        attention, mlp, head = SITES[spelling]
        rows = []
        for i in range(mixing.layers):
            rows += site_rows(attention, i, f"mixers.{2 * i}", mixing, reads=i > 0)
            rows += site_rows(mlp, i, f"mixers.{2 * i + 1}", mixing)
        m = mixing.options["streams"]
        shapes = {"fn": (m, m * mixing.dim), "base": (m,), "scale": (1,)}
        return rows + [
            Row(theirs=head.format(part=part), shape=shapes[part], ours=f"out.{ours}") for part, ours in PARTS.items()
        ]

    def check_options(self, mixing: Mixing) -> None:
        m, eps = mixing.options["streams"], mixing.options["eps"]
        if not eps < 1 / m:
            raise ValueError(
                f"eps={eps} with streams={m} cannot be written as {self.name}: expected a number below {1 / m:g}, such "
                f"as the 1e-6 of {self.title}"
            )

    def units(self, mixing: Mixing) -> dict[str, int]:
        return {}

    def configuration(self, mixing: Mixing) -> dict[str, Any]:
        options = mixing.options
        return {
            "model_type": "deepseek_v4",
            "hidden_size": mixing.dim,
            "num_hidden_layers": mixing.layers,
            "hc_mult": options["streams"],
            "hc_sinkhorn_iters": options["iterations"],
            "hc_eps": options["eps"],
            "rms_norm_eps": options["norm_eps"],
        }

    def notes(self) -> tuple[str, ...]:
        return (
            "H_pre of site 0 (layer 0, attention) only scales the embedding, which the norm of that sublayer removes "
            "up to its eps: depthmix has none",
        )


def site_rows(site: str, layer: int, ours: str, mixing: Mixing, *, reads: bool = True) -> list[Row]:
    """The three tensors of a site; without H_pre where `reads` is False."""
    m, eps = mixing.options["streams"], mixing.options["eps"]
    rows = (2 + m) * m
    sum_to_one = logit(1 / m - eps) if eps < 1 / m else 0.0
    shapes = {"fn": (rows, m * mixing.dim), "base": (rows,), "scale": (3,)}
    unused = {"fn": m, "base": m, "scale": 1}
    fills = {"fn": 0.0, "base": sum_to_one, "scale": 1.0}
    return [
        Row(
            theirs=site.format(layer=layer, part=part),
            shape=shapes[part],
            ours=f"{ours}.{name}",
            unused=0 if reads else unused[part],
            fill=fills[part],
        )
        for part, name in PARTS.items()
    ]
