"""What scripts and libraries do with DeepSpeed's pipeline classes beyond calling them: under a ds_fold block each habit works as
with DeepSpeed itself, or is refused by one clear error."""


import pytest
import torch
from models import ADAM, HIDDEN, Block, LayerSpec, data, ds_config, installed, largest_difference, make_layers, whole_model
from pool import RankPool
from test_dropin import AIAO, OVERLAP, folded, script
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
    assert "Fixed partitions its layers itself" in text and "2 x 2 pipeline ranks = 4 chunks" in text
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
    """Under it only ParallelTransformerLayerPipe is recomputed by DeepSpeed's reentrant checkpoint, not an embedding of integers,
    which would get no gradients."""
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
        engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)
        ids = torch.arange(10).view(2, 5) % 5
        batch = (ids, ids != 3), torch.ones(2, 5, HIDDEN)
        losses = [float(engine.train_batch(iter([batch] * 4))) for _ in range(3)]
        return losses, whole_model(net), type(engine.module).__name__, engine.has_attention_mask, ParallelTransformerLayerPipe.runs

    name, mask, runs = assert_same(habit)
    assert name == "GPT2ModelPipe" and mask is True and runs == 3 * 4 * 3 * 2, "3 of the layers are here, each ran twice"


# engines ----------------------------------------------------------------------------------------------------------------------


def builds_its_engine(config, P, optimizer_later):
    """A subclass of PipelineEngine, built directly, with a train_batch like DeepSpeed's and an optimizer that comes later."""
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
    batches = data(0, "bf16" if engine.bfloat16_enabled() else "fp32")
    losses = [float(engine.train_batch(batches)) for _ in range(3)]
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


def test_an_optimizer_that_comes_later_in_bf16():
    (losses, weights, *_), (mine, my_weights, *_) = (under(OVERLAP, builds_its_engine, later, zero=2, dtype="bf16")[0]
                                                     for later in (False, True))
    assert mine == losses and largest_difference(weights, my_weights)[0] == 0


def groups_and_scheduler(config, P, as_callables):
    """Two parameter groups and a scheduler of its own, as objects or as callables."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from models import seed_cpu
    torch.manual_seed(0)
    net = PipelineModule(make_layers(8), num_stages=P, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=True,
                         seed_fn=seed_cpu)
    named = list(net.named_parameters())
    groups = [{"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
              {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0, "lr": 3e-3}]

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, **ADAM)

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0 / (1 + step)])

    config = {key: value for key, value in config.items() if key != "optimizer"}
    if as_callables:
        engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, optimizer=optimizer, lr_scheduler=scheduler,
                                          config=config)
    else:
        mine = optimizer(groups)
        engine, *_ = deepspeed.initialize(model=net, optimizer=mine, lr_scheduler=scheduler(mine), config=config)
    batches = data(0)
    losses = [float(engine.train_batch(batches)) for _ in range(3)]
    return losses, whole_model(net), [float(lr) for lr in engine.get_lr()], len(engine.optimizer.param_groups)


@pytest.mark.parametrize("as_callables", [False, True])
def test_optimizer_and_scheduler_with_several_groups(as_callables):
    lr, groups = assert_same(groups_and_scheduler, as_callables, zero=1, fold=OVERLAP)
    assert groups == 2 and lr == pytest.approx([ADAM["lr"] * 0.5**3, 3e-3 / 4])


# instructions and schedules -----------------------------------------------------------------------------------------------------


def wraps_instructions(config, P):
    """Functions of its own around those of the map: in DeepSpeed's class, in a subclass by super(), and in the instance."""
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine
    seen = []
    before = dict(PipelineEngine._INSTRUCTION_MAP)
    forward, backward = before[schedule.ForwardPass], before[schedule.BackwardPass]

    def timed_forward(self, buffer_id):
        seen.append("F")
        forward(self, buffer_id)

    def timed_step(self, lr_kwargs=None):
        before[schedule.OptimizerStep](self, lr_kwargs)
        seen.append("STEP")

    class Note(schedule.PipeInstruction):
        pass

    PipelineEngine._INSTRUCTION_MAP[schedule.ForwardPass] = timed_forward
    PipelineEngine._INSTRUCTION_MAP[schedule.OptimizerStep] = timed_step
    PipelineEngine._INSTRUCTION_MAP[Note] = lambda self: None  # added; no schedule has it
    try:
        losses, weights, engine = script(config, P, steps=2)

        def counted_backward(self, buffer_id):
            seen.append("B")
            backward(self, buffer_id=buffer_id)

        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.BackwardPass: counted_backward}
        losses.append(float(engine.train_batch(data(5))))
        for entries in engine.pipe_buffers.values():
            entries.clear()  # by hand, as some do between batches
        engine.num_pipe_buffers = 0
        losses.append(float(engine.train_batch(data(6))))
        return losses, whole_model(engine.module), {name: seen.count(name) for name in ("F", "B", "STEP")}
    finally:
        PipelineEngine._INSTRUCTION_MAP.clear()
        PipelineEngine._INSTRUCTION_MAP.update(before)


