"""A state in a few words: the facts of a rank at one moment, reduced to what decides what the next operation does.

These words are the keys of the measured tables, so a live model, a trace and a measurement all speak of a state alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from diagkit.diagnosis.layout import registered_late
from diagkit.trace import RankTrace
from diagkit.trace.schema import (
    BUFFER,
    GRADIENT,
    GROUP,
    OPTIMIZER_STATE,
    PARAMETER,
    GroupFacts,
    Moment,
    OptimizerFacts,
    Residency,
    Row,
    device_type,
)


@dataclass(frozen=True, slots=True)
class Facets:
    """What decides. Where parameters differ among themselves, the worst of them speaks."""

    #: "none", "pinned", "unpinned", "mixed" (groups of one model differ); "no FSDP2" without groups
    policy: str = "none"
    #: "home", "parked", "split", "hand split", "moved", "past reset", "meta", "unmanaged" (plain on the CPU, registered
    #: after wrapping); with every device right: "detached" (from what is gathered), "other dtype" (the wrapper's),
    #: "stale" (written while gathered), "pin lost"
    parameters: str = "home"
    lazy_init: str = "no"  # "no", "done", "unfinished"
    backward: str = "idle"  # "idle", "aborted"
    gradients: str = "none"  # "none", "home", "stranded"
    optimizer: str = "empty"  # "empty", "home", "stranded", "split", "dead"
    buffers: str = "home"  # "home" (with the computation, or none), "cpu", "meta"
    ranks: str = "one"  # "one", "cpu backend", "no cpu backend"

    def distance(self, other: Facets) -> int:
        """How unlike two states are; facets that decide more weigh more."""
        weights = {
            "ranks": 1,
            "optimizer": 2,
            "buffers": 3,
            "gradients": 3,
            "backward": 20,
            "lazy_init": 40,
            "parameters": 200,
            "policy": 100,
        }
        mine, theirs = asdict(self), asdict(other)
        if {self.optimizer, other.optimizer} & {"split", "dead"}:
            weights["optimizer"] = 20
        if "mixed" in (self.policy, other.policy):  # not measured: its offloaded groups do what they do elsewhere
            weights["policy"] = 10
        return sum(weight for name, weight in weights.items() if mine[name] != theirs[name])

    def __str__(self) -> str:
        offload = {"none": "no offload policy", "no FSDP2": "no FSDP2"}.get(
            self.policy, f"offload policy, {self.policy}"
        )
        words = [offload, f"parameters {self.parameters}", f"lazy init {self.lazy_init}"]
        usual = Facets()
        words += [
            f"{name} {value}"
            for name, value in asdict(self).items()
            if name in ("backward", "gradients", "optimizer", "buffers") and value != getattr(usual, name)
        ]
        return ", ".join(words)


# From what decides most to what decides least.
_PARAMETERS = (
    *("meta", "split", "hand split", "moved", "past reset", "unmanaged"),
    *("detached", "other dtype", "stale", "pin lost", "parked", "home"),
)


_POLICIES = ("mixed", "pinned", "unpinned", "none")


def facets(rank: RankTrace, moment: Moment | int = -1) -> Facets:
    """The state of a rank right after a moment (default: the last), in facets."""
    if not rank.moments:
        return Facets(policy="no FSDP2")
    numbers = rank.state(moment).facts
    pairs = [(row, rank.facts[numbers[row.id]]) for row in rank.rows]
    groups = [f for row, f in pairs if row.kind == GROUP and isinstance(f, GroupFacts)]
    tensors = [(row, f) for row, f in pairs if isinstance(f, Residency)]
    where = {row.id: f for row, f in tensors}
    policies = _policies(pairs)
    computes = _computes(groups, rank)
    lazy = _lazy(groups)
    stale = {"stale"} if any(g.stale for g in groups) else set()
    late = registered_late(rank.rows)
    parameters = {
        "unmanaged"
        if row.id in late and _plain(f, computes)
        else _parameter(f, policies.get(row.model), computes, lazy)
        for row, f in tensors
        if row.kind == PARAMETER
    }
    return Facets(
        policy=_first_of(_POLICIES, set(policies.values()), "no FSDP2"),
        parameters=_first_of(_PARAMETERS, parameters | stale, "home"),
        lazy_init=lazy,
        backward="aborted" if any(_aborted(g) for g in groups) else "idle",
        gradients=_beside([(f, where.get(row.of or 0)) for row, f in tensors if row.kind == GRADIENT], "none"),
        optimizer=_optimizer(
            [f for _, f in pairs if isinstance(f, OptimizerFacts)],
            [
                (f, where.get(row.of or 0))
                for row, f in tensors
                if row.kind == OPTIMIZER_STATE and not row.part.endswith("step")
            ],
        ),
        buffers=_buffers([f for row, f in tensors if row.kind == BUFFER], computes),
        ranks=_ranks(groups, rank.header.torch),
    )


def _policies(pairs: Sequence[tuple[Row, object]]) -> dict[str, str]:
    """The policy of each model that has groups, by its label."""
    of_model: dict[str, list[GroupFacts]] = {}
    for row, facts in pairs:
        if row.kind == GROUP and isinstance(facts, GroupFacts):
            of_model.setdefault(row.model, []).append(facts)
    return {model: _policy(groups) for model, groups in of_model.items()}


def _policy(groups: Sequence[GroupFacts]) -> str:
    if len({g.offload for g in groups if g.parameters}) > 1:
        return "mixed"
    offloading = [g for g in groups if g.offload]
    if not offloading:
        return "no FSDP2" if all(g.policy in ("", "NoneType") for g in groups) else "none"
    return "pinned" if any(g.pin_memory for g in offloading) else "unpinned"


def _computes(groups: Sequence[GroupFacts], rank: RankTrace) -> str | None:
    accelerator = None if rank.header.device == "cpu" else rank.header.device
    return (groups[0].mesh_device if groups else None) or accelerator


def _plain(facts: Residency, computes: str | None) -> bool:
    """On the CPU, no group's, beside an accelerator."""
    unmanaged = facts.wrapper == "Tensor" and facts.sharded_state is None
    return unmanaged and facts.storage_device == "cpu" and computes not in (None, "cpu")


