"""Put a mechanism into a model of transformers, and take it out again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import output_capturing

from depthmix.analysis import trace
from depthmix.hf.families import Family, family_of
from depthmix.hf.kv import restore_attention
from depthmix.hf.layer import find_parts, unwrap_layer
from depthmix.hf.loading import check_reentry
from depthmix.hf.wrapped_config import FIELD, config_class, make_fields
from depthmix.hf.wrapped_model import WrappedModel, install, layers_of, make_stacks, model_class, sizes_of
from depthmix.mechanisms import DepthStack, DividedModel, KVStack, is_kv, retrofit_options
from depthmix.mechanisms.blend import Blend
from depthmix.models import Choice

FROZEN = "depthmix_frozen"  # attribute of a wrapped model: parameters that `freeze_base` has frozen
MOVED = 1e-3  # deviation of M from ones at which a model no longer computes the plain residual


def wrap(
    model: Any,
    mixer: str | DepthStack = "residual",
    *,
    kv_mixer: str | Mapping[str, Any] | None = None,
    blend: bool = True,
    freeze_base: bool = False,
    **options: Any,
) -> Any:
    """Put a mechanism into a causal language model of transformers, in place; the model is returned for convenience.

    Mechanisms that can start as the PreNorm network do so: the model computes what it did before until training moves
    them. A warning says where that is not so. After an error the model is unchanged.

    Args:
        model: a causal language model of one of the families in docs/retrofit.md. It gets a configuration of its own.
        mixer: a name of `dm.list_mechanisms()`, or a `DepthStack` of this width and depth, whose parameters the
            model uses from then on, in at least float32. A KV mechanism alone uses the plain residual.
        kv_mixer: a name of `dm.list_mechanisms(kind="kv")`, or {"name": …} with its options.
        blend: let a KV mechanism add only g times its change, with one learned number g per layer that is 0 at first.
        freeze_base: train the mixers only.
        options: options of the mechanism; those that keep the model's function are set unless they are given.
    """
    family = check_model(model)
    check_flags(blend=blend, freeze_base=freeze_base)
    if isinstance(mixer, str) and kv_mixer is None and is_kv(mixer):
        mixer, kv_mixer, options = "residual", {"name": mixer, **options}, {}
    value_choice = None if kv_mixer is None else Choice.of(kv_mixer)
    if isinstance(mixer, DepthStack):
        check_stack(mixer, options, model)
        kv = make_stacks(model, Choice(name="residual"), value_choice, blend)[1]
        depth = mixer
    else:
        depth, kv = make_stacks(model, retrofit_choice(mixer, options, model), value_choice, blend)
    check_scale(depth, family, model.config.model_type)
    if freeze_base and depth.registered == "residual" and kv is None:
        raise ValueError("freeze_base=True with mixer residual; expected a mechanism: nothing would be trained")
    if freeze_base:
        freeze(model)
    change_classes(model, make_fields(*choices(depth, kv), blend))
    install(model, depth, kv)
    warn_of_change(depth, kv)
    return model


def unwrap(model: Any) -> Any:
    """Take the mechanism out, in place; the model is returned for convenience. Its own weights stay as they are.

    A warning says where the model computes something else afterwards.
    """
    if not isinstance(model, WrappedModel):
        raise TypeError(f"unwrap got a {type(model).__name__}; expected a model that dm.wrap has returned")
    moved = has_moved(model)
    for layer in layers_of(model):
        unwrap_layer(layer)
    restore_attention(model)
    frozen = model.__dict__.pop(FROZEN, ())
    for name, parameter in model.named_parameters():  # type: ignore[attr-defined]
        if name in frozen:
            parameter.requires_grad_(True)
    delattr(model.config, FIELD)
    model.config.__class__ = type(model.config).base
    model.__class__ = type(model).base  # type: ignore[attr-defined]
    if moved:
        warnings.warn(
            "the mixers had left the plain residual: without them the model computes something else",
            UserWarning,
            stacklevel=2,
        )
    return model


def check_model(model: Any) -> Family:
    """The family of a model that can be wrapped."""
    kind = type(model).__name__
    if isinstance(model, WrappedModel):
        raise ValueError("this model is wrapped already; call dm.unwrap(model) first")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"wrap got a {kind}; expected a causal language model of transformers, before PEFT, torch.compile and "
            "other packages are applied to it"
        )
    if isinstance(model, DividedModel) or any(isinstance(m, DepthStack) for m in model.modules()):
        raise ValueError(f"{kind} has mixers of its own; choose its mechanism in its configuration")
    family = family_of(model.config)
    expected = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    if expected is None:
        name = type(model.config).__name__
        raise TypeError(f"{kind} has a {name}; expected the family's own configuration class, not one derived from it")
    if type(model) is not expected:
        raise TypeError(f"wrap got a {kind}; expected a {expected.__name__}: AutoModelForCausalLM.from_pretrained")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            "accelerate has distributed this model over devices; wrap it before, or save the wrapped model and load it "
            "with device_map"
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the parameters of this model are divided among processes; wrap it before that")
    for layer in layers_of(model):
        check_reentry(getattr(layer, "_gradient_checkpointing_func", None))
        find_parts(layer, family)
    return family


def check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}; expected True or False")


def check_stack(stack: DepthStack, options: Mapping[str, Any], model: Any) -> None:
    """A ready stack must fit the model."""
    sizes = sizes_of(model)
    got = {"dim": stack.dim, "depth": stack.depth}
    if options:
        raise TypeError(f"got a DepthStack and options of a mechanism ({', '.join(options)}); expected one of them")
    if got != {name: sizes[name] for name in got} or stack.lo or stack.out is None:
        part = "" if len(stack) == stack.depth else f", sublayers {stack.lo} to {stack.hi - 1} of it"
        raise ValueError(
            f"got a stack with dim={stack.dim} and depth={stack.depth}{part}; expected a whole one with "
            f"dim={sizes['dim']} and depth={sizes['depth']}: {len(layers_of(model))} layers of width {sizes['dim']}"
        )
    if stack.shared:
        raise ValueError("got a stack whose sublayers share mixers (order=…); expected mixers of their own for each")


def retrofit_choice(name: str, options: Mapping[str, Any], model: Any) -> Choice:
    """The mechanism with the options that keep the model's function, unless those given exclude each other."""
    sizes = {key: sizes_of(model)[key] for key in ("dim", "depth")}
    return Choice(name=name, options=retrofit_options(name, options, **sizes))


