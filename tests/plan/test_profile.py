"""What layers take and keep, against sizes that follow from their definition."""

import json
import time

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from models import Block, Tied, tied_head
from torch import nn

from ds_fold.__main__ import main
from ds_fold.plan import PlanError, Profile
from ds_fold.plan.profile import describe_layers, profile_layers

BATCH, HIDDEN, INNER = 8, 12, 25
X = torch.randn(BATCH, HIDDEN)
SENT = 4 * BATCH * HIDDEN  # bytes of what passes between the blocks


class Slow(nn.Module):
    """Sleeps 4 ms in its forward and 9 ms in its backward; built ``built`` times in all."""
    built = 0

    def __init__(self, unused=0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        Slow.built += 1

    def forward(self, x):
        time.sleep(0.004)
        x = x * self.weight.sum()
        x.register_hook(lambda grad: time.sleep(0.009))
        return x


class Frozen(Block):

    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)


class Masked(nn.Module):
    """Passes (hidden, mask) on; the product keeps both of its factors."""

    def forward(self, inputs):
        hidden, mask = inputs
        return hidden * mask, mask


def test_bytes_are_those_of_the_definition():
    profile = profile_layers([LayerSpec(Block), LayerSpec(nn.Tanh), LayerSpec(Block), LayerSpec(Frozen)], X, X, nn.MSELoss(),
                             repeats=1, warm_up=0)
    block = HIDDEN * INNER + INNER + INNER * HIDDEN + HIDDEN
    frozen_part = HIDDEN * INNER + INNER
    assert [layer.parameter_count for layer in profile.layers] == [block, 0, block, block]
    assert [layer.trainable_count for layer in profile.layers] == [block, 0, block, block - frozen_part]
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * block, 0, 4 * block, 4 * block]
    assert profile.layers[3].trainable_bytes == 4 * (block - frozen_part)
    # a block keeps its input for its first matrix and tanh's output, which is the input of the second, once. Tanh keeps its own
    # output, which is the next block's input and counts there. What is frozen needs no input kept
    inner = 4 * BATCH * INNER
    assert [layer.activation_bytes for layer in profile.layers] == [SENT + inner, 0, SENT + inner, inner]
    assert [layer.boundary_bytes for layer in profile.layers] == [SENT] * 4 and profile.input_bytes == SENT
    assert [layer.recompute_activation_bytes for layer in profile.layers] == [SENT] * 4
    assert profile.head.activation_bytes == SENT  # the labels are there anyway
    assert (profile.micro_batch_size, profile.optimizer_bytes_per_byte) == (BATCH, 2)


def test_times_are_those_of_forward_and_backward():
    layer = profile_layers([LayerSpec(Slow)], X, repeats=7).layers[0]
    assert 0.004 <= layer.forward_s < 0.009 <= layer.backward_s < 0.1
    # the checkpoint's backward repeats the forward
    assert 0.013 <= layer.recomputed.backward_s < 0.1


def test_equal_layers_are_measured_once():
    Slow.built = 0
    layers = [LayerSpec(Slow), LayerSpec(Slow), LayerSpec(Slow, 1), LayerSpec(Slow, unused=1), LayerSpec(Slow, [2]),
              LayerSpec(Slow, [2])]
    profile = profile_layers(layers, X.requires_grad_(False), repeats=1, warm_up=0)
    # the second's input needs a gradient, unlike the first's
    assert Slow.built == 5
    assert profile.layers[4] == profile.layers[5] and profile.layers[1] != profile.layers[2]


def test_tuples_masks_and_functions():
    mask = torch.ones(BATCH, 1)
    profile = profile_layers([lambda x: (x[0] + 1.0, x[1]), LayerSpec(Masked), lambda x: x[0], LayerSpec(Block)],
                             (X, mask), X, nn.MSELoss(), repeats=1, warm_up=0)
    # the mask is kept for the gradient of what needs one, and nothing does before the block
    assert [layer.activation_bytes for layer in profile.layers] == [0, 0, 0, SENT + 4 * BATCH * INNER]
    assert [layer.boundary_bytes for layer in profile.layers] == [SENT + 4 * BATCH, SENT + 4 * BATCH, SENT, SENT]
    assert [layer.backward_s > 0 for layer in profile.layers] == [False, False, False, True]
    profile = profile_layers([lambda x: (Block()(x), mask), LayerSpec(Masked)], X, repeats=1, warm_up=0)
    assert profile.layers[1].activation_bytes == 4 * BATCH  # the hidden vector would be kept for the mask's gradient only


def test_tied_layers_and_precision():
    layers = [TiedLayerSpec("embed", Tied), LayerSpec(Block), TiedLayerSpec("embed", Tied, forward_fn=tied_head)]
    profile = profile_layers(layers, X.bfloat16(), X.bfloat16(), nn.MSELoss(), dtype=torch.bfloat16, repeats=1, warm_up=0)
    assert profile.tied_bytes == profile.layers[0].trainable_bytes == profile.layers[2].trainable_bytes == 2 * HIDDEN**2
    assert profile.layers[1].boundary_bytes == SENT / 2 and profile.optimizer_bytes_per_byte == 6


