"""What things cost: a profile of the layers, the cluster they run on, and the costs of a folded pipeline that follow from both.

Two JSON files, both with ``"schema": 1``. A cluster::

    {"schema": 1, "hosts": 8, "ranks_per_host": 1, "inter_host": {"gbit_per_s": 10, "latency_s": 5e-5},
     "device_memory_bytes": 16e9}

A profile, measured once per layer for one micro-batch (see :class:`Profile` for all keys)::

    {"schema": 1, "name": "gpt",
     "layers": [{"name": "embed", "forward_s": 0.001, "backward_s": 0.002, "parameter_bytes": 4e6, "trainable_bytes": 4e6,
                 "activation_bytes": 65536, "boundary_bytes": 32768,
                 "recomputed": {"backward_s": 0.003, "activation_bytes": 8192}}, ...],
     "head": {"forward_s": 0.001, "backward_s": 0.001, "activation_bytes": 1e6}}

``python -m ds_fold profile`` and ``netcheck`` measure and write them.
"""

import json
from typing import Any, Collection, Dict, List, Literal, NamedTuple, Optional, Sequence, Type, TypeVar, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

SCHEMA = 1
_REMEASURE = "measure this model: python -m ds_fold profile"
GIB = 2**30


class PlanError(ValueError):
    """Costs that cannot be used; the message names the file or argument, the value and the remedy."""


_Loaded = TypeVar("_Loaded", bound="_Model")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    @classmethod
    def load(cls: Type[_Loaded], path: str) -> _Loaded:
        """Read a JSON file. Raises PlanError naming the file and each wrong key."""
        try:
            with open(path) as file:
                data = json.load(file)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PlanError(f"{path}: cannot be read as JSON: {error}") from None
        if not isinstance(data, dict):
            raise PlanError(f"{path}: must hold one JSON object, found {type(data).__name__}")
        try:
            return cls(**data)
        except ValidationError as error:
            raise PlanError("\n".join(f"{path}: {_explain(e)}" for e in error.errors())) from None

    def save(self, path: str) -> None:
        """Write the JSON that :meth:`load` reads."""
        with open(path, "w") as file:
            file.write(self.model_dump_json(indent=1, by_alias=True, exclude_none=True) + "\n")


def _explain(error: Dict[str, Any]) -> str:
    key = ".".join(map(str, error["loc"]))
    given = "" if error["type"] in ("missing", "value_error") else f", got {error['input']!r}"
    return f"{key}: " * bool(key) + error["msg"].replace("Value error, ", "") + given


# cluster ------------------------------------------------------------------------------------------------------------------


class Link(_Model):
    """One direction of a network card, or of a rank's link to the other ranks of its host. Give one of the two rates."""

    bytes_per_s: Optional[PositiveFloat] = None
    gbit_per_s: Optional[PositiveFloat] = None
    latency_s: NonNegativeFloat = 0.0
    """From the last byte's departure to its arrival."""

    @model_validator(mode="after")
    def _one_rate(self):
        if (self.bytes_per_s is None) == (self.gbit_per_s is None):
            raise ValueError("give either bytes_per_s or gbit_per_s")
        return self

    @property
    def rate(self) -> float:
        """Bytes per second, what applications see: take headers off (TCP over Ethernet leaves 0.956 of the line rate)."""
        return self.bytes_per_s if self.gbit_per_s is None else self.gbit_per_s * 1e9 / 8


