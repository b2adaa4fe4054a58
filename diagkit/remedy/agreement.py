"""Whether all ranks of a model are about to mend the same things.

They meet in the process group's store and not in a collective: a collective that one rank never joins ends, minutes
later, in the backend's watchdog, which takes the job down, and `hccl` or `nccl` alone can send no CPU tensor. Here a
rank that does not come costs the others a timeout, and nobody has touched anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture.meeting import decided
from diagkit.diagnosis.finding import ranks_text
from diagkit.errors import RanksDisagree

#: Patterns of names by kind of what a rank is about to mend.
Plan = Mapping[str, Sequence[str]]


def agree(models: Iterable[nn.Module], plan: Plan, seconds: float) -> None:
    """Returns where every rank of the models' meshes is about to mend the very same things; at once where there is no
    process group, or one rank. Kinds alone would not do: of two values that differ each rank keeps the trained one, and
    a parameter of which only some ranks do so is put together from parts that never belonged together.

    Raises:
        RanksDisagree: a rank did not come within ``seconds``, or would mend other things.
    """
    ranks = ranks_of(models)
    mine, _ = internals.rank_and_world()
    if mine not in ranks or len(ranks) == 1:
        return

    def judge(found: Mapping[int, bytes]) -> bytes:
        return json.dumps({rank: json.loads(payload) for rank, payload in found.items()}).encode()

    topic = "heal/" + "-".join(map(str, ranks))
    answer = decided(topic, json.dumps(plan).encode(), ranks, judge, seconds)
    plans: dict[int, Plan] = {int(rank): one for rank, one in json.loads(answer).items()} if answer else {mine: plan}
    absent = [rank for rank in ranks if rank not in plans]
    if absent:
        raise RanksDisagree(
            "not all ranks called heal, so nothing was touched",
            found=f"no word within {seconds:g} s from rank {ranks_text(tuple(absent), len(ranks))}",
            expected="one call on every rank of the model",
            remedy="Call it on all ranks, or with alone=True on those that need it",
        )
    if any(one != plan for one in plans.values()):
        raise RanksDisagree(
            "the ranks would mend different things, so nothing was touched",
            found="; ".join(f"rank {rank}: {one}" for rank, one in sorted(_differences(plans).items())),
            expected="the same on every rank",
            remedy="Find out why they differ (dk.inspect on each); alone=True lets each rank mend what it finds",
        )


def _differences(plans: Mapping[int, Plan]) -> dict[int, str]:
    """What each rank would mend, in words: kinds, and names only where it is by them alone that the ranks differ."""
    if len({tuple(sorted(plan)) for plan in plans.values()}) > 1:
        return {rank: ", ".join(plan) or "nothing" for rank, plan in plans.items()}
    parted = [kind for kind in next(iter(plans.values())) if len({tuple(plan[kind]) for plan in plans.values()}) > 1]
    return {rank: ", ".join(f"{kind} {_some(plan[kind])}" for kind in parted) for rank, plan in plans.items()}


def _some(names: Sequence[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (" ..." if len(names) > shown else "")


def ranks_of(models: Iterable[nn.Module]) -> list[int]:
    """The ranks of the meshes on which the models' groups live, in order."""
    found: set[int] = set()
    for model in models:
        for _, _, state in internals.fsdp_states(model):
            for group in internals.state_groups(state):
                mesh = internals.group_mesh(group)
                found.update(map(int, mesh.mesh.flatten().tolist()) if mesh is not None else ())
    return sorted(found)