def test_a_profile_knows_its_model():
    layers = [LayerSpec(Block), LayerSpec(nn.Linear, HIDDEN, HIDDEN)]
    profile = profile_layers(layers, X, repeats=1, warm_up=0, name="m")
    profile.check_model(*describe_layers(layers))
    with pytest.raises(PlanError, match="the profile 'm' was measured on another model: it has 2 layers, the model 3; measure"):
        profile.check_model(*describe_layers([*layers, LayerSpec(Block)]))
    with pytest.raises(PlanError, match=r"its layer 1 \(Linear\) has 156 parameters, the model's 144"):
        profile.check_model(*describe_layers([layers[0], LayerSpec(nn.Linear, HIDDEN, HIDDEN, bias=False)]))
    with pytest.raises(PlanError, match="its layer 0 is Block, the model's Linear"):
        profile.check_model(*describe_layers(layers[1:] * 2))


@pytest.mark.parametrize("layer,message", [
    (LayerSpec(nn.Linear, 99, 1), r"layer 1 \(Linear\) cannot be profiled alone, on input float32\[8, 12\], requires_grad: "
     "RuntimeError: .*shapes cannot be multiplied"),
    (LayerSpec(Block, hidden="wide"), r"layer 1 \(Block\) cannot be profiled alone, .*TypeError"),
    (lambda x: {"x": x}, r"layer 1 \(<lambda>\) cannot be profiled alone, .*it returned a dict, but what passes between layers"),
])
def test_a_layer_that_does_not_run_alone_is_named(layer, message):
    with pytest.raises(PlanError, match=message):
        profile_layers([LayerSpec(Block), layer], X)


SCRIPT = """
import sys
import deepspeed, ds_fold, torch
from torch import nn

def batch_fn(batch):
    return batch[0] * 2, batch[1]

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        assert torch.utils.data.get_worker_info() is None, "a process reads ahead of the one batch"
        return torch.full((5, ), float(i)).bfloat16(), torch.zeros(3).bfloat16()

deepspeed.init_distributed(verbose=False)
config = {"train_batch_size": 48, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
          "optimizer": {"type": "Adam"}, "ds_fold": {"schedule": "aiao", "segments": 3, "data_workers": 0}}
layers = [ds_fold.LayerSpec(nn.Linear, 5, 5) for _ in range(11)] + [ds_fold.LayerSpec(nn.Linear, 5, 3)]
net = ds_fold.PipelineModule(layers, num_stages=4, loss_fn=nn.MSELoss(), config=config)
groups = [{"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1}]
engine, *_ = ds_fold.initialize(model=net, model_parameters=groups, training_data=Data(), config=config)
engine.set_batch_fn(batch_fn)
engine.load_checkpoint("nowhere")
if sys.argv[1:] == ["train"]:
    try:
        engine.train_batch()
    except Exception:
        pass
    raise RuntimeError("still here")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    # the command may set what a launcher does
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_training_script_is_profiled_in_place_of_training(script, tmp_path, capsys):
    import ds_fold
    before, output = ds_fold.PipelineModule, str(tmp_path / "p.json")
    command = ["profile", "-o", output, "--dp", "2", "--repeats", "1", script]
    assert main([*command, "--", "train"]) == 0
    assert "profile of 12 layers, micro-batches of 6, written to" in capsys.readouterr().out
    profile = Profile.load(output)
    # 48 samples / 4 micro-batches / 2 replicas, in bf16
    assert profile.micro_batch_size == 6 and profile.input_bytes == 6 * 5 * 2 and profile.name == "train.py"
    assert [layer.parameter_bytes for layer in profile.layers] == [60] * 11 + [36]
    assert ds_fold.PipelineModule is before
    assert main([*command[:-1], "--check", output, script, "--", "train"]) == 0
    assert "is a profile of this model of 12 layers" in capsys.readouterr().out
    other = json.loads(open(output).read())
    other["layers"].pop()
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert main([*command[:-1], "--check", str(tmp_path / "other.json"), script, "train"]) == 2
    assert "another model: it has 11 layers, the model 12" in capsys.readouterr().err
    assert main([*command, "--", "idle"]) == 2
    assert "ended without training a batch: it has to build ds_fold.PipelineModule" in capsys.readouterr().err



def test_a_function_is_profiled(tmp_path, capsys, monkeypatch):
    path = tmp_path / "my_model.py"
    path.write_text("from models import Block, HIDDEN\nimport torch\nfrom torch import nn\nfrom ds_fold import LayerSpec\n"
                    "def profiled():\n    x = torch.randn(8, HIDDEN)\n    return [LayerSpec(Block)] * 3, x, x, nn.MSELoss()\n"
                    "def wrong():\n    return 1, 2\n")
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--function", "my_model:profiled", "--repeats", "1"]) == 0
    assert len(Profile.load("profile.json").layers) == 3
    for name, message in (("my_model:wrong", "must return (layers, inputs, labels, loss_fn), but returned 2 values"),
                          ("my_model:absent", "has no attribute 'absent'; expected MODULE:FUNCTION"),
                          ("my_model", "expected MODULE:FUNCTION")):
        assert main(["profile", "--function", name]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments,message", [
    ([], "give either a training script or --function"),
    (["x.py", "-o", "p.json", "--", "--steps", "1"], "'-o p.json' stands between the script and --: options"),
    (["--function", "a:b", "x.py"], "give either a training script or --function"),
    (["nowhere.py"], "there is no script 'nowhere.py'"),
    (["--dtype", "bf16", "x.py"], "--dtype goes with --function"),
    (["--check", "nowhere.json", "x.py"], "nowhere.json: cannot be read"),
    (["--dp", "0", "x.py"], "--dp 0: must be at least 1"),
    (["--repeats", "0", "--function", "models:data"], "--repeats 0: must be at least 1"),
])
def test_bad_input_is_one_message(capsys, arguments, message):
    assert main(["profile", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and message in captured.err
