"""What scripts and libraries do with DeepSpeed's pipeline classes beyond calling them: under a ds_fold block each habit works as with
DeepSpeed itself, or is refused by one clear error."""


import pytest
import torch
from models import ADAM, HIDDEN, Block, LayerSpec, data, ds_config, largest_difference, make_layers, whole_model
from pool import RankPool
from test_dropin import AIAO, OVERLAP, folded, installed, script
from torch import nn


def under(fold, habit, *args, P=2, zero=0, **config):
    """``habit(config, P, *args)`` on each rank, under this ``ds_fold`` block, or on stock DeepSpeed (None)."""
    def job(fold, habit, args, P, zero, config):
        if fold is None:
            return habit(ds_config(4, zero, **config), P, *args)
        block = ds_config(4, zero, fold=fold, **config)
        with installed(block):
            return habit(block, P, *args)

    return RankPool.of(P).run(job, fold, habit, args, P, zero, config)


def assert_same(habit, *args, fold=AIAO, **kwargs):
    """Losses and weights that ``habit`` returns are bitwise those of stock DeepSpeed; the rest of what it returns."""
    losses, weights, *_ = under(None, habit, *args, **kwargs)[0]
    mine, my_weights, *rest = under(fold, habit, *args, **kwargs)[0]
    assert mine == losses and len(set(losses)) > 1
    assert largest_difference(weights, my_weights)[0] == 0
    return rest


def refused(habit, *args, fold=AIAO, P=2):
    """The one message with which all ranks refuse ``habit``."""
    def job(habit, args, fold, P):
        import ds_fold
        with installed(ds_config(4, fold=fold)):
            try:
                habit(ds_config(4, fold=fold), P, *args)
            except ds_fold.ConfigError as error:
                return str(error)

    texts = RankPool.of(P).run(job, habit, args, fold, P)
    assert len(set(texts)) == 1 and texts[0]
    return texts[0]


# subclasses of PipelineModule -------------------------------------------------------------------------------------------------


def cuts_by_num_stages(config, P):
    """A partition of its own, written as DeepSpeed's is, and a ``to`` and a constructor of its own."""
    from deepspeed.pipe import PipelineModule

    class Cut(PipelineModule):
        def __init__(self, *args, weights, **kwargs):
            self.weights, self.moved = weights, []
            PipelineModule.__init__(self, *args, **kwargs)

        def _partition_layers(self, method="uniform"):
            from deepspeed.runtime.utils import partition_balanced
            self.parts = [int(cut) for cut in partition_balanced(self.weights, self.num_stages)]
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

        def to(self, *args, **kwargs):
            self.moved.append(args)
            return super().to(*args, **kwargs)

    losses, weights, engine = script(config, P, cls=Cut, weights=[3, 1, 1, 1, 1, 1, 1, 3])
    net = engine.module
    assert type(net).__name__ == "Cut" and isinstance(net, Cut) and len(net.moved) >= 1 and net.num_stages == P
    assert net._local_stop > net._local_start and len(net._layer_specs) == 8
    return losses, weights, list(net.parts), folded(engine)


def test_a_partition_written_for_num_stages_makes_a_chunk_of_each_segment():
    parts, classes = assert_same(cuts_by_num_stages)
    assert parts == [0, 1, 4, 7, 8] and classes == (True, True)


def cuts_fixed(config, P, parts):
    from deepspeed.pipe import PipelineModule

    class Fixed(PipelineModule):
        def _partition_layers(self, method="uniform"):
            if parts is not None:
                self.parts = parts
            self._set_bounds(0, 4)

    losses, weights, engine = script(config, P, cls=Fixed)
    return losses, weights, list(engine.module.parts)


def test_fixed_cuts_fit_one_segment_and_are_refused_by_name_for_two_unless_the_block_has_its_own():
    def one_segment(config, P):
        from deepspeed.pipe import PipelineModule

        class Fixed(PipelineModule):
            def _partition_layers(self, method="uniform"):
                self.parts = [0, 3, 8]
                self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

        losses, weights, engine = script(config, P, cls=Fixed)
        return losses, weights, list(engine.module.parts)

    assert assert_same(one_segment, fold={"schedule": "gpipe"}) == [[0, 3, 8]]
    text = refused(cuts_fixed, [0, 3, 8])
    assert "Fixed partitions its layers itself" in text and "2 x 2 pipeline ranks = 4 chunks" in text and "ds_fold.partition" in text
    assert "it has set no self.parts" in refused(cuts_fixed, None)
    mine = under({**AIAO, "partition": [0, 1, 2, 3, 8]}, lambda config, P: cuts_fixed(config, P, [0, 4, 8])[2])
    assert mine == [[0, 1, 2, 3, 8]] * 2


