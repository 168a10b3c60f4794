"""Where layers go and which are recomputed, for a ds_config that leaves this to a profile: what a module asks when it is built."""

from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence

from .costs import Cluster, PlanError, Profile
from .memory import States, half_precision, reduced_bytes
from .partition import Chain, check_memory, free_cluster, search

#: of recompute "auto" without an objective's partition
DEFAULT_OBJECTIVE = "memory_efficiency"


class Placement(NamedTuple):
    """The v*P + 1 cuts of the layers, which layers are recomputed, and a line for people."""
    cuts: List[int]
    recomputed: FrozenSet[int]
    summary: str


def simulation_options(config: Dict[str, Any], fold, zero_stage: int, D: int) -> Dict[str, Any]:
    """What :func:`~ds_fold.plan.simulate.simulate` has to know of a ds_config and its typed ``ds_fold`` block."""
    own = fold.owns_optimizer(zero_stage, half_precision(config) is not None)
    return {"D": D, "zero_stage": zero_stage, "stock_optimizer": not own, "by_layer": fold.overlap_grad_reduce == "layer",
            "states": States.of_config(config, zero_stage, D, own), "reduced": reduced_bytes(config)}


def load_profile(fold, check: Callable[[Profile], None] = lambda profile: None, micro_batch_size: Optional[int] = None) -> Profile:
    """The profile that the block names; ``check`` refuses that of another model, ``micro_batch_size`` is the training's.

    Raises:
        PlanError: naming the file, what differs and the remedy.
    """
    profile = Profile.load(fold.profile_path)
    try:
        check(profile)
    except PlanError as error:
        raise PlanError(f"{fold.profile_path}: {error}") from None
    if micro_batch_size is not None and micro_batch_size != profile.micro_batch_size:
        raise PlanError(f"{fold.profile_path}: micro-batches of {profile.micro_batch_size} were measured, but "
                        f"train_micro_batch_size_per_gpu={micro_batch_size}; measure again: python -m ds_fold profile")
    return profile


def load_cluster(fold, ranks: int) -> Cluster:
    """The cluster that the block names; without a name, communication is free and memory has no limit. Raises PlanError."""
    return Cluster.load(fold.cluster_path) if fold.cluster_path else free_cluster(ranks)


def place(fold, profile: Profile, cluster: Cluster, P: int, M: int, zero_stage: int, options: Dict[str, Any],
          cuts: Optional[Sequence[int]] = None, recompute_all: bool = False) -> Placement:
    """Search for what the ``ds_fold`` block leaves open.

    Args:
        fold: the typed block.
        profile, cluster: what layers and transfers take.
        P, M, zero_stage: pipeline ranks, micro-batches, ZeRO stage.
        options: of :func:`simulation_options`, which have the number of replicas.
        cuts: the partition; None where it has an objective.
        recompute_all: each layer is recomputed whatever the block says (DeepSpeed's activation_checkpoint_interval).

    Raises:
        PlanError: the cluster is too small, or no partition fits into its memory: by how much.
    """
    cluster.check(P, options["D"])
    n = len(profile.layers)
    if recompute_all:
        recompute: Optional[FrozenSet[int]] = frozenset(range(n))
    else:
        recompute = None if fold.recompute == "auto" else fold.recomputed(n)
    objective = fold.objective or DEFAULT_OBJECTIVE
    chain = Chain(fold.train_program(P, M, zero_stage), profile, cluster, objective, **options)
    found, recomputed, score = search(chain, cuts, recompute)
    check_memory(chain, found, recomputed)
    summary = (f"for {objective}: step {1e3 * score.step_s:.1f} ms, fullest rank {score.peak_bytes / 2**20:.1f} MiB, "
               f"{len(recomputed)} of {n} layers recomputed, as simulated")
    return Placement(list(found), recomputed, summary)
