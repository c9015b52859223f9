"""The decoder as a causal language model of transformers: `from_pretrained`, `generate`, Trainer.

Axes: B batch, T token, S column of the cache, D channel, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from depthmix.hf.card import write_model_card
from depthmix.hf.config import DepthmixConfig
from depthmix.hf.loading import check_loading, check_reentry, is_missing
from depthmix.mechanisms import KVStack
from depthmix.models import Decoder, DecoderConfig
from depthmix.models.context import Context, make_context
from depthmix.models.decoder import checked_tokens
from depthmix.models.init import initialise
from depthmix.models.kinds import WIDE

LAYER = 2  # sublayers


def every_column(batch: Tensor, head: Tensor, token: Tensor, column: Tensor) -> Tensor:
    """A restriction of the causal mask that leaves it as it is."""
    return column >= 0


# Options by which `create_causal_mask` never returns None for "causal"; the first one is not in older versions.
SKIPS = "allow_is_causal_skip" in inspect.signature(create_causal_mask).parameters
ALWAYS_A_MASK: dict[str, Any] = {"allow_is_causal_skip": False} if SKIPS else {"and_mask_function": every_column}


def rows_of(
    config: DecoderConfig, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> dict[str, Tensor]:
    """Padding or documents, for attention with a state: it cannot see them in a mask."""
    if "kda" not in config.attention_kinds:
        return {}
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask of shape {list(attention_mask.shape)} with attention 'kda'; expected [B, T], 0 at "
                "padding: the state of KDA contains all tokens before"
            )
        return {"valid": attention_mask}
    if position_ids is None:
        return {}
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return {"documents": nn.functional.pad(restarts.long().cumsum(1), (1, 0)).expand(len(x), -1)}


class Slots:
    """A cache of transformers as attention calls it; positions and mask are made beforehand."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def put(self, slot: int, *new: Tensor) -> Any:
        return self.cache.update(*new, slot)