def test_functions_around_instructions_run_per_segment():
    counts, = assert_same(wraps_instructions)
    assert counts == {"F": 2 * 4 * 4, "B": 2 * 2 * 4, "STEP": 4}, "v * M forwards in each of 4 batches, backwards in 2"


def test_a_function_that_works_on_the_buffers_is_one_clear_error():
    def habit(config, P):
        from deepspeed.runtime.pipe import schedule
        from deepspeed.runtime.pipe.module import PipelineError
        engine = script(config, P, steps=0)[2]

        def loads(self, buffer_id):
            self.pipe_buffers["inputs"][buffer_id] = self.pipe_buffers["inputs"][buffer_id] * 2

        engine._INSTRUCTION_MAP = {schedule.LoadMicroBatch: loads}
        with pytest.raises(PipelineError, match="ds_fold's engine has no pipe_buffers"):
            engine.train_batch(data(0))
        return True

    assert under(AIAO, habit, P=1) == [True]


def replaces_the_schedule(config, P, the_class):
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    class OneByOne(schedule.PipeSchedule):
        """A micro-batch at a time, so that least is held."""

        def steps(self):
            first, last = self.stage_id == 0, self.stage_id == self.stages - 1
            for _ in range(self.micro_batches):
                yield [] if first else [schedule.RecvActivation(0)]
                yield [schedule.LoadMicroBatch(0)] if first or last else []
                yield [schedule.ForwardPass(0)]
                yield [] if last else [schedule.SendActivation(0), schedule.RecvGrad(0)]
                yield [schedule.BackwardPass(0)]
                yield [] if first else [schedule.SendGrad(0)]
            yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

        def num_pipe_buffers(self):
            return 1

    before = schedule.TrainSchedule, PipelineEngine._train_schedule
    if the_class:
        schedule.TrainSchedule = OneByOne
    else:
        PipelineEngine._train_schedule = lambda self: OneByOne(self.micro_batches, self.num_stages, self.stage_id)
    try:
        losses, weights, engine = script(config, P)
        if not folded(engine)[0]:
            return losses, weights
        program = engine.schedule_of(engine._train_schedule()).program
        return losses, weights, [str(a) for a in program.ranks[engine.stage_id] if str(a)[0] in "FB"]
    finally:
        schedule.TrainSchedule, PipelineEngine._train_schedule = before


@pytest.mark.parametrize("the_class", [True, False])
def test_a_replaced_train_schedule_runs_proved_unless_the_block_names_another(the_class):
    order, = assert_same(replaces_the_schedule, the_class, zero=1, fold={"overlap_grad_reduce": "segment"})
    assert order == ["F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2", "F0.3", "B0.3"]
    text = refused(replaces_the_schedule, the_class)
    assert "OneByOne in place of DeepSpeed's TrainSchedule" in text and "ds_fold.schedule, ds_fold.segments; remove these" in text


# attributes, messages, shapes -------------------------------------------------------------------------------------------------


