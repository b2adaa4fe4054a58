"""FSDP2's own bookkeeping after an exception passed through it. Every device looks healthy."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import GROUP, GroupFacts


@rule("DK601", kinds=(GROUP,), severity="now", says=("param_dtype",), follows=("DK101", "DK103a", "DK104", "DK203"))
def poisoned_lazy_init(it: Subject) -> bool:
    """Poisoned lazy init: the first forward failed half-way, and each retry fails for another reason

    What happens: FSDP2 initialises itself in the first forward. If that raises (split or moved parameters do it),
    the root is marked as initialised and some parameters never got their dtypes. In a notebook or a retry loop the
    cause is mended, the forward runs again, and fails with "'FSDPParam' object has no attribute 'param_dtype'",
    which says nothing of the cause.

    How to see it: The root mark is set, and a parameter of some group has no `param_dtype`. Devices may be healthy.

    Remedy: Believe the first error, not this one. `dk.heal(model, optimizer)` mends what it names, and resets every
    state's root mark and shared context so that lazy init runs anew; or build the model again.

    Call: dk.heal(model, optimizer)

    Seen in: follows DK101 and DK103 in any notebook or retry loop

    Detected by: facts.

    Severity: now, and misleading.
    """
    return isinstance(it.facts, GroupFacts) and it.facts.lazy_init == "unfinished"


@rule("DK602", kinds=(GROUP,), severity="silent", says=("mixed", "gathered"), follows=("DK604",))
def sharded_state_confused(it: Subject) -> bool:
    """Sharded-state confusion: parameters were used or written in the other state than they are in

    What happens: A parameter is sharded at rest and gathered for a pass, and after a no-grad forward the root's stay
    gathered. An `optimizer.step()` just then, an evaluation between backward and step will do, writes the shards; the
    next forward finds its parameters gathered and computes with the old weights. So does every step where
    `set_reshard_after_backward(False)` is never set back. A direct in-place write does the same and is not seen. Loads
    are safe: state-dict hooks shard first. The reverse raises: a method other than `forward`, or a child called by
    itself, meets shards ("got mixed torch.Tensor and DTensor"), and `p.full_tensor()` meets a plain gathered parameter
    ("'Parameter' object has no attribute 'full_tensor'").

    How to see it: The group's `_sharded_state` is not SHARDED when the optimizer steps; `type(module.weight)` is
    `Parameter`, not `DTensor`.

    Remedy: Call `reshard()` on the root and on every group kept gathered before a step, and before parameters are read.
    Methods beside `forward` are registered (`register_fsdp_forward_method`), children are called through the root.

    Call: model.reshard()

    Seen in: pytorch #144289 #153354; transformers #42436; trl #4550; verl #4974

    Detected by: facts that a recording takes at the optimizer's step; exceptions at a live look.

    Severity: silent for a write; now for a failed access.
    """
    facts = it.facts
    if not isinstance(facts, GroupFacts) or not facts.parameters:
        return False
    said = it.world.said
    if "gathered" in said and facts.sharded_state != "sharded":
        return True
    # In a recording such an exception may as well be a mix-up of somebody's own tensors, far from any module.
    passing = any(group.backward_pending or group.training_state != "idle" for group in it.world.groups)
    outside = "mixed" in said and it.world.live and facts.sharded_state == "sharded" and not passing
    return facts.stale or outside


@rule("DK604", kinds=(GROUP,), severity="silent", says=("mixed",), follows=("DK105",))
def aborted_backward(it: Subject) -> bool:
    """Aborted backward: gradients no longer reach the optimizer

    What happens: An exception passed through backward, FSDP2's or your own. The root still believes that its final
    callback is queued, so no later backward queues it, and groups stay gathered in the middle of a pass. Devices are
    healthy, forward and backward passes seem to work, and the optimizer's parameters get no gradient: training goes
    on and learns nothing. Groups whose pass had not begun may deliver once more, so the first step after the
    exception can still look alive; up to torch 2.10 the next forward may raise "got mixed torch.Tensor and DTensor",
    later ones are silent. Meanwhile the gathered parameters pile up gradients that nobody collects.

    How to see it: The root's final callback is marked as queued, or a group is in `post_backward`, while no backward
    is running; after the next backward `p.grad is None` for the parameters that the optimizer holds. The module's own
    slots hold the gathered parameters, whose gradients look fine and prove nothing.

    Remedy: `dk.heal(model, optimizer)`, on every torch; then do the step anew from its first micro-batch. By hand, drop
    the piled-up gradients while the gathered parameters are still in their slots, then reset FSDP2's iteration state
    (torch 2.13 has a method for that on the root). The order matters: without the first line the next step takes the
    old gradients in. Or build the model again.

    Call: dk.heal(model, optimizer)  # or by hand:

    model.zero_grad(); optimizer.zero_grad()

    model.reset_iter_state()

    Seen in: any exception in backward that a notebook or a retry loop survives

    Detected by: facts, while no backward is running.

    Severity: silent: training is dead.
    """
    facts = it.facts
    if not isinstance(facts, GroupFacts) or facts.backward_running:
        return False
    return facts.backward_pending or facts.training_state == "post_backward"