class DepthmixForCausalLM(PreTrainedModel, GenerationMixin):
    """A `Decoder` with the interface of transformers. Its logits are the decoder's, bit for bit.

    Attributes:
        decoder: the model itself, for `dm.save_model`, `dm.generate` and everything else that takes a decoder.
    """

    config_class = DepthmixConfig
    base_model_prefix = "decoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # `num_items_in_batch`
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ["Decoder"]  # mixers are read by all sublayers
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["decoder.depth", "decoder.kv_mixers", "balance_bias", *WIDE]

    def __init__(self, config: DepthmixConfig) -> None:
        super().__init__(config)
        self.check_attention()
        self.decoder = Decoder(config.decoder_config)
        for part in (self.decoder.depth, self.decoder.kv_mixers):
            part.float()
        self.gradient_checkpointing = False
        self._is_hf_initialized = not self.decoder.embed.weight.is_meta
        self.post_init()

    @classmethod
    def from_decoder(cls, decoder: Decoder) -> DepthmixForCausalLM:
        """A model around this decoder, of which nothing is copied or converted."""
        if not isinstance(decoder, Decoder):
            raise TypeError(f"from_decoder got a {type(decoder).__name__}; expected a depthmix.Decoder")
        if decoder.shard.ranks > 1:
            raise ValueError("this decoder is divided among processes; expected a whole one: dm.load_model(folder)")
        with torch.device("meta"):
            model = cls(DepthmixConfig(depthmix=decoder.config.saved(), dtype=decoder.embed.weight.dtype))
        model.decoder = decoder
        return model.train(decoder.training)

    @classmethod
    def from_pretrained(cls, *args: Any, use_safetensors: bool = True, device_map: Any = None, **options: Any) -> Any:
        """Load a folder that `save_pretrained` wrote. The options are those of transformers; nothing is unpickled."""
        check_loading(use_safetensors)
        if isinstance(device_map, dict) and (len({*device_map.values()}) > 1 or "disk" in device_map.values()):
            raise ValueError(
                f"device_map={device_map}; expected one device for the whole model, such as 'cpu': mixers are read "
                "between all layers, so they cannot be divided or offloaded"
            )
        return super().from_pretrained(*args, use_safetensors=True, device_map=device_map, **options)

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """As in transformers, with a model card beside the weights."""
        super().save_pretrained(save_directory, *args, **options)
        values = self.decoder.kv_mixers
        write_model_card(self, save_directory, self.decoder.depth, [*values] if values else [], options)

    @can_return_tuple  # type: ignore[untyped-decorator]  # return_dict=False
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V] and, with labels, the loss; arguments are those of other models of transformers.

        Args:
            input_ids: [B, T] ids; or `inputs_embeds` [B, T, D].
            attention_mask: [B, S], 0 at padding; or a mask [B, 1, T, S].
            position_ids: [B, T]; by default counted from the mask. Without cache and mask, positions that start again
                separate packed documents.
            past_key_values: a cache of transformers, to which these tokens are appended.
            labels: [B, T] ids, −100 where no loss is wanted; position t is predicted from the tokens before it.
            use_cache: return a cache; by default if the configuration says so and the model is not in training mode.
            output_hidden_states: return n + 1 tensors [B, T, D] for n executed layers: what the attention of each layer
                reads, and the output of the final norm.
            output_attentions: refused, since fused attention computes no weights.
            logits_to_keep: logits of this many last tokens only, or of these indices; 0: of all.
            num_items_in_batch: number of labels by which the summed loss is divided, as Trainer gives it.
        """
        self.check_attention(output_attentions)
        x = self.embedded(input_ids, inputs_embeds)
        past_key_values = self.cache(past_key_values, use_cache)
        ctx = self.context(x, attention_mask, position_ids, past_key_values)
        keep_inputs = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        h, inputs, auxiliary = self.hidden(x, ctx, keep_inputs)
        h = self.decoder.normed(h)
        last = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.logits(h[:, last])
        loss = None if labels is None else self.labels_loss(logits, labels, auxiliary, num_items_in_batch)
        states = (*inputs, h) if keep_inputs else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values, hidden_states=states)

    def embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if inputs_embeds is not None and input_ids is None:
            return inputs_embeds
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("got both or neither of input_ids and inputs_embeds; expected exactly one of them")
        embedded: Tensor = self.decoder.embed(checked_tokens(input_ids, self.decoder.config.vocab_size))
        return embedded

    def cache(self, given: Any, asked: bool | None) -> Any:
        """The cache of a pass: the given one, a new one, or None."""
        if self.gradient_checkpointing and torch.is_grad_enabled():  # recomputed segments would store keys again
            if given is not None:
                raise ValueError("got past_key_values with gradient checkpointing; expected None, or torch.no_grad()")
            return None
        if others := sorted({*self.decoder.config.attention_kinds} - {"gqa"}):
            if given is not None or asked:
                raise ValueError(
                    f"a cache of transformers with attention {' and '.join(map(repr, others))}; expected "
                    "use_cache=False: it holds keys and values only. dm.generate(model.decoder, prompts) has a cache"
                )
            return None
        wanted = self.config.use_cache and not self.training if asked is None else asked
        return DynamicCache(config=self.config) if given is None and wanted else given

    def context(self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Any) -> Context:
        """What all sublayers share. A static cache has more columns than tokens, so it always needs a mask."""
        rows = rows_of(self.decoder.config, x, attention_mask, position_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
            **(ALWAYS_A_MASK if getattr(cache, "is_compileable", False) else {}),
        )
        if position_ids is None:
            before = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(x.shape[1], device=x.device)[None] + before
            if attention_mask is not None and attention_mask.dim() == 2:
                counted = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
                position_ids = counted.gather(1, position_ids.expand(len(x), -1))
        slots: Any = None if cache is None else Slots(cache)
        return make_context(self.decoder.config, position_ids, mask, slots, dtype=x.dtype, **rows)

    def hidden(self, x: Tensor, ctx: Context, keep_inputs: bool | None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """What the final norm reads; what each layer's attention reads, if asked for; the auxiliary losses."""
        decoder, inputs, auxiliary = self.decoder, [], []
        state = decoder.depth.begin(x)
        kv = decoder.kv_mixers.begin() if isinstance(decoder.kv_mixers, KVStack) else ()
        length = LAYER if keep_inputs else decoder.config.depth
        for index in range(0, decoder.config.depth, length):
            if keep_inputs:
                inputs.append(decoder.depth[index].read(state)[0])
            state, kv, losses = decoder.execute(index, index + length, state, kv, ctx)
            auxiliary += losses
        return decoder.end(state), inputs, auxiliary

    def labels_loss(
        self, logits: Tensor, labels: Tensor, auxiliary: list[Tensor], items: Tensor | int | None
    ) -> Tensor:
        """Mean next-token loss, plus the auxiliary losses of the sublayers: of each micro-batch its share of them."""
        vocabulary = self.decoder.config.vocab_size
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocabulary, num_items_in_batch=items)
        share = 1.0 if items is None else (labels[:, 1:] != -100).sum() / items
        return sum((share * aux for aux in auxiliary), loss)

    def check_attention(self, weights_wanted: bool | None = None) -> None:
        if weights_wanted or self.config.output_attentions:
            raise ValueError(
                "output_attentions=True; expected False: attention runs fused and computes no weights. dm.trace(model, "
                "input_ids) shows what each layer reads over depth"
            )
        if self.config._attn_implementation != "sdpa":
            raise ValueError(f"attn_implementation={self.config._attn_implementation!r}; expected 'sdpa', the only one")

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Called by transformers; the decoder itself checkpoints, by default every layer."""
        function = gradient_checkpointing_func
        check_reentry(function)
        if every_n_layers != 1 or getattr(function, "func", function) is not checkpoint:
            raise ValueError(
                "offload and every_n_layers are not supported; set model.decoder.checkpoint_every, the number of "
                "sublayers per checkpointed segment, after enabling checkpointing without them"
            )
        self.gradient_checkpointing = enable
        self.decoder.checkpoint_every = LAYER if enable else None

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Called by transformers: give what a checkpoint lacks its start; what was loaded stays."""
        if not self._is_hf_initialized:
            initialise(self.decoder, chosen=is_missing)
            for module in self.decoder.all_sublayers():
                for buffer in filter(is_missing, module.buffers()):
                    buffer.zero_()  # counters of the experts
            self._is_hf_initialized = True

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.decoder.embed = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None where it is the embedding."""
        return self.decoder.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **options: Any) -> nn.Embedding:
        """Change the size of the vocabulary, as in other models of transformers."""
        embed: nn.Embedding = super().resize_token_embeddings(*args, **options)
        decoder = self.decoder
        decoder.config = dataclasses.replace(decoder.config, vocab_size=embed.num_embeddings)
        self.config.set_decoder(decoder.config)
        return embed


AutoModelForCausalLM.register(DepthmixConfig, DepthmixForCausalLM)
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[DepthmixConfig.model_type] = DepthmixForCausalLM.__name__  # for pipelines and Trainer
