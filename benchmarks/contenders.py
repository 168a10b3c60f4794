"""The pipelines that are compared: DeepSpeed's own two, torch.distributed.pipelining and ds_fold, on one model and the same data.

Each is built once per process and steps with its data-parallel communication on or off; off, it also does not change its
weights, so that what it trains stays comparable.
"""

import itertools
from typing import Any, Callable, Dict, List, Tuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as stock_schedule
from deepspeed.utils import groups
from emulated import EmulatedLayer, Live, batch_of
from setting import Setting
from torch import nn
from torch.distributed import pipelining

import ds_fold
from ds_fold.runtime.collectives import Pending
from ds_fold.runtime.sharded_optimizer import ShardedOptimizer

LEARNING_RATE = 0.05


class Contender:
    """A pipeline over ``setting`` on this rank; rank = pipeline rank * D + replica."""

    def __init__(self, setting: Setting):
        self.setting, self.live = setting, Live()
        self.rank, self.replica = divmod(dist.get_rank(), setting.D)

    def layer_arguments(self, index: int) -> tuple:
        s = self.setting
        return index, s.features, s.weights, s.forward_s, s.M, self.live

    def step(self) -> None:
        raise NotImplementedError

    def layers(self) -> List[EmulatedLayer]:
        """This rank's."""
        raise NotImplementedError

    def communicate(self, on: bool) -> None:
        """Data-parallel communication on or off from the next step."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing more will be asked."""

    def checksums(self) -> Dict[int, List[float]]:
        """Layer -> sums over its weights, in fp64."""
        return {layer.index: [float(w.sum()), float((w * w).sum()), float(w[0]), float(w[-1])] for layer, w in
                ((layer, torch.cat([layer.head.detach(), layer.tail.detach()]).double()) for layer in self.layers())}


class EngineContender(Contender):
    """An engine with DeepSpeed's ``train_batch`` and instruction map."""

    def __init__(self, setting: Setting, module: Callable, initialize: Callable, zero: int = 0,
                 partition_method: str = "uniform", **more):
        super().__init__(setting)
        self._groups_before = set(dist.distributed_c10d._world.pg_map)
        self.config = config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": setting.M,
            "steps_per_print": 10**9,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": zero, "reduce_bucket_size": 500000000},
            "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
            **more,
        }
        net = module(self.layer_specs(), num_stages=setting.P, loss_fn=nn.MSELoss(), partition_method=partition_method,
                     **({"config": config} if "ds_fold" in config else {}))
        self.engine, *_ = initialize(model=net, model_parameters=list(net.parameters()), config=config)
        self.data = itertools.cycle(self.batch())
        self._map, self._replicas = self.engine._INSTRUCTION_MAP, getattr(self.engine.optimizer, "replicas", None)

    def layer_specs(self) -> List[deepspeed.pipe.LayerSpec]:
        return [deepspeed.pipe.LayerSpec(EmulatedLayer, *self.layer_arguments(index)) for index in range(self.setting.layers)]

    def batch(self) -> List[Tuple[torch.Tensor, torch.Tensor]]:
        return batch_of(self.replica, self.setting.M, self.setting.features)

    def step(self) -> None:
        self.engine.train_batch(self.data)

    def close(self) -> None:
        """Process groups go, too: each idle gloo group wakes up a hundred times a second."""
        self.engine.destroy()
        for group in [group for group in dist.distributed_c10d._world.pg_map if group not in self._groups_before]:
            dist.destroy_process_group(group)
        groups._WORLD_GROUP = None  # which DeepSpeed keeps

    def layers(self):
        return [layer for layer in self.engine.module.modules() if isinstance(layer, EmulatedLayer)]

    def communicate(self, on: bool) -> None:
        if isinstance(self.engine.optimizer, ShardedOptimizer):
            self.engine.optimizer.replicas = self._replicas if on else Silent(self._replicas)
        else:
            quiet = {stock_schedule.ReduceGrads: lambda engine, **_: None}
            self.engine._INSTRUCTION_MAP = self._map if on else {**self._map, **quiet}
        for group in self.engine.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * on