class Cluster(_Model):
    """Equal hosts behind one switch that is never the bottleneck. Rank ``p * D + d`` sits on host ``rank // ranks_per_host``."""

    schema_version: Literal[1] = Field(SCHEMA, alias="schema")
    hosts: PositiveInt
    ranks_per_host: PositiveInt = 1
    inter_host: Link
    """A host's network card, shared by its ranks; both directions at full rate at once."""
    intra_host: Optional[Link] = None
    """A rank's link to the other ranks of its host. Needed with more than one rank a host."""
    device_memory_bytes: Optional[PositiveFloat] = None
    memory_gib: Optional[Union[PositiveFloat, List[PositiveFloat]]] = None
    """The same in 2**30 bytes, for all ranks or one number per rank. Give one of the two."""
    collective: Literal["ring", "hierarchical", "pairwise"] = "ring"
    """How replicas of one layer exchange S bytes where h of them share a host: see :meth:`exchange`. Without sharing all three
    send (D-1)/D S. ds_fold's own collectives are pairwise on gloo; NCCL picks rings or trees."""

    @model_validator(mode="after")
    def _has_local_link(self):
        if self.ranks_per_host > 1 and self.intra_host is None:
            raise ValueError(f"intra_host is missing, but ranks_per_host={self.ranks_per_host}")
        return self

    @model_validator(mode="after")
    def _one_memory(self):
        if self.memory_gib is not None and self.device_memory_bytes is not None:
            raise ValueError("give either device_memory_bytes or memory_gib")
        ranks = self.hosts * self.ranks_per_host
        if isinstance(self.memory_gib, list) and len(self.memory_gib) != ranks:
            raise ValueError(f"memory_gib lists {len(self.memory_gib)} ranks, but {self.hosts} hosts x {self.ranks_per_host} are "
                             f"{ranks}")
        return self

    def memory_bytes(self, pipeline_rank: int, D: int) -> Optional[float]:
        """What the smallest device of the pipeline rank's D replicas holds; None where the file does not say."""
        if isinstance(self.memory_gib, list):
            return GIB * min(self.memory_gib[pipeline_rank * D:(pipeline_rank + 1) * D])
        return self.device_memory_bytes if self.memory_gib is None else GIB * self.memory_gib

    def sliced(self, T: int) -> "Cluster":
        """What one of T tensor-parallel slices has of the cluster. Ranks of a tensor-parallel group sit next to each other (rank
        ``(p * D + d) * T + t``) and send at the same time: a slice's rank has a T-th of its host's card, its own link inside the
        host, and the memory of the smallest of the group's devices.

        Raises:
            PlanError: T does not divide the ranks of a host.
        """
        if T < 1 or self.ranks_per_host % T:
            raise PlanError(f"a tensor-parallel size of {T} does not divide ranks_per_host={self.ranks_per_host}; tensor-parallel "
                            f"groups that reach over hosts are not planned")
        memory = self.memory_gib
        if isinstance(memory, list):
            memory = [min(memory[i:i + T]) for i in range(0, len(memory), T)]
        card = Link(bytes_per_s=self.inter_host.rate / T, latency_s=self.inter_host.latency_s)
        return self.model_copy(update={"ranks_per_host": self.ranks_per_host // T, "inter_host": card, "memory_gib": memory})

    def check(self, P: int, D: int) -> None:
        """Raise PlanError unless P pipeline ranks of D replicas fit, with all replicas placed alike."""
        h = self.ranks_per_host
        if self.hosts * h < P * D:
            raise PlanError(f"{P} pipeline ranks x {D} replicas need {P * D} ranks, but the cluster has {self.hosts} hosts x {h}")
        if h % D and D % h:
            raise PlanError(f"{D} replicas on hosts of {h} ranks are not placed alike: hosts would be cut in the middle of a "
                            f"replica group; use a ranks_per_host or a number of replicas that divides the other")

    def host(self, pipeline_rank: int, D: int) -> int:
        """The host of the pipeline rank's first replica."""
        return pipeline_rank * D // self.ranks_per_host

    def exchange(self, size: float, D: int) -> "Exchange":
        """A reduce-scatter or an all-gather of ``size`` bytes among D replicas; an all-reduce is two of them.

        With h replicas on each of H = D/h hosts and S = ``size``, in bytes that one direction of the host's card carries:
        ring (D-1)/D S, latency (D-1) hops (Patarin and Yuan, 2009); hierarchical (H-1)/H S after (h-1)/h S inside the host;
        pairwise h (D-h)/D S, one hop. On one host, all use the ranks' own links.
        """
        h = min(D, self.ranks_per_host)
        H = D // h
        wire, local = self.inter_host, self.intra_host
        if D == 1 or size == 0:
            return Exchange(0.0, 0.0)
        if H == 1:
            return Exchange((D - 1) / D * size, local.latency_s * (1 if self.collective == "pairwise" else D - 1))
        if self.collective == "pairwise":
            return Exchange(h * (D - h) / D * size, wire.latency_s)
        if self.collective == "ring" or h == 1:
            return Exchange((D - 1) / D * size, (D - 1) * wire.latency_s)
        inside = (h - 1) / h * size / local.rate + (h - 1) * local.latency_s
        return Exchange((H - 1) / H * size, (H - 1) * wire.latency_s + inside)

    def agreement_s(self, ranks: int) -> float:
        """An all-reduce of a few bytes among ``ranks`` ranks: up and down a binary tree."""
        link = self.inter_host if ranks > self.ranks_per_host else self.intra_host
        return 2 * (ranks - 1).bit_length() * link.latency_s if ranks > 1 else 0.0


class Exchange(NamedTuple):
    """What a collective asks of the link: bytes in each direction, and seconds in which it asks for nothing."""
    bytes: float
    delay_s: float

    def twice(self) -> "Exchange":
        return Exchange(2 * self.bytes, 2 * self.delay_s)


# profile ------------------------------------------------------------------------------------------------------------------


class Recomputed(_Model):
    """A layer whose activations are recomputed in its backward."""

    backward_s: NonNegativeFloat
    """With the forward that it repeats."""
    activation_bytes: NonNegativeFloat
    """Still kept from forward to backward: the layer's input."""


class Layer(_Model):
    """One layer and one micro-batch."""

    name: str = ""
    """Of its class or function; what "type:regex" searches, and what tells one model's profile from another's."""
    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    parameter_bytes: NonNegativeFloat
    trainable_bytes: NonNegativeFloat
    """Of ``parameter_bytes``, without those of frozen parameters."""
    parameter_count: Optional[NonNegativeInt] = None
    trainable_count: Optional[NonNegativeInt] = None
    activation_bytes: NonNegativeFloat
    """Kept from the forward to the backward, input included, parameters not, nor the output: its user counts it."""
    boundary_bytes: NonNegativeFloat
    """Of the output: what a pipeline rank would send if the model were cut behind this layer. Its gradient is as large."""
    recomputed: Optional[Recomputed] = None
    """Default: the backward repeats the forward, and the input is kept."""
    recompute_activation_bytes: Optional[NonNegativeFloat] = None
    """``recomputed.activation_bytes`` for profiles without ``recomputed``; taken from there where that is given."""

    @model_validator(mode="before")
    @classmethod
    def _one_number(cls, data):
        recomputed = data.get("recomputed") if isinstance(data, dict) else None
        kept = getattr(recomputed, "activation_bytes", None)
        if isinstance(recomputed, dict):
            kept = recomputed.get("activation_bytes")
        if kept is None:
            return data
        if data.get("recompute_activation_bytes", kept) != kept:
            raise ValueError(f"recompute_activation_bytes={data['recompute_activation_bytes']} and recomputed.activation_bytes="
                             f"{kept} are the same thing; remove one")
        return {**data, "recompute_activation_bytes": kept}

    def when_recomputed(self, input_bytes: float) -> Recomputed:
        """What it costs with its activations recomputed; ``input_bytes`` is what enters it."""
        kept = input_bytes if self.recompute_activation_bytes is None else self.recompute_activation_bytes
        return self.recomputed or Recomputed(backward_s=self.forward_s + self.backward_s, activation_bytes=kept)


class Head(_Model):
    """The loss function, on the last virtual stage."""

    forward_s: NonNegativeFloat = 0.0
    backward_s: NonNegativeFloat = 0.0
    activation_bytes: NonNegativeFloat = 0.0


class Profile(_Model):
    """Every layer of a model, measured once, in the order in which they run."""

    schema_version: Literal[1] = Field(SCHEMA, alias="schema")
    name: str = ""
    """Of the model, for people."""
    micro_batch_size: PositiveInt = 1
    """Samples of the micro-batch that was measured."""
    layers: List[Layer] = Field(min_length=1)
    head: Head = Head()
    input_bytes: NonNegativeFloat = 0.0
    """Of a micro-batch's input, what the first layer keeps if it is recomputed."""
    tied_bytes: NonNegativeFloat = 0.0
    """Of gradients of weights that the first and the last layer share, such as embeddings; part of both layers' bytes, too."""
    step_s_per_byte: NonNegativeFloat = 0.0
    """Optimizer step: seconds per byte of trainable parameters that a rank steps."""
    optimizer_bytes_per_byte: NonNegativeFloat = 2.0
    """Optimizer state per byte of trainable parameters; 2: Adam in the parameters' own precision, 6: Adam and fp32 masters of
    16-bit parameters."""
    overhead_s: NonNegativeFloat = 0.0
    """A rank's own time for each forward, backward, message sent and message received, besides the layers' times."""

    @classmethod
    def uniform(cls, layers: int, forward_s: float, backward_s: Optional[float] = None, parameter_bytes: float = 0.0,
                activation_bytes: float = 0.0, **more) -> "Profile":
        """Equal layers, whose outputs are as large as what they keep. A backward takes two forwards unless told."""
        layer = Layer(forward_s=forward_s, backward_s=2 * forward_s if backward_s is None else backward_s,
                      parameter_bytes=parameter_bytes, trainable_bytes=parameter_bytes, activation_bytes=activation_bytes,
                      boundary_bytes=activation_bytes)
        return cls(layers=[layer] * layers, input_bytes=activation_bytes, **more)

    def scaled(self, micro_batch_size: int) -> "Profile":
        """The same layers on micro-batches of another size: times and bytes of activations grow in proportion; ``overhead_s`` and
        parameters stay."""
        factor = micro_batch_size / self.micro_batch_size
        if factor == 1:
            return self

        def grown(model: _Model, *names: str) -> Dict[str, Any]:
            found = {name: getattr(model, name) for name in names}
            return {name: None if value is None else factor * value for name, value in found.items()}

        layers = [layer.model_copy(update={
            **grown(layer, "forward_s", "backward_s", "activation_bytes", "boundary_bytes", "recompute_activation_bytes"),
            "recomputed": layer.recomputed and Recomputed(**grown(layer.recomputed, "backward_s", "activation_bytes"))})
            for layer in self.layers]
        head = Head(**grown(self.head, "forward_s", "backward_s", "activation_bytes"))
        return self.model_copy(update={"micro_batch_size": micro_batch_size, "layers": layers, "head": head,
                                       "input_bytes": factor * self.input_bytes})

    def check_layers(self, count: int) -> None:
        """Refuse a profile of a model with another number of layers. Raises PlanError."""
        if count != len(self.layers):
            raise PlanError(f"{self._another_model}: it has {len(self.layers)} layers, the model {count}; {_REMEASURE}")

    @property
    def _another_model(self) -> str:
        return f"the profile{f' {self.name!r}' if self.name else ''} was measured on another model"

    def check_model(self, names: Sequence[str], parameter_counts: Sequence[int]) -> None:
        """Refuse a profile of another model than the one with these layers.

        Args:
            names, parameter_counts: of each layer, as :func:`ds_fold.plan.profile.describe_layers` finds them.

        Raises:
            PlanError: naming the first difference.
        """
        self.check_layers(len(names))
        for i, (layer, name, count) in enumerate(zip(self.layers, names, parameter_counts)):
            if layer.name and layer.name != name:
                raise PlanError(f"{self._another_model}: its layer {i} is {layer.name}, the model's {name}; {_REMEASURE}")
            if layer.parameter_count is not None and layer.parameter_count != count:
                raise PlanError(f"{self._another_model}: its layer {i} ({name}) has {layer.parameter_count} parameters, the "
                                f"model's {count}; {_REMEASURE}")

    def costs(self, cuts: Sequence[int], P: int, recompute: Collection[int] = ()) -> "Costs":
        """The costs of a fold.

        Args:
            cuts: ``[0, ..., layers]``, the v*P + 1 cuts of the virtual stages.
            P: pipeline ranks.
            recompute: indices of the layers that are recomputed.

        Raises:
            PlanError: the cuts are not ascending, do not end at the last layer, or are not v*P + 1.
        """
        n = len(self.layers)
        if cuts[0] != 0 or cuts[-1] != n or any(a >= b for a, b in zip(cuts, cuts[1:])) or (len(cuts) - 1) % P:
            raise PlanError(f"cuts {list(cuts)} must ascend from 0 to the profile's {n} layers, in a multiple of {P} chunks")
        backward, kept, whole = [], [], [layer.activation_bytes for layer in self.layers]
        for i, layer in enumerate(self.layers):
            if i in recompute:
                layer = layer.when_recomputed(self.layers[i - 1].boundary_bytes if i else self.input_bytes)
            backward.append(layer.backward_s)
            kept.append(layer.activation_bytes)
        spans = list(zip(cuts, cuts[1:]))

        def sums(values) -> List[float]:
            return [sum(values[a:b]) for a, b in spans]

        layers = [[LayerCosts(self.layers[i].forward_s, backward[i], self.layers[i].trainable_bytes) for i in range(a, b)]
                  for a, b in spans]
        # a backward goes through the layers from the last to the first and frees what it has used
        recomputing = [max(sum(kept[a:i]) + whole[i] - sum(kept[a:b]) for i in range(a, b)) for a, b in spans] if recompute else ()
        costs = Costs(P, sums([layer.forward_s for layer in self.layers]), sums(backward),
                      [self.layers[b - 1].boundary_bytes for _, b in spans], sums(kept),
                      sums([layer.parameter_bytes for layer in self.layers]),
                      sums([layer.trainable_bytes for layer in self.layers]), layers, self.tied_bytes, self.step_s_per_byte,
                      self.optimizer_bytes_per_byte, self.overhead_s, recomputing)
        costs.forward_s[-1] += self.head.forward_s
        costs.backward_s[-1] += self.head.backward_s
        costs.activation_bytes[-1] += self.head.activation_bytes
        return costs


class LayerCosts(NamedTuple):
    """Of one layer of a chunk, the head not in it."""
    forward_s: float
    backward_s: float
    trainable_bytes: float


class Costs(NamedTuple):
    """Of a folded pipeline: one entry per virtual stage ``s = k*P + r``, for one micro-batch.

    Attributes:
        P: pipeline ranks.
        forward_s, backward_s: with the head on the last virtual stage and what is recomputed.
        boundary_bytes: the output's; the last one's is not sent.
        activation_bytes: kept from forward to backward.
        parameter_bytes, trainable_bytes: of the chunk; the latter are reduced and gathered.
        layers: of each chunk.
        tied_bytes, step_s_per_byte, optimizer_bytes_per_byte, overhead_s: see :class:`Profile`.
        recompute_bytes: more than activation_bytes, at most, while a backward recomputes; empty: none.
    """
    P: int
    forward_s: List[float]
    backward_s: List[float]
    boundary_bytes: List[float]
    activation_bytes: List[float]
    parameter_bytes: List[float]
    trainable_bytes: List[float]
    layers: List[List["LayerCosts"]]
    tied_bytes: float = 0.0
    step_s_per_byte: float = 0.0
    optimizer_bytes_per_byte: float = 2.0
    overhead_s: float = 0.0
    recompute_bytes: Sequence[float] = ()

    @classmethod
    def uniform(cls, P: int, v: int, forward_s: float, backward_s: Optional[float] = None, boundary_bytes: float = 0.0,
                trainable_bytes: float = 0.0, **more) -> "Costs":
        """Equal chunks; a backward takes two forwards unless told, and what is kept is as large as the output."""
        backward_s = 2 * forward_s if backward_s is None else backward_s
        values = (forward_s, backward_s, boundary_bytes, boundary_bytes, trainable_bytes, trainable_bytes)
        layers = [LayerCosts(forward_s, backward_s, trainable_bytes)]
        return cls(P, *([value] * (v * P) for value in values), [layers] * (v * P), **more)

    def of_rank(self, values: Sequence[float], rank: int) -> float:
        """The sum of ``values`` over a pipeline rank's chunks."""
        return sum(values[rank::self.P])

    def shardable_bytes(self, s: int) -> float:
        """Of the trainable parameters of chunk s, those that ``shard_params`` releases: no tied ones."""
        return self.trainable_bytes[s] - self.tied_bytes * (s in (0, len(self.trainable_bytes) - 1))

    def optimizer_s(self, s: int, D: int, zero_stage: int) -> float:
        """Of the optimizer's step of chunk s; with ZeRO each of the D replicas steps a D-th."""
        return self.step_s_per_byte * self.trainable_bytes[s] / (D if zero_stage else 1)
