"""What a rank holds during a step: parameters, gradients, optimizer states, activations and messages. Pure Python.

Bytes per trainable parameter, b the model's precision, a that in which gradients are summed, w that in which they travel, n the
optimizer's numbers per parameter (Adam: 2), D replicas (Rajbhandari et al., SC 2020, and ds_fold/runtime/buckets.py):

    ======================  =========  ==================  ==============================  =============================
                            gradients  master              optimizer                       while reduced
    ======================  =========  ==================  ==============================  =============================
    ds_fold, ZeRO 0         a          0 (b=4), else 4     4 n                             w where it is not a
    ds_fold, ZeRO 1, 2      a          0 (b=4), else 4/D   4 n / D                         + w (D-1)/D received on gloo
    DeepSpeed, fp32 ZeRO 0  4          0                   4 n                             not counted
    DeepSpeed, fp16 ZeRO 0  2          4                   4 n                             not counted
    DeepSpeed, others       a          4 / D               4 n / D                         not counted
    ======================  =========  ==================  ==============================  =============================

Gradients are there for good in ds_fold's ZeRO 0 and 1 and in DeepSpeed's bf16 optimizer. With ZeRO-2 a segment's are there from its
first backward to the end of its reduction; DeepSpeed's others make each in the first backward and drop it in the step.
"""

from typing import Any, Dict, Iterable, Literal, NamedTuple, Optional, Sequence, Tuple

from ..schedule.actions import (
    GATHER,
    RECV_ACT,
    RECV_GRAD,
    REDUCE,
    RELEASE,
    STEP,
    STEP_SEGMENT,
    WAIT_REDUCE,
    WAIT_SEND_GRAD,
    Action,
    B,
    F,
)
from .costs import GIB, Costs

_ITEMSIZE = {"fp32": 4, "float32": 4, "float": 4, "fp16": 2, "float16": 2, "half": 2, "bf16": 2, "bfloat16": 2}
#: numbers that an optimizer keeps per parameter, where it is not Adam's two; by its lower-case type in a ds_config
_STATES = {"adagrad": 1, "lion": 1, "fusedlion": 1, "rmsprop": 1}
_DEFAULT_STATES = 2


class States(NamedTuple):
    """Bytes that a rank holds, per byte of its trainable parameters in the model's precision.

    Attributes:
        gradients: summed over micro-batches, of full size.
        optimizer: masters and the optimizer's states, this replica's part.
        reducing: more than the gradients, from the launch of a reduction to its end. With ZeRO-2, instead of the gradients.
        reduced: averaged gradients, from the end of a reduction to the end of the step.
        undo: copies for steps that may be taken back.
        lifetime: of gradients: "always", "batch" (from the end of a segment's first backward to the step) or "reduction" (from
            before a segment's first backward to the end of its reduction).
        shard: of parameters, this replica's part, which is always there, where a segment's parameters are only from the launch of a
            gather to their release; None: they always are.
    """
    gradients: float
    optimizer: float
    reducing: float = 0.0
    reduced: float = 0.0
    undo: float = 0.0
    lifetime: Literal["always", "batch", "reduction"] = "always"
    shard: Optional[float] = None

    @classmethod
    def usual(cls, optimizer_bytes_per_byte: float, D: int, zero_stage: int, shard_params: bool) -> "States":
        """Gradients as large as parameters, and a profile's optimizer state, a D-th of it with ZeRO."""
        return cls(1.0, optimizer_bytes_per_byte / (D if zero_stage else 1), reducing=float(zero_stage == 2),
                   lifetime="reduction" if zero_stage == 2 else "always", shard=1 / D if shard_params and D > 1 else None)

    @classmethod
    def of_config(cls, config: Dict[str, Any], zero_stage: int, D: int, owned: bool) -> "States":
        """As a ds_config has them.

        Args:
            config: the ds_config.
            zero_stage: its ZeRO stage.
            D: replicas.
            owned: by ds_fold's sharded optimizer, see :meth:`ds_fold.config.FoldConfig.owns_optimizer`.
        """
        half = half_precision(config)
        b = 2 if half else 4
        a = _ITEMSIZE.get(str((config.get("data_types") or {}).get("grad_accum_dtype")).lower(), b)
        w = b * reduced_bytes(config)
        state = 4 * _states_per_parameter(config.get("optimizer") or {})
        if not owned:
            whole = zero_stage == 0 and half in (None, "fp16")
            master = 0 if whole and b == 4 else 4
            flat = half not in (None, "fp16") and (zero_stage == 0 or a == 4)
            return cls(a / b, (master + state) / (1 if whole else D) / b, lifetime="always" if flat else "batch")
        parts = D if zero_stage else 1
        master = 0 if b == 4 else 4
        copied = w if w != a else 0
        received = w * (D - 1) / D if zero_stage else 0
        reducing = (copied or a if zero_stage == 2 else copied) + received
        # one of the buffers that were received, or the gradients themselves, unless their precision changes
        reduced = 4 / parts if zero_stage or a != 4 or copied else 0
        if zero_stage == 1 and D == 1 and not copied and a == 4:
            reduced = 0
        return cls(a / b, (master + state) / parts / b, reducing / b, reduced / b, (4 + state) / parts / b,
                   "reduction" if zero_stage == 2 else "always",
                   1 / D if (config.get("ds_fold") or {}).get("shard_params") and D > 1 else None)


