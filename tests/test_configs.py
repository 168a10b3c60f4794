"""Every file in configs/ trains the example's model, on pipeline and on data-parallel ranks, to the same losses."""

from pathlib import Path

import pytest
from pool import RankPool

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.json"))


def train_example(config, stages, steps=2):
    import importlib.util
    from types import SimpleNamespace

    import ds_fold
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    args = SimpleNamespace(layers=6, hidden=16, heads=2, sequence=16, text=str(ROOT / "README.md"), seed=0)
    net = ds_fold.PipelineModule(example.gpt_layers(args), num_stages=stages, loss_fn=example.loss_fn, config=str(config),
                                 partition_method="uniform", seed_layers=True, seed_fn=example.seed_cpu)
    engine, *_ = ds_fold.initialize(model=net, model_parameters=net.parameters(), config=str(config))
    text, _ = example.load_text(args.text, args.sequence)
    replica, size, count = engine.grid.get_data_parallel_rank(), engine.train_micro_batch_size_per_gpu(), engine.micro_batches
    return [float(engine.train_batch(example.micro_batches(text, args, step, replica, size, count))) for step in range(steps)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configs_agree(config):
    expected = RankPool.of(2).once(train_example, ROOT / "configs" / "1f1b.json", 2)[0]
    tolerance = {"rel": 2e-2} if "bf16" in config.name else {"rel": 1e-6}
    losses = RankPool.of(2).run(train_example, config, 2)[0]
    assert losses == pytest.approx(expected, **tolerance) and losses[1] < losses[0]
    replicas = RankPool.of(2).run(train_example, config, 1)[0]
    assert replicas[1] < replicas[0]


def test_each_way_of_running_has_a_config_and_a_line_in_their_readme():
    readme = (ROOT / "configs" / "README.md").read_text()
    assert len(CONFIGS) >= 5 and all(f"`{path.name}`" in readme for path in CONFIGS)
