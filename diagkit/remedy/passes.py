"""Mends FSDP2's own bookkeeping after an exception passed through it."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from diagkit import torch_internals as internals
from diagkit.remedy.look import Look, Tree
from diagkit.remedy.mend import Act, Mend, answers
from diagkit.torch_internals import writers
from diagkit.trace.schema import GroupFacts


def end_passes(look: Look) -> Mend | None:
    """Passes that an exception broke off: groups not idle though nothing runs, or a final callback still queued."""
    acts: list[tuple[str, Act]] = []
    names: list[str] = []
    for root, state, tree in look.trees():
        stuck = [name for name, inner, facts in tree if _passes(inner, facts)]
        if stuck:
            acts.append((type(root).__name__, functools.partial(_end_pass, root, state, _in_backward(tree))))
            names += dict.fromkeys(stuck)
    if not acts:
        return None
    if any(_in_backward(tree) for *_, tree in look.trees()):
        what, outcome = "a backward pass", "over; groups idle and sharded, its gradients dropped"
        notes: tuple[str, ...] = ("the step that broke off must be done anew, from its first micro-batch",)
    else:
        what, outcome, notes = "a forward pass", "over; groups idle and sharded", ()
    subject = f"{what} that an exception broke off"
    return Mend("pass", subject, outcome, tuple(acts), answers(look, "pass"), notes, tuple(names))


def broken_off(look: Look) -> set[int]:
    """Ids of the parameters whose backward pass broke off: what gradients they have are parts of one."""
    return {
        id(record.sharded_param)
        for *_, tree in look.trees()
        if _in_backward(tree)
        for _, inner, _ in tree
        for group in internals.state_groups(inner)
        for record in internals.group_params(group)
    }


def _in_backward(tree: Tree) -> bool:
    return any("backward" in one for _, inner, facts in tree for one in _passes(inner, facts))


def _passes(state: Any, facts: GroupFacts) -> set[str]:
    """Of which passes a group or its state believes to be in the middle."""
    queued = {"backward"} if facts.backward_pending else set()
    return ({internals.training_state(state), facts.training_state or "idle"} | queued) - {"idle"}


def _end_pass(root: nn.Module, state: Any, backward: bool) -> None:
    states = [inner for _, _, inner in internals.fsdp_states(root)]
    if backward:
        for group in [group for inner in states for group in internals.state_groups(inner)]:
            writers.drop_gathered_gradients(group)
    writers.end_pass(state, states)
    if backward:  # some parameters got theirs before it broke off, others did not
        for parameter in root.parameters():
            parameter.grad = None


def repeat_lazy_init(look: Look) -> Mend | None:
    """A first forward pass that failed half-way through FSDP2's initialisation."""
    acts = [
        (type(root).__name__, functools.partial(writers.forget_lazy_init, [inner for _, inner, _ in tree]))
        for root, _, tree in look.trees()
        if any(facts.lazy_init == "unfinished" for _, _, facts in tree)
    ]
    outcome = "runs anew in the next forward pass"
    return Mend("lazy init", "FSDP2's lazy init", outcome, tuple(acts), answers(look, "lazy init")) if acts else None
