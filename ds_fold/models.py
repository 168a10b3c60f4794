"""Causal language models of Hugging Face's ``transformers`` as lists of layers that a pipeline can cut."""

import copy
from functools import partial
from typing import Callable, List, NamedTuple

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from packaging.version import Version
from torch import nn

from .config import ConfigError

#: config.model_type -> class of the model; those but GPT-2 have Llama's structure
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
#: release of transformers; before, blocks answer in another form or are initialised in another way
OLDEST = "5.17"
#: implementations of attention that take no mask for causal attention, and the one that needs it
ATTENTION = ("sdpa", "flash_attention_2", "eager")


class PipelineLayers(NamedTuple):
    """What :class:`ds_fold.PipelineModule` takes."""

    layers: List[LayerSpec]
    """Embedding, decoder blocks, norm, head. Tokens [batch, sequence] go in, logits [batch, sequence, vocabulary] come out."""

    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The model's own: of logits and labels [batch, sequence], which are the tokens; it shifts them, and leaves out -100."""


def from_transformers(model_or_config) -> PipelineLayers:
    """A causal language model as layers and loss::

        layers, loss_fn = ds_fold.models.from_transformers(LlamaConfig(num_hidden_layers=16))
        net = ds_fold.PipelineModule(layers, loss_fn=loss_fn, num_stages=4, config="ds_config.json")

    Each rank builds its own layers only, in fp32: what they are trained in, the ds_config says.

    Args:
        model_or_config: a config gives random weights, drawn as the model draws them; a model's weights are copied. Then the
            layers keep the model, so that every rank holds all of it in host memory.

    Raises:
        ImportError: without ``transformers``, or with one that is too old.
        ConfigError: for another architecture, or attention that needs a mask of its own.
    """
    try:
        from transformers import AutoModelForCausalLM, PreTrainedConfig, __version__
        if Version(__version__) < Version(OLDEST):
            raise ImportError(f"{__version__} is installed")
    except ImportError as error:
        raise ImportError(f"ds_fold.models needs Hugging Face's transformers {OLDEST} or newer ({error}): "
                          f"pip install 'ds_fold[transformers]'") from error
    is_config = isinstance(model_or_config, PreTrainedConfig)
    config = model_or_config if is_config else getattr(model_or_config, "config", None)
    wanted = ARCHITECTURES.get(getattr(config, "model_type", None))
    if wanted is None or not is_config and type(model_or_config).__name__ != wanted:
        raise ConfigError(f"from_transformers cannot cut a {type(model_or_config).__name__} into layers; it takes "
                          f"{', '.join(ARCHITECTURES.values())}, or a config of model_type {', '.join(ARCHITECTURES)}")
    _check(config)
    if is_config:
        with torch.device("meta"):  # the structure, without memory for weights
            model = AutoModelForCausalLM.from_config(config)
    else:
        model = model_or_config
    attention = model.config._attn_implementation
    if attention not in ATTENTION:
        raise ConfigError(f"attn_implementation={attention!r} may need a mask that the layers do not pass on; use one of "
                          f"{', '.join(map(repr, ATTENTION))}")

    embedding = PositionEmbedding if config.model_type == "gpt2" else Embedding
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        def spec(**kwargs):
            return TiedLayerSpec("embedding", embedding, model, tied_weight_attr="tokens.weight", **kwargs)
        first, head = spec(), spec(forward_fn=tied_head)
    else:
        first, head = LayerSpec(embedding, model), LayerSpec(Head, model)
    blocks = [LayerSpec(DecoderBlock, model, index) for index in range(config.num_hidden_layers)]
    loss_fn = partial(model.loss_function, vocab_size=config.vocab_size)
    return PipelineLayers([first, *blocks, LayerSpec(Norm, model), head], loss_fn)


def _check(config) -> None:
    if getattr(config, "add_cross_attention", False):
        raise ConfigError("add_cross_attention=True needs an encoder's states in every block; set add_cross_attention=False")
    window = getattr(config, "sliding_window", None)
    if window is not None:
        raise ConfigError(f"sliding_window={window}: attention here is causal over the whole sequence; set sliding_window=None, "
                          f"which is the same for sequences of up to {window} tokens")


def _own(part: nn.Module, model) -> nn.Module:
    """A copy of one part of the model, in fp32; one without weights yet is initialised as the model does it."""
    part = copy.deepcopy(part)
    if next(model.parameters()).is_meta:
        part = part.to_empty(device="cpu").apply(model._init_weights)
    return part.float()


class Embedding(nn.Module):
    """Tokens [batch, sequence] to vectors [batch, sequence, hidden]."""

    def __init__(self, model):
        super().__init__()
        self.tokens = _own(model.get_input_embeddings(), model)

    def forward(self, tokens):
        return self.tokens(tokens)


class PositionEmbedding(Embedding):
    """GPT-2's, with learned positions and dropout."""

    def __init__(self, model):
        super().__init__(model)
        self.positions = _own(model.transformer.wpe, model)
        self.dropout = copy.deepcopy(model.transformer.drop)

    def forward(self, tokens):
        length, most = tokens.shape[1], self.positions.num_embeddings
        if length > most:
            raise ValueError(f"a sequence has {length} tokens, but the model has positions for n_positions={most}")
        return self.dropout(self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device)))


def tied_head(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    """Vectors to logits, with the transposed embedding."""
    return F.linear(x, embedding.tokens.weight)


class DecoderBlock(nn.Module):
    """One of the model's blocks, with the causal mask and the rotary positions that the model would hand it."""

    def __init__(self, model, index: int):
        super().__init__()
        body = model.base_model
        self.block = _own((body.h if hasattr(body, "h") else body.layers)[index], model)
        self.needs_mask = model.config._attn_implementation == "eager"
        # no submodule: its frequencies have to stay in fp32 where the weights are cast
        rotary = getattr(body, "rotary_emb", None)
        object.__setattr__(self, "rotary", None if rotary is None else type(rotary)(model.config))

    def forward(self, x):
        length, options = x.shape[1], {}
        if self.needs_mask:
            least = torch.full((length, length), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device)
            options["attention_mask"] = least.triu(1)[None, None]
        if self.rotary is not None:
            if self.rotary.inv_freq.device != x.device:
                self.rotary.to(x.device)
            options["position_embeddings"] = self.rotary(x, torch.arange(length, device=x.device)[None])
        return self.block(x, **options)


class Norm(nn.Module):
    """The last norm."""

    def __init__(self, model):
        super().__init__()
        body = model.base_model
        self.norm = _own(body.ln_f if hasattr(body, "ln_f") else body.norm, model)

    def forward(self, x):
        return self.norm(x)


class Head(nn.Module):
    """Vectors to logits, with weights of its own."""

    def __init__(self, model):
        super().__init__()
        self.linear = _own(model.get_output_embeddings(), model)

    def forward(self, x):
        return self.linear(x)