def test_counts_of_a_subclass_are_what_partition_parameters_balances():
    def habit(config, P):
        from deepspeed.pipe import PipelineModule

        class Counts(PipelineModule):
            def _count_layer_params(self):
                return [6, 1, 1, 1, 1, 1, 1, 6]

        return Counts(make_layers(8), num_stages=P, partition_method="parameters").parts

    assert list(under(None, habit)[0]) == [0, 4, 8] and under(AIAO, habit) == [[0, 1, 4, 7, 8]] * 2


def test_the_rule_for_a_class_named_gpt2modelpipe_holds():
    """Under it only ParallelTransformerLayerPipe is recomputed by DeepSpeed's reentrant checkpoint: an embedding of integers is not,
    which would leave it without gradients."""
    def habit(config, P):
        import deepspeed
        from deepspeed.pipe import PipelineModule

        class GPT2ModelPipe(PipelineModule):
            pass

        class EmbeddingPipe(nn.Embedding):
            def forward(self, inputs):
                return super().forward(inputs[0]), inputs[1]

        class ParallelTransformerLayerPipe(Block):
            runs = 0

            def forward(self, inputs):
                ParallelTransformerLayerPipe.runs += 1
                return super().forward(inputs[0]) * inputs[1].unsqueeze(-1), inputs[1]

        layers = [LayerSpec(EmbeddingPipe, 5, HIDDEN), *(LayerSpec(ParallelTransformerLayerPipe) for _ in range(6)), lambda x: x[0]]
        torch.manual_seed(0)
        net = GPT2ModelPipe(layers, num_stages=P, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=True,
                            seed_fn=torch.manual_seed, activation_checkpoint_interval=1)
        engine, *_ = deepspeed.initialize(model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=config)
        ids = torch.arange(10).view(2, 5) % 5
        batch = (ids, ids != 3), torch.ones(2, 5, HIDDEN)
        losses = [float(engine.train_batch(iter([batch] * 4))) for _ in range(3)]
        return losses, whole_model(net), type(engine.module).__name__, engine.has_attention_mask, ParallelTransformerLayerPipe.runs

    name, mask, runs = assert_same(habit)
    assert name == "GPT2ModelPipe" and mask is True and runs == 3 * 4 * 3 * 2, "3 of the layers are here, each ran twice"


# engines ----------------------------------------------------------------------------------------------------------------------


def builds_its_engine(config, P, optimizer_later):
    """A subclass of PipelineEngine, built directly, with a train_batch copied from DeepSpeed's and an optimizer that comes later."""
    import deepspeed
    from deepspeed import DeepSpeedConfig
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from models import seed_cpu

    class Engine(PipelineEngine):
        def __init__(self, *args, note, **kwargs):
            super().__init__(*args, **kwargs)
            self.note = note

        def train_batch(self, data_iter):
            self.set_dataiterator(data_iter)
            self.module.train()
            self.total_loss = None
            self.total_additional_losses = None
            self._compute_loss = True
            self._exec_schedule(schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id))
            return self._aggregate_total_loss()

    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    net = PipelineModule(make_layers(8), num_stages=P, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=True,
                         seed_fn=seed_cpu)
    params = [p for p in net.parameters() if p.requires_grad]
    config = {key: value for key, value in config.items() if key != "optimizer"}

    def make(parameters):
        return torch.optim.AdamW(parameters, **ADAM)

    engine = Engine(note="mine", args=None, model=net, optimizer=None if optimizer_later else make, model_parameters=params,
                    mpu=net.mpu(), config=config, config_class=DeepSpeedConfig(config, net.mpu()))
    if optimizer_later:
        engine._configure_optimizer(make, params)
    losses = [float(engine.train_batch(batches)) for batches in [data(0)] for _ in range(3)]
    assert engine.note == "mine" and isinstance(engine, Engine) and type(engine).__name__ == "Engine"
    return losses, whole_model(net), folded(engine), type(engine.optimizer).__name__


@pytest.mark.parametrize("zero", [0, 1])
def test_a_subclass_of_the_engine_built_directly(zero):
    """DeepSpeed's own cannot make a second ZeRO optimizer over the same parameters: the numbers of one from the start count."""
    losses, weights, *_ = under(None, builds_its_engine, False, zero=zero)[0]
    for later in (False, True):
        mine, my_weights, classes, optimizer = under(OVERLAP, builds_its_engine, later, zero=zero)[0]
        assert classes == (True, True) and optimizer == "ShardedOptimizer"
        assert mine == losses and largest_difference(weights, my_weights)[0] == 0