def _parameter(facts: Residency, policy: str | None, computes: str | None, lazy: str) -> str:
    metadata, storage = device_type(facts.metadata_device), device_type(facts.storage_device)
    if metadata == "meta":
        return "meta"
    if facts.split:
        whole = facts.empty or (facts.pinned is True and facts.aliased is not False)
        pinning = policy in ("pinned", "mixed") and metadata == computes and storage == "cpu"
        return "split" if pinning and whole else "hand split"
    apart = facts.aliased is False and not facts.empty
    if policy in ("pinned", "unpinned") and storage != "cpu" and facts.wrapper == "DTensor" and not facts.empty:
        return "past reset" if apart else "moved"
    if lazy == "done" and (apart or facts.registered is False):  # before, lazy init takes the new tensor over
        return "detached"
    if facts.wrapper == "DTensor" and (facts.dtype != facts.storage_dtype or not facts.shape_agrees):
        return "other dtype"
    if policy == "pinned" and facts.flat_device == "cpu" and facts.flat_pinned is False and not facts.empty:
        return "pin lost"
    if policy in ("pinned", "unpinned", "mixed"):
        return "home"
    return "parked" if storage == "cpu" and computes not in (None, "cpu") else "home"


def _first_of(order: Sequence[str], words: set[str], nothing: str) -> str:
    return next((word for word in order if word in words), nothing)


def _lazy(groups: Sequence[GroupFacts]) -> str:
    found = {g.lazy_init for g in groups}
    return next((word for word in ("unfinished", "no", "done") if word in found), "no")


def _aborted(group: GroupFacts) -> bool:
    return not group.backward_running and (group.backward_pending or group.training_state == "post_backward")


def _beside(pairs: Iterable[tuple[Residency, Residency | None]], nothing: str) -> str:
    found = {
        "stranded" if device_type(f.storage_device) != device_type(owner.storage_device) else "home"
        for f, owner in pairs
        if owner is not None and owner.storage_device is not None and not f.empty
    }
    return "stranded" if "stranded" in found else nothing if not found else "home"


def _optimizer(optimizers: Iterable[OptimizerFacts], pairs: Sequence[tuple[Residency, Residency | None]]) -> str:
    if any(facts.orphans for facts in optimizers):
        return "dead"
    # Beside a split parameter a state that is split as well follows it.
    split = any(f.split and not f.empty and owner is not None and not owner.split for f, owner in pairs)
    return "split" if split else _beside(pairs, "empty")


def _buffers(buffers: Sequence[Residency], computes: str | None) -> str:
    places = {device_type(f.storage_device or f.metadata_device) for f in buffers}
    return "meta" if "meta" in places else "cpu" if "cpu" in places and computes not in (None, "cpu") else "home"


def _ranks(groups: Sequence[GroupFacts], torch: str) -> str:
    lacking = any(
        g.backends and "cpu" not in {part.partition(":")[0] for part in g.backends.split(",")} for g in groups
    )
    return among(max((g.mesh_size for g in groups), default=1), not lacking, torch)


def among(size: int, cpu_backend: bool, torch: str) -> str:
    """The facet ``ranks`` for so many; a torch that is not known is a new one."""
    if size <= 1 and (cpu_backend or not asks_backend(size, release(torch) or (2, 10))):
        return "one"
    return "cpu backend" if cpu_backend else "no cpu backend"


def asks_backend(size: int, torch: tuple[int, ...]) -> bool:
    """Whether a collective of so many ranks asks its group for a backend: before torch 2.10 even one rank alone."""
    return size > 1 or torch < (2, 10)


def release(version: str) -> tuple[int, ...]:
    """
    >>> release("2.13.0+cpu")
    (2, 13, 0)
    """
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())
