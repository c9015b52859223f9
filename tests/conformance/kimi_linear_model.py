"""Tiny Kimi Linear models of transformers: weights under their public names, logits and gradients, in float64.

    python -m tests.conformance.kimi_linear_model FOLDER

A process of its own, because transformers takes the kernels of fla-core wherever that can be imported, and those need a
GPU: fla is hidden here before transformers is imported, which no other test may notice. For each form FOLDER gets
FORM/weights and FORM/gradients (as `save_pretrained` writes them) and FORM/results.safetensors; 48b.json has the number
of parameters of the released size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY = 37
KDA, MLA = "linear_attention", "full_attention"
SIZES: dict[str, dict[str, Any]] = {
    "kimi": {  # three KDA and one MLA; the first layer is dense
        "layer_types": [KDA, KDA, KDA, MLA],
        "hidden_size": 24,
        "intermediate_size": 40,
        "moe_intermediate_size": 12,
        "num_attention_heads": 2,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "uneven": {  # every width, number and eps is another one, and two layers are dense
        "layer_types": [MLA, KDA, MLA],
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "hidden_size": 18,
        "intermediate_size": 30,
        "moe_intermediate_size": 7,
        "num_attention_heads": 3,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 9,
        "qk_rope_head_dim": 3,
        "v_head_dim": 5,
        "linear_head_dim": 6,
        "linear_num_heads": 2,
        "linear_conv_kernel_dim": 3,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "rms_norm_eps": 1e-2,
    },
}
OPTIONS: dict[str, dict[str, Any]] = {  # the same for the reference
    "kimi": {"attention": ["kda"] * 3 + ["mla"], "heads": 2, "active": 2},
    "uneven": {
        "attention": ["mla", "kda", "mla"],
        "heads": 3,
        "kda_heads": 2,
        "active": 3,
        "scale": 1.7,
        "eps": 1e-2,
    },
}
LENGTHS = [5, 1, 7]  # documents of one packed row
# Rows that begin or end with padding. In the middle of a row transformers lets it into convolution and state.
VALID = torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [1] * 4 + [0] * 5], dtype=torch.bool)


def some_tokens(rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rows + length)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def whole() -> Tensor:
    """More tokens than a chunk of theirs has."""
    return some_tokens(2, 67)


def padded() -> Tensor:
    return some_tokens(*VALID.shape)


def packed() -> Tensor:
    return some_tokens(1, sum(LENGTHS))


def project(logits: Tensor) -> Tensor:
    """A number that every logit enters with its own weight."""
    generator = torch.Generator().manual_seed(3)
    return (logits * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)).mean()


class DoubleTorch:
    """torch for a module that asks for float32: it gets float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def load_modeling() -> Any:
    sys.modules["fla"] = sys.modules["causal_conv1d"] = None  # type: ignore[assignment] # importing them now fails
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    modeling.torch = DoubleTorch()  # type: ignore[attr-defined]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    return modeling


def make(modeling: Any, form: str) -> Any:
    """A model with every parameter and the bias of the experts away from its start."""
    config = modeling.KimiLinearConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=len(SIZES[form]["layer_types"]),
        num_key_value_heads=SIZES[form]["num_attention_heads"],
        max_position_embeddings=128,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **SIZES[form],
    )
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    torch.manual_seed(0)
    model = modeling.KimiLinearForCausalLM(config).double().eval()
    biases = [tensor for name, tensor in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for tensor in [*model.parameters(), *biases]:
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return model


def write(model: Any, folder: Path) -> None:
    model.save_pretrained(folder / "weights")
    logits = model(whole(), use_cache=False).logits
    project(logits).backward()
    with torch.no_grad():
        documents = [model(part, use_cache=False).logits for part in packed().split(LENGTHS, dim=1)]
        masked = model(padded(), attention_mask=VALID.long(), use_cache=False).logits
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder / "gradients")  # under public names, by their own conversion
    results = {"whole": logits.detach(), "padded": masked, "packed": torch.cat(documents, 1)}
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, folder / "results.safetensors")


def count_48b(modeling: Any) -> int:
    """Their defaults are the released sizes; only the layer list is not, which without a list ends with KDA."""
    full = {4, 8, 12, 16, 20, 24, 27}  # from 1, as the released configuration has them
    config = modeling.KimiLinearConfig(layer_types=[MLA if i + 1 in full else KDA for i in range(27)])
    with torch.device("meta"):
        model = modeling.KimiLinearForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    modeling = load_modeling()
    (folder / "48b.json").write_text(json.dumps({"parameters": count_48b(modeling)}))
    for form in SIZES:
        write(make(modeling, form), folder / form)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