def reduced_bytes(config: Dict[str, Any]) -> float:
    """Bytes in which a gradient travels, per byte of its parameter."""
    b = 2 if half_precision(config) else 4
    return _ITEMSIZE.get(str(config.get("communication_data_type")).lower(), b) / b


def half_precision(config: Dict[str, Any]) -> Optional[str]:
    """The key of the ds_config that enables fp16 or bf16; None in fp32."""
    return next((key for key in ("bf16", "bfloat16", "fp16") if (config.get(key) or {}).get("enabled")), None)


def _states_per_parameter(optimizer: Dict[str, Any]) -> int:
    kind = str(optimizer.get("type", "adam")).lower()
    if kind == "sgd":
        return 1 if (optimizer.get("params") or {}).get("momentum") else 0
    return _STATES.get(kind, _DEFAULT_STATES)


def held(costs: Costs, states: States, r: int, actions: Sequence[Action], begun: Sequence[float], ended: Sequence[float],
         forward_only: bool = False) -> Iterable[Tuple[float, float]]:
    """(time, bytes held from then on) of pipeline rank r, in order of time.

    Parameters and optimizer state are always there, and so are gradients, but for ZeRO-2. Activations live from the begin of the
    forward to the end of the backward, and with them a chunk's output, which is the root of its backward; buffers of messages
    from their post to their use and from their making to the end of their send. What layers are recomputed from one kept input
    holds while its own backward runs.
    """
    P, last = costs.P, len(costs.forward_s) - 1

    def passed(s: int) -> float:
        """Bytes that virtual stage s passes to another rank."""
        return costs.boundary_bytes[s] if P > 1 and 0 <= s < last else 0.0

    trainable = costs.of_rank(costs.trainable_bytes, r)
    now = costs.of_rank(costs.parameter_bytes, r)
    if P == 1:  # layers that share weights are on one rank, which holds them once
        now -= costs.tied_bytes
        trainable -= costs.tied_bytes
    now += trainable * (states.optimizer + (states.gradients if states.lifetime == "always" else 0))
    if states.shard is not None:
        now += (states.shard - 1) * sum(costs.shardable_bytes(s) for s in range(r, last + 1, P))
    yield 0.0, now
    accumulating, until_step = set(), 0.0
    for (op, k, _), start, end in zip(actions, begun, ended):
        s = k * P + r
        if op == F:
            now += costs.activation_bytes[s] - passed(s - 1)  # the input is part of them
            if not forward_only:
                now += passed(s)
            yield start, now
            if forward_only:
                now -= costs.activation_bytes[s]
                yield end, now
        elif op == B:
            first = k not in accumulating
            accumulating.add(k)
            if first and states.lifetime == "reduction":
                now += costs.trainable_bytes[s] * states.gradients
            now += passed(s - 1)  # the input's gradient
            yield start, now + (costs.recompute_bytes[s] if costs.recompute_bytes else 0.0)
            now -= costs.activation_bytes[s] + 2 * passed(s)  # the output and its gradient, too
            if first and states.lifetime == "batch":  # each takes the place of what its layer had kept
                now += costs.trainable_bytes[s] * states.gradients
                until_step += costs.trainable_bytes[s] * states.gradients
            yield end, now
        elif op in (RECV_ACT, RECV_GRAD):
            now += passed(s - 1 if op == RECV_ACT else s)
            yield start, now
        elif op == WAIT_SEND_GRAD:
            now -= passed(s - 1)
            yield end, now
        elif op == REDUCE:
            now += costs.trainable_bytes[s] * (states.reducing - states.gradients * (states.lifetime == "reduction"))
            yield start, now
        elif op == WAIT_REDUCE:
            more = costs.trainable_bytes[s] * states.reduced
            now += more - costs.trainable_bytes[s] * states.reducing
            until_step += more
            yield end, now
        elif op == STEP_SEGMENT:
            more = costs.trainable_bytes[s] * states.undo
            now += more
            until_step += more
            yield start, now
        elif op == GATHER and states.shard is not None:
            now += costs.shardable_bytes(s)
            yield start, now
        elif op == RELEASE and states.shard is not None:
            now -= costs.shardable_bytes(s)
            yield end, now
        elif op == STEP:
            now -= until_step
            yield end, now


def memory_efficiency(samples_per_s: float, peak_bytes: float) -> Optional[float]:
    """HIPPIE's ME = throughput / memory (TPDS 2023): samples/s per GiB of the fullest rank. None where nothing is held."""
    return samples_per_s / (peak_bytes / GIB) if peak_bytes > 0 else None


def describe_efficiency(samples_per_s: float, peak_bytes: float, tokens_per_sample: Optional[int] = None) -> str:
    """Throughput and ME as a line for people."""
    efficiency = memory_efficiency(samples_per_s, peak_bytes)
    units = [("samples", 1)] + ([("tokens", tokens_per_sample)] if tokens_per_sample else [])
    speed = "throughput " + ", ".join(f"{count * samples_per_s:.4g} {unit}/s" for unit, count in units)
    if efficiency is None:
        return speed
    per_gib = ", ".join(f"{count * efficiency:.4g} {unit}/s per GiB" for unit, count in units)
    return f"{speed}; fullest rank {peak_bytes / GIB:.4g} GiB; memory efficiency {per_gib}"