def choices(depth: DepthStack, kv: KVStack | None) -> tuple[Choice, Choice | None]:
    """The mechanisms with every option, as files name them."""
    mixer = Choice(name=depth.registered, options=depth.config.resolved(dim=depth.dim, depth=depth.depth))
    if kv is None:
        return mixer, None
    return mixer, Choice(name=kv.name, options=kv.config.resolved(dim=kv.head_dim, depth=len(kv)))


def check_scale(depth: DepthStack, family: Family, model_type: str) -> None:
    """A network whose sublayers do not normalise what they read notices its scale."""
    if depth.facts.preserves_prenorm == "up to scale" and not family.prenorm:
        hint = "pass scale_by_count=True" if hasattr(depth.config, "scale_by_count") else "choose another mechanism"
        raise ValueError(
            f"{depth.name} keeps the function up to scale only, and model_type={model_type!r} does not normalise what "
            f"its sublayers read; {hint}"
        )


def change_classes(model: Any, fields: dict[str, Any]) -> None:
    base: Any = type(model)
    made = model_class(base)
    family: Any = type(model.config)
    replace_config(model, copy.deepcopy(model.config))
    model.config.__class__ = config_class(family)
    setattr(model.config, FIELD, fields)
    model.__class__ = made
    registry = output_capturing._CAN_RECORD_REGISTRY  # by the class's text: what output_hidden_states collects
    if str(base) in registry:
        registry[str(made)] = registry[str(base)]


def replace_config(model: Any, config: Any) -> None:
    """Give a model and its submodules this configuration: another model may have been made from the same one."""
    before = model.config
    for module in model.modules():
        if vars(module).get("config") is before:
            module.config = config


def freeze(model: nn.Module) -> None:
    """Of the model without mixers."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.requires_grad_(False)
    model.__dict__[FROZEN] = trained


def warn_of_change(depth: DepthStack, kv: KVStack | None) -> None:
    keeps = depth.facts.preserves_prenorm
    if keeps == "no":
        warn(f"{depth.name} with these options changes what the model computes from the start: train it further")
    elif keeps == "up to scale":
        hint = "; scale_by_count=True keeps it" if hasattr(depth.config, "scale_by_count") else ""
        warn(f"{depth.name} with these options keeps the model's function up to the eps of its norms only{hint}")
    if kv is not None and not kv.blend:
        warn(f"{kv.name} with blend=False changes what the model computes from the start: train it further")


def warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)


def has_moved(model: Any) -> bool:
    """Whether the mixers compute anything but the plain residual, by M on a few tokens."""
    if any(parameter.is_meta or isinstance(parameter, DTensor) for parameter in model.parameters()):
        return False
    for mixer in model.value_mixers():
        if mixer.mixes and not (isinstance(mixer, Blend) and mixer.strength is not None and not mixer.strength.any()):
            return True
    tokens = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
    weights = trace(model, tokens).M.detach()
    count = torch.arange(1, weights.shape[-1] + 1, device=weights.device)
    even = weights / weights.sum(-1, keepdim=True) * count[:, None]  # the scale of a row is removed by a norm
    return not bool((even - torch.ones_like(even).tril()).abs().max() <= MOVED)
