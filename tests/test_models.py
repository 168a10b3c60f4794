"""Models of transformers as layers: the same logits, losses and training as the model itself on one process."""

import sys

import models
import pytest
import torch
from pool import RankPool

import ds_fold
from ds_fold.config import ConfigError
from ds_fold.models import from_transformers

SEQUENCE, VOCABULARY, M = 12, 50, 4


def small(kind, **more):
    """A config of transformers: 4 blocks, nothing random in the forward."""
    import transformers
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        return transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=24, n_layer=4, n_head=3, resid_pdrop=0,
                                       embd_pdrop=0, attn_pdrop=0, loss_type="ForCausalLM", **tokens, **more)
    cls = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig, "qwen2": transformers.Qwen2Config}[kind]
    window = {"sliding_window": None} if kind == "mistral" else {}
    return cls(vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
               num_key_value_heads=2, max_position_embeddings=32, **window, **tokens, **more)


def seeded(config):
    """The model with weights that are the same on every process, large enough for attention to matter."""
    import transformers
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def sequences(seed=3):
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(VOCABULARY, (models.MICRO_BATCH, SEQUENCE), generator=generator)
        labels = tokens.clone()
        labels[0, -3:] = -100
        yield tokens, labels


def train_folded(config, steps):
    layers, loss_fn = from_transformers(seeded(config))
    ds_config = models.ds_config(M, fold={"schedule": "aiao", "segments": 2})
    engine = models.build(False, ds_config, 2, 0, layers=layers, loss_fn=loss_fn)
    batches = sequences()
    return [float(engine.train_batch(batches)) for _ in range(steps)]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_folded_pipeline_trains_as_the_model_does(kind, tied):
    config = small(kind, tie_word_embeddings=tied)
    model, batches, expected = seeded(config), sequences(), []
    optimizer = torch.optim.AdamW(model.parameters(), **models.ADAM)
    for _ in range(4):
        losses = [model(tokens, labels=labels).loss / M for tokens, labels in (next(batches) for _ in range(M))]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        expected.append(sum(float(loss.detach()) for loss in losses))
    assert RankPool.of(2).run(train_folded, config, 4) == [pytest.approx(expected, rel=1e-5)] * 2
    assert min(abs(a - b) for a, b in zip(expected, expected[1:])) > 0.01, "the steps show in the loss"


def whole(layers):
    built = {}

    def one(spec):
        if isinstance(spec, ds_fold.TiedLayerSpec):
            module = built.setdefault(spec.key, None) or spec.build()
            built[spec.key] = module
            return module if spec.forward_fn is None else lambda x: spec.forward_fn(module, x)
        return spec.build()

    return [one(spec) for spec in layers]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2"])
def test_the_layers_give_the_models_logits(kind, attention):
    model = seeded(small(kind, attn_implementation=attention))
    x = tokens = next(sequences())[0]
    for layer in whole(from_transformers(model).layers):
        x = layer(x)
    assert torch.equal(x, model(tokens).logits)
    assert (x - model(tokens.flip(1)).logits.flip(1)).abs().max() > 0.1, "order matters"


def test_rotary_positions_stay_exact_where_weights_are_cast():
    config = small("llama", rope_parameters={"rope_type": "default", "rope_theta": 1234.5})
    block = from_transformers(config).layers[1].build().bfloat16()
    exact = 1234.5 ** (-torch.arange(0, 6, 2) / 6)
    assert block.rotary.inv_freq.dtype == torch.float32 and torch.allclose(block.rotary.inv_freq, exact, rtol=1e-6)
    assert block(torch.randn(1, 5, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_config_gives_the_models_own_random_weights():
    import transformers
    config = transformers.GPT2Config(vocab_size=300, n_embd=96, n_layer=8, n_head=3, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    embedding, block = (layer for layer in whole(from_transformers(config).layers[:2]))
    assert float(embedding.tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.block.attn.c_attn.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.block.mlp.c_proj.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)  # by sqrt(2 x 8 layers)
    assert not block.block.mlp.c_proj.bias.any() and bool((block.block.ln_1.weight == 1).all())
    assert block.training and embedding.dropout.p == 0.1


def test_training_leaves_the_given_model_alone():
    model = seeded(small("gpt2")).bfloat16()
    layer = from_transformers(model).layers[1].build()
    assert layer.block.ln_1.weight.dtype == torch.float32
    with torch.no_grad():
        layer.block.ln_1.weight.zero_()
    assert model.transformer.h[0].ln_1.weight.any()


def test_what_cannot_be_cut_is_refused_by_name():
    import transformers
    for other in (transformers.BertConfig(), torch.nn.Linear(2, 2), transformers.GPT2Model(small("gpt2"))):
        with pytest.raises(ConfigError, match=rf"cannot cut a {type(other).__name__} .* GPT2LMHeadModel, LlamaForCausalLM"):
            from_transformers(other)
    with pytest.raises(ConfigError, match="add_cross_attention=False"):
        from_transformers(small("gpt2", add_cross_attention=True))
    with pytest.raises(ConfigError, match="sliding_window=None, which is the same for sequences of up to 4096"):
        from_transformers(transformers.MistralConfig(num_hidden_layers=1))
    with pytest.raises(ConfigError, match="attn_implementation='flex_attention'"):
        from_transformers(small("llama", attn_implementation="flex_attention"))
    embedding = from_transformers(small("gpt2")).layers[0].build()
    with pytest.raises(ValueError, match="17 tokens, but the model has positions for n_positions=16"):
        embedding(torch.zeros(1, 17, dtype=torch.long))


def test_without_transformers_or_with_an_old_one_the_message_names_the_extra(monkeypatch):
    import transformers
    monkeypatch.setattr(transformers, "__version__", "5.16.2")
    with pytest.raises(ImportError, match=r"5\.17 or newer \(5\.16\.2 is installed\): pip install 'ds_fold\[transformers\]'"):
        from_transformers(small("gpt2"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'ds_fold\[transformers\]'"):
        ds_fold.models.from_transformers(None)