def by_hand(config, P):
    """Shapes that change, said by hand as before reset_activation_shape() was there, and another number of micro-batches."""
    engine = script(config, P, steps=1)[2]
    losses = []
    for rows in (2, 5, 3):
        x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
        engine.first_output_send = True
        engine.pipe_recv_buf = None
        engine.grad_layer = None
        engine.meta_buffer = None
        losses.append(float(engine.train_batch(iter([(x, x)] * 4))))
    engine.micro_batches = 2
    losses.append(float(engine.train_batch(iter([(x, x)] * 2))))
    losses.append(float(engine.eval_batch(iter([(x, x)] * 2))))
    return losses, whole_model(engine.module)


def test_shapes_reset_and_micro_batches_set_by_hand():
    assert_same(by_hand)


def looks_around(config, P):
    import torch.distributed as dist
    from deepspeed.runtime.pipe import p2p
    losses, weights, engine = script(config, P)
    rank = dist.get_rank()
    assert engine.stage_id == engine.grid.get_stage_id() == engine.get_pipeline_parallel_rank() == rank
    assert engine.is_first_stage() == (engine.stage_id == 0) and engine.is_last_stage() == (engine.stage_id == P - 1)
    assert engine.grid.get_data_parallel_world_size() == 1 and engine.mpu is not None and engine.num_stages == P
    net = engine.module
    assert len(net._layer_specs) == 8 and len(net.forward_funcs) == 4
    assert isinstance(net.forward_funcs[0], Block) and 0 <= net._local_start < net._local_stop <= 8
    assert {name.split(".")[1] for name, _ in net.named_parameters()} == {"a", "b"}
    mine = torch.full((3, ), float(rank))
    if engine.is_first_stage():
        p2p.send(mine, 1)
    else:
        p2p.recv(mine, 0)
    return losses, weights, float(mine[0])


def test_grid_stages_layers_and_messages_of_the_scripts_own():
    assert_same(looks_around)
    assert [received for _, _, received in under(OVERLAP, looks_around)] == [0, 0]


# frozen bases and adapters ------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen base with a low-rank adapter, as LoRA makes it."""

    def __init__(self, hidden=HIDDEN, rank=2):
        super().__init__()
        self.base = nn.Linear(hidden, hidden)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(hidden, rank, bias=False), nn.Linear(rank, hidden, bias=False)

    def change(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))

    def forward(self, x):
        return x + self.change(x)


def adapts(config, P, folder, adapted):
    """Some layers with adapters, others frozen; saved without the frozen parameters, loaded as a module into a new model."""
    import torch.distributed as dist

    class Frozen(Block):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)

    layers = [LayerSpec(Adapted) if i in adapted else LayerSpec(Frozen) for i in range(8)]
    losses, weights, engine = script(config, P, layers=layers)
    engine.save_checkpoint(folder, tag="lora", exclude_frozen_parameters=True)
    dist.barrier()
    saved = {}
    for i in adapted:
        saved.update({f"{i}.{n}": w for n, w in torch.load(f"{folder}/lora/layer_{i:02d}-model_states.pt").items()})
    assert sorted(saved) == sorted(f"{i}.{n}" for i in adapted for n in ("down.weight", "up.weight"))
    assert all(torch.equal(w, weights[n]) for n, w in saved.items())
    fresh = script(config, P, layers=layers, steps=0)[2]
    fresh.load_checkpoint(folder, tag="lora", load_module_only=True, load_module_strict=False)
    weights.pop("placeholder", None)
    again = {n: w for n, w in whole_model(fresh.module).items() if n != "placeholder"}
    assert largest_difference(weights, again)[0] == 0
    return losses, weights


@pytest.mark.parametrize("adapted", [(0, 1, 2, 3, 4, 5, 6, 7), (2, 7), (0, 1)], ids=str)
def test_adapters_on_any_chunk_save_without_their_base_and_load_as_a_module(adapted, tmp_path):
    """DeepSpeed's own fails where a rank has nothing to train; then one rank that holds the whole model counts."""
    spread = len({0 if i < 4 else 1 for i in adapted}) == 2
    losses, weights = under(None, adapts, str(tmp_path / "stock"), adapted, P=2 if spread else 1)[0]
    mine, my_weights = under(OVERLAP, adapts, str(tmp_path / "fold"), adapted, zero=1)[0]
    assert mine == pytest.approx(losses, rel=1e-6) and losses[-1] < losses[0]
    difference, size = largest_difference(weights, my_weights)
    assert difference <= 1e-6 * size
