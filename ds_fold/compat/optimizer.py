"""What DeepSpeed 0.19.x expects of its ZeRO optimizers, beyond its public surface.

Checkpoints have the keys of DeepSpeed's own ZeRO-1 and 2 files, with one flat group per bucket: ``ds_to_universal`` reads them,
and universal checkpoints of any origin load by parameter name. So do these, where the buckets have changed.
"""

import os
from copy import deepcopy
from typing import Dict, List, Optional, Union

import torch
import torch.distributed as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import enable_universal_checkpoint
from deepspeed.git_version_info import version
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.zero.stage_1_and_2 import OPTIMIZER_ALLGATHER_TIMER, OPTIMIZER_GRADIENTS_TIMER, OPTIMIZER_STEP_TIMER
from deepspeed.utils import link_hp_params
from deepspeed.utils.tensor_fragment import map_to_flat_opt_states
from deepspeed.utils.timer import NoopTimer

#: names under which the phases of a step are timed: unscale and clip, the inner step, launching (or doing) the gather
TIMERS = (OPTIMIZER_GRADIENTS_TIMER, OPTIMIZER_STEP_TIMER, OPTIMIZER_ALLGATHER_TIMER)


class ZeroOptimizerBase(ZeROOptimizer):
    """Loss scaling, checkpoints and DeepSpeed's view of a sharded optimizer.

    Subclasses provide :attr:`buckets` before they call :meth:`link_parameters`, and the methods and properties that their callers
    see: ``flush``, ``shard``, ``loss_scale``, ``param_groups``, ``state``.
    """
    buckets: List = []

    def __init__(self, optimizer: torch.optim.Optimizer, param_names: Dict[torch.nn.Parameter, str], group, stage: int, clip: float,
                 dtype: torch.dtype, static_loss_scale: float, dynamic_loss_scale: bool, dynamic_loss_args: Optional[dict], mpu,
                 timers):
        super().__init__()
        self.optimizer, self.param_names = optimizer, param_names
        self.dp_process_group, self.mpu = group, mpu
        self.stage, self.clip_grad, self.dtype = stage, float(clip), dtype
        self.loss_scaler = CreateLossScaler(dtype, static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        self.dynamic_loss_scale = self.loss_scaler.dynamic
        self.overflow = False
        self.timers = timers or NoopTimer()
        # read by DeepSpeed's engine
        self.custom_loss_scaler, self.external_loss_scale, self.torch_autocast_gradscaler = False, None, None
        self.averaged_gradients = {}
        self._global_grad_norm = 0.0
        self._state_is_linked = False

    @property
    def global_grad_norm(self):
        """The unscaled L2 norm of the last step's average gradients over the whole model; inf where they were not finite."""
        return self._global_grad_norm

    @global_grad_norm.setter
    def global_grad_norm(self, norm):
        self._global_grad_norm = norm

    # DeepSpeed's view -----------------------------------------------------------------------------------------------------

    @property
    def bit16_groups(self) -> List[List[torch.nn.Parameter]]:
        return [bucket.parameters for bucket in self.buckets]

    round_robin_bit16_groups = bit16_groups

    @property
    def single_partition_of_fp32_groups(self) -> List[torch.Tensor]:
        return [bucket.master for bucket in self.buckets]

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        pass  # launched by segment

    def checkpoint_event_prologue(self) -> None:
        self.flush()

    def checkpoint_event_epilogue(self) -> None:
        pass

    def link_parameters(self) -> None:
        """Let every parameter know its piece of the master, for ``safe_get_full_fp32_param`` and universal checkpoints."""
        for index, bucket in enumerate(self.buckets):
            link_hp_params(bucket.parameters, bucket.master, self.averaged_gradients, None, False, index, bucket.start,
                           bucket.master.numel(), self.dp_process_group)
            enable_universal_checkpoint(bucket.parameters)
        self._state_is_linked = False

    def link_state(self) -> None:
        """The same for the state of the inner optimizer, once there is some."""
        if self._state_is_linked:
            return
        for bucket in self.buckets:
            for p in self._mapped(bucket):
                p._hp_mapping.set_optim_state_fragment(bucket.master, self.state.get(bucket.master, {}))
        self._state_is_linked = True

    def unlink(self) -> None:
        for bucket in self.buckets:
            for p in bucket.parameters:
                p._hp_mapping = None

    @staticmethod
    def _mapped(bucket) -> List[torch.nn.Parameter]:
        """The parameters of which this rank's part holds at least one element."""
        return [p for p in bucket.parameters if p._hp_mapping is not None]

    # checkpoints ----------------------------------------------------------------------------------------------------------

    def _slices(self) -> List[dict]:
        return [{self.param_names[p]: p._hp_mapping.get_hp_fragment_address() for p in self._mapped(b)} for b in self.buckets]

    def state_dict(self) -> dict:
        """This rank's optimizer state, in the form of DeepSpeed's ZeRO files."""
        return {
            keys.LOSS_SCALER: self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            keys.CLIP_GRAD: self.clip_grad,
            keys.BASE_OPTIMIZER_STATE: self.optimizer.state_dict(),
            keys.SINGLE_PARTITION_OF_FP32_GROUPS: [bucket.saved_master() for bucket in self.buckets],
            keys.ZERO_STAGE: self.stage,
            keys.GROUP_PADDINGS: [bucket.padding for bucket in self.buckets],
            keys.PARTITION_COUNT: [bucket.flat.numel() // bucket.master.numel() for bucket in self.buckets],
            keys.DS_VERSION: version,
            keys.PARAM_SLICE_MAPPINGS: self._slices(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict_list: Union[dict, List[dict], None], load_optimizer_states: bool = True,
                        load_from_fp32_weights: bool = True, checkpoint_folder: Optional[str] = None, load_serial=None,
                        param_shapes=None) -> None:
        """Load this rank's :meth:`state_dict` (from a list of all replicas', or alone), or a universal checkpoint's folder.

        Parameters themselves are loaded by the module, before. The buckets may be others, as with another ``reduce_bucket_size``:
        the replicas then exchange their states, which together hold every parameter whole. Call on all of them.

        Raises:
            ValueError: the state of other parameters, parameter groups or numbers of replicas.
        """
        self.flush()
        self.shard()  # what the module has loaded is kept, and gathered with what is loaded here
        if checkpoint_folder:
            self._load_universal(checkpoint_folder)
        else:
            mine = state_dict_list
            if not isinstance(mine, dict):
                mine = state_dict_list[dist.get_rank(self.dp_process_group)]
            if not all(self._from_replicas(mine.get(keys.PARAM_SLICE_MAPPINGS) == self._slices())):
                mine = self._recut(mine, self._from_replicas(mine))
            self._load_global_state(mine)
            if load_optimizer_states:
                self.optimizer.load_state_dict(mine[keys.BASE_OPTIMIZER_STATE])
            if load_from_fp32_weights:
                for bucket, saved in zip(self.buckets, mine[keys.SINGLE_PARTITION_OF_FP32_GROUPS]):
                    bucket.master[:saved.numel()].copy_(saved)
            else:
                self.refresh_fp32_params()
        self._state_is_linked = False
        if self.state:
            self.link_state()

    def _from_replicas(self, mine) -> list:
        everyone = [None] * dist.get_world_size(self.dp_process_group)
        dist.all_gather_object(everyone, mine, group=self.dp_process_group)
        return everyone

    def _recut(self, mine: dict, states: List[dict]) -> dict:
        """``mine`` with the flat tensors of all replicas' ``states`` cut for the buckets of this optimizer."""
        states = states[:max(mine[keys.PARTITION_COUNT], default=0)]  # one with ZeRO-0: each replica has everything
        whole: Dict[str, Dict[str, list]] = {}  # parameter -> state -> its pieces by replica, or what is not cut, such as a step
        for state in states:
            flat = state[keys.BASE_OPTIMIZER_STATE]["state"]
            for i, slices in enumerate(state[keys.PARAM_SLICE_MAPPINGS]):
                values = {keys.FP32_WEIGHT_KEY: state[keys.SINGLE_PARTITION_OF_FP32_GROUPS][i], **flat.get(i, {})}
                for name, address in slices.items():
                    for key, value in values.items():
                        piece = value.narrow(0, address.start, address.numel) if _is_flat(value) else value
                        whole.setdefault(name, {}).setdefault(key, []).append(piece)
        groups = self.optimizer.state_dict()["param_groups"]
        saved_groups = mine[keys.BASE_OPTIMIZER_STATE]["param_groups"]
        saved_names = [{name for state in states for i in group["params"] for name in state[keys.PARAM_SLICE_MAPPINGS][i]}
                       for group in saved_groups]
        names = [{self.param_names[p] for i in group["params"] for p in self.buckets[i].parameters} for group in groups]
        if saved_names != names or any(
                sum(piece.numel() for piece in whole[self.param_names[p]][keys.FP32_WEIGHT_KEY]) != p.numel()
                for bucket in self.buckets for p in bucket.parameters):
            raise ValueError("this optimizer state was saved with other chunks, parameter groups or replicas than it is loaded "
                             "into; convert the checkpoint with DeepSpeed's ds_to_universal and load it with "
                             '"checkpoint": {"load_universal": true}')
        masters, inner = [], {}
        for index, bucket in enumerate(self.buckets):
            values = {keys.FP32_WEIGHT_KEY: torch.zeros_like(bucket.master)}
            for p in self._mapped(bucket):
                part, place = p._hp_mapping.lp_fragment_address, p._hp_mapping.get_hp_fragment_address()
                for key, pieces in whole[self.param_names[p]].items():
                    if _is_flat(pieces[0]):
                        target = values.setdefault(key, pieces[0].new_zeros(bucket.master.shape))
                        target.narrow(0, place.start, place.numel).copy_(torch.cat(pieces).narrow(0, part.start, part.numel))
                    else:
                        values[key] = deepcopy(pieces[0])  # a step that counts for one bucket only
            masters.append(values.pop(keys.FP32_WEIGHT_KEY))
            inner[index] = values
        groups = [{**saved, "params": group["params"]} for saved, group in zip(saved_groups, groups)]
        return {**mine, keys.SINGLE_PARTITION_OF_FP32_GROUPS: masters,
                keys.BASE_OPTIMIZER_STATE: {"state": inner, "param_groups": groups}}

    def _load_universal(self, folder: str) -> None:
        folder = os.path.join(folder, "zero")
        saved = torch.load(os.path.join(folder, "optimizer_state.pt"), weights_only=False)
        self._load_global_state(saved)
        tp_rank, tp_size = 0, 1
        if self.mpu is not None:
            tp_rank, tp_size = self.mpu.get_slice_parallel_rank(), self.mpu.get_slice_parallel_world_size()
        for bucket in self.buckets:
            names, step = set(), None
            for p in self._mapped(bucket):
                step = p.load_hp_checkpoint_state(os.path.join(folder, self.param_names[p]), tp_rank, tp_size)
                names.update(p._hp_mapping.get_optim_state_keys())
            if step is not None:
                self.state[bucket.master]["step"] = step
            map_to_flat_opt_states(bucket.master, bucket.parameters, self.state, names)
        for group, loaded in zip(self.param_groups, saved["param_groups"]):
            group.update({key: value for key, value in loaded.items() if key != "params"})

    def _load_global_state(self, saved: dict) -> None:
        self.loss_scaler = saved.get(keys.LOSS_SCALER, self.loss_scaler)
        self.dynamic_loss_scale = saved.get("dynamic_loss_scale", self.dynamic_loss_scale)
        self.overflow = saved.get("overflow", self.overflow)
        self.clip_grad = saved.get(keys.CLIP_GRAD, self.clip_grad)

    def refresh_fp32_params(self) -> None:
        """Parameters were loaded from outside: the masters follow."""
        self.flush()
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.refresh_master()

    _restore_from_bit16_weights = refresh_fp32_params


def _is_flat(value) -> bool:
    """Whether a state of a bucket has one value per element."""
    return torch.is_tensor(value) and value.dim() == 1


__all__ = ["TIMERS", "ZeroOptimizerBase"]