class Silent:
    """Replicas that do not talk to each other: each goes on with its own part."""

    def __init__(self, replicas):
        self.size, self.rank, self.part = replicas.size, replicas.rank, replicas.part

    def reduce_scatter(self, flat):
        return Pending([], lambda: self.part(flat).clone())

    def all_gather(self, flat, urgency=0):
        return Pending([], lambda: flat)


class TorchContender(Contender):
    """``torch.distributed.pipelining`` with DDP per stage, or with one all-reduce per stage after the step."""

    SCHEDULES = {"1f1b": pipelining.Schedule1F1B, "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
                 "looped_bfs": pipelining.ScheduleLoopedBFS}

    def __init__(self, setting: Setting, schedule: str, segments: int = 1, ddp: bool = True):
        super().__init__(setting)
        P, D, v = setting.P, setting.D, segments
        pipes = [dist.new_group([p * D + d for p in range(P)]) for d in range(D)]
        replicas = [dist.new_group([p * D + d for d in range(D)]) for p in range(P)]
        self.group, self.ddp = replicas[self.rank], ddp and D > 1
        per_chunk = setting.layers // (v * P)
        self.chunks, stages = [], []
        for k in range(v):
            s = k * P + self.rank
            indices = range(s * per_chunk, (s + 1) * per_chunk)
            chunk = nn.Sequential(*(EmulatedLayer(*self.layer_arguments(index)) for index in indices))
            self.chunks.append(chunk)
            wrapped = nn.parallel.DistributedDataParallel(chunk, process_group=self.group) if self.ddp else chunk
            # forms are told in advance: inferring them would run the layers once more
            inner = torch.empty(1, setting.features, requires_grad=True)
            stages.append(pipelining.PipelineStage(wrapped, s, v * P, torch.device("cpu"), output_args=inner,
                                                   input_args=inner if s else inner.detach(), group=pipes[self.replica]))
        self.stages, self.wrapped = stages, [stage.submod for stage in stages]
        make = self.SCHEDULES[schedule]
        self.schedule = make(stages[0] if v == 1 else stages, setting.M, loss_fn=nn.MSELoss())
        self.optimizer = torch.optim.SGD([p for chunk in self.chunks for p in chunk.parameters()], lr=LEARNING_RATE)
        step = batch_of(self.replica, setting.M, setting.features)
        self.inputs, self.targets = torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])
        self.on = True

    def step(self) -> None:
        inputs = [self.inputs] if self.rank == 0 else []
        target = self.targets if self.rank == self.setting.P - 1 else None
        self.schedule.step(*inputs, target=target, losses=[] if target is not None else None, return_outputs=False)
        if self.on and not self.ddp and self.setting.D > 1:
            for chunk in self.chunks:
                flat = torch.cat([p.grad.reshape(-1) for p in chunk.parameters()])
                dist.all_reduce(flat, group=self.group)
                flat /= self.setting.D
                for p, grad in zip(chunk.parameters(), flat.split([p.numel() for p in chunk.parameters()])):
                    p.grad.copy_(grad.view_as(p))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def layers(self):
        return [layer for chunk in self.chunks for layer in chunk]

    def communicate(self, on: bool) -> None:
        self.on = on
        for stage, wrapped, chunk in zip(self.stages, self.wrapped, self.chunks):
            stage.submod = wrapped if on else chunk
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * on


def build(kind: str, setting: Setting, options: Dict[str, Any]) -> Contender:
    """``kind`` is deepspeed, dualpipev, torch or ds_fold; ``options`` the keyword arguments of its class, for ds_fold its block,
    with "config" for other keys of the ds_config."""
    if kind == "deepspeed":
        return EngineContender(setting, deepspeed.pipe.PipelineModule, deepspeed.initialize, **options)
    if kind == "dualpipev":
        return EngineContender(setting, deepspeed.pipe.DualPipeVModule, deepspeed.initialize, **options)
    if kind == "ds_fold":
        options = dict(options)
        zero, config = options.pop("zero", 0), options.pop("config", {})
        return EngineContender(setting, ds_fold.PipelineModule, ds_fold.initialize, zero, ds_fold=options, **config)
    return TorchContender(setting, **options)
