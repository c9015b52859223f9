"""The class of a wrapped model: its family's causal language model, with the mixers that its configuration names."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from depthmix.hf.card import write_model_card
from depthmix.hf.families import family_of
from depthmix.hf.kv import FUNCTIONS, PREFIX, calls_registered_functions, recorded, route_attention
from depthmix.hf.layer import MIXERS, VALUE_MIXER, find_part, wrap_layer
from depthmix.hf.loading import check_loading, check_reentry, reset_missing
from depthmix.hf.wrapped_config import FIELD, config_class, read_fields, when_read
from depthmix.mechanisms import DepthMixer, DepthStack, DividedModel, KVMixer, KVStack
from depthmix.models import Choice


class WrappedModel(DividedModel):
    """Before the family's causal language model."""

    config: Any
    base_model: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        install(self, *make_stacks(self, *read_fields(getattr(config, FIELD))))

    @classmethod
    def from_pretrained(cls, *args: Any, use_safetensors: bool = True, device_map: Any = None, **options: Any) -> Any:
        """Load a folder that `save_pretrained` wrote. The options are those of transformers; nothing is unpickled."""
        check_loading(use_safetensors)
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                f"device_map={device_map}; expected no 'disk': parameters of the mixers would not come back from it"
            )
        load: Any = super()
        return load.from_pretrained(*args, use_safetensors=True, device_map=device_map, **options)

    def depth_stack(self) -> DepthStack:
        """The whole stack, of the slices in the layers; see `dm.trace`."""
        return DepthStack.joined([active(getattr(layer, MIXERS)) for layer in layers_of(self)])

    def value_mixers(self) -> list[KVMixer]:
        return [active(getattr(layer, VALUE_MIXER)) for layer in layers_of(self) if hasattr(layer, VALUE_MIXER)]

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """As in transformers, with a model card beside the weights."""
        saver: Any = super()
        saver.save_pretrained(save_directory, *args, **options)
        write_model_card(self, save_directory, self.depth_stack(), self.value_mixers(), options)

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        setter: Any = super()
        setter.set_attn_implementation(*args, **kwargs)
        if self.value_mixers():
            route_attention(self)

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Called by transformers."""
        check_reentry(kwargs.get("gradient_checkpointing_func", args[1] if args[1:] else None))
        setter: Any = super()
        setter._set_gradient_checkpointing(*args, **kwargs)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Called by transformers: give mixers that a checkpoint lacks their start; what was loaded stays."""
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, (DepthMixer, KVMixer)):
                reset_missing(module)
        initialise: Any = super()
        initialise.initialize_weights()


def active(module: Any) -> Any:
    """The module that runs: PEFT keeps a trained copy of it beside the original."""
    if not hasattr(module, "original_module"):
        return module
    adapters = [module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save]
    return module.original_module if module.disable_adapters or not adapters else adapters[0]


@functools.cache
def model_class(base: type) -> Any:
    """The class of a wrapped model, for the causal language model of a family; registered with the Auto classes."""
    config = config_class(base.config_class)  # type: ignore[attr-defined]
    strict = getattr(base, "_keep_in_fp32_modules_strict", None) or ()
    body = {
        "__module__": base.__module__,  # transformers reads that file's source to learn what a class supports
        "base": base,
        "config_class": config,
        "_keep_in_fp32_modules_strict": {*strict, MIXERS, VALUE_MIXER},
    }
    made = type(f"Depthmix{base.__name__}", (WrappedModel, base), body)
    AutoModelForCausalLM.register(config, made, exist_ok=True)
    family = base.config_class.model_type  # type: ignore[attr-defined]
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[f"depthmix_{family}"] = made.__name__  # for pipelines and Trainer
    return made


def layers_of(model: Any) -> nn.ModuleList:
    layers: nn.ModuleList = getattr(model.base_model, family_of(model.config).layers)
    return layers


def make_stacks(model: Any, mixer: Choice, kv: Choice | None, blend: bool) -> tuple[DepthStack, KVStack | None]:
    """The mixers of a model, at their start."""
    depth = DepthStack(mixer.name, **sizes_of(model), **mixer.options)
    if kv is None:
        return depth, None
    if (obstacle := obstacle_to_values(model)) is not None:
        raise ValueError(f"kv_mixer={kv.name!r} with model_type={model.config.model_type!r}; expected None: {obstacle}")
    return depth, KVStack(kv.name, head_dim=head_dim(model), depth=len(layers_of(model)), blend=blend, **kv.options)


def obstacle_to_values(model: Any) -> str | None:
    """Why the values of this model cannot be mixed over depth; None if they can."""
    family = family_of(model.config)
    if not family.kv:
        return "its attention does not cache keys and values of heads in every layer, so there is nothing to mix"
    if (chosen := model.config._attn_implementation or "eager").removeprefix(PREFIX) not in FUNCTIONS:
        return (
            f"its attn_implementation is {chosen!r}. Values can be mixed in {', '.join(FUNCTIONS)}: choose one with "
            "model.set_attn_implementation"
        )
    first = layers_of(model)[0]
    if not calls_registered_functions(getattr(first, find_part(first, family.attention))):
        return (
            f"transformers {transformers.__version__} computes its attention where values cannot be mixed. A newer "
            "version may not"
        )
    return None


def sizes_of(model: Any) -> dict[str, Any]:
    """Width, number and kinds of the sublayers."""
    family, layers = family_of(model.config), len(layers_of(model))
    kinds = ["attn"] if family.parallel else ["attn", "mlp"]
    return {"dim": model.config.hidden_size, "depth": family.sites * layers, "kinds": kinds * layers}


def head_dim(model: Any) -> int:
    config = model.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def install(model: Any, depth: DepthStack, kv: KVStack | None) -> None:
    """Put each layer's part of the mixers into the layer."""
    family = family_of(model.config)
    for i, layer in enumerate(layers_of(model)):
        home = next(layer.parameters())
        wide = torch.promote_types(home.dtype, torch.float32)
        mixers = depth.slice(family.sites * i, family.sites * (i + 1)).to(home.device, wide)
        value_mixer: Any = None if kv is None else kv[i].to(home.device, wide)
        if value_mixer is not None:
            value_mixer.__class__ = recorded(value_mixer.__class__)
        wrap_layer(layer, family, mixers.train(layer.training), value_mixer)
    if kv is not None:
        route_attention(model)


when_read(lambda config: model_class(MODEL_FOR_CAUSAL_LM_MAPPING[config]))
