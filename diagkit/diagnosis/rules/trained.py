"""What is trained, against what is gathered and computed with, where every device is as it should be."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import OPTIMIZER, PARAMETER, OptimizerFacts


@rule("DK105", kinds=(PARAMETER,), severity="later", says=("grad_dtype",))
def dtypes_disagree(it: Subject) -> bool:
    """Wrapper and local tensor disagree in dtype or shape: a write to `.data` changed the wrapper alone

    What happens: `p.data = p.data.to(dtype)` on a DTensor parameter exchanges what the wrapper claims and never
    reaches the local tensor. Forward passes and `state_dict()` go on with the old dtype and the old bytes, so the
    cast seems to be ignored; the next backward raises "attempting to assign a gradient with dtype", because the
    gradient has the dtype of the bytes. A write of other values in the same dtype is lost as completely, raises
    nowhere and leaves no trace in any fact. A DTensor of another layout is refused on torch 2.13 ("incompatible tensor
    type"), so that shapes come apart only where the local tensor itself is exchanged.

    How to see it: `p.dtype` differs from `p._local_tensor.dtype`.

    Remedy: Cast the model before `fully_shard`, or the whole module afterwards (`model.to(dtype)`, which changes both
    and is safe, because it moves nothing); write values in place with `copy_` under `no_grad`. To mend, cast the
    module to the dtype that the bytes have.

    Call: model.float()

    Seen in: verl #2822 #1667; pytorch #117861; ms-swift #7870

    Detected by: facts, for another dtype or shape. A lost write of the same dtype shows in values alone.

    Severity: later, at backward; silent until then.
    """
    tensor = it.tensor
    readable = tensor.wrapper == "DTensor" and bool(tensor.storage_dtype) and it.home != "meta"
    return readable and (tensor.dtype != tensor.storage_dtype or not tensor.shape_agrees)


@rule("DK201", kinds=(PARAMETER,), severity="silent", follows=("DK701",))
def trained_is_not_gathered(it: Subject) -> bool:
    """The trained tensor is not the gathered one

    What happens: FSDP2 holds a parameter twice, as the tensor in the module's slot and as the flat bytes that
    all-gather reads, and both are one storage. Code that exchanges one of them (`p._local_tensor = ...`, a `set_` on
    it, `module.weight = nn.Parameter(...)` after the first forward) parts them. Every device stays right. The optimizer
    updates and `state_dict()` saves the one, forward passes compute with the other: the loss stands still. A tensor
    put into a slot is even thrown away: after the next forward FSDP2 puts its own back. Before the first forward
    nothing is lost, since lazy init takes the new tensor over.

    How to see it: `FSDPParam._sharded_param_data` and `p._local_tensor` have different storages, or the module's slot
    holds another object than `FSDPParam.sharded_param`.

    Remedy: Write values in place (`copy_` under `no_grad`, or `load_state_dict`). What must be exchanged goes through
    a call that tells FSDP2: a whole-module `_apply`, or `load_state_dict(assign=True)`, after which the optimizer is
    built anew. `dk.heal(model, optimizer)` joins parted handles, and so does exchanging the storage once more through
    the module; the trained values win.

    Call: dk.heal(model, optimizer)  # or by hand:

    model._apply(torch.clone)

    Seen in: pytorch #132721 #132954 #130530; verl #2822

    Detected by: facts, once the first forward has run.

    Severity: silent.
    """
    tensor = it.tensor
    if it.group is None or it.group.lazy_init != "done" or tensor.split or it.home != it.bytes_at:
        return False
    parted = tensor.aliased is False and not tensor.empty
    # Parted because the parameter was moved past FSDP2 is a hazard of its own: DK103b.
    moved = it.offloaded and it.home != "cpu"
    return (parted and not moved) or tensor.registered is False


@rule("DK202", kinds=(OPTIMIZER,), severity="silent", follows=("DK201", "DK203"))
def dead_optimizer(it: Subject) -> bool:
    """Dead optimizer: it holds parameters that no module has any more

    What happens: An optimizer keeps the parameter objects that it was given. `fully_shard` puts others into the
    modules; so does `load_state_dict(assign=True)`, and a no-grad forward puts gathered ones there for a while, which
    an optimizer built just then takes. The objects that it holds get no gradient: each step succeeds, does nothing,
    makes no state, and the loss stands still. Unsharded parameters kept alive so also hold the memory that sharding
    was to free.

    How to see it: `{id(p) for g in optimizer.param_groups for p in g["params"]}` against
    `{id(p) for p in model.parameters()}` while everything is sharded; after a step `len(optimizer.state)` is 0, or less
    than the number of parameters.

    Remedy: Build the optimizer last: after `fully_shard`, after a load by assignment, and while the model is sharded
    (`model.reshard()` first where a forward without backward came before). Drop the model's gradients then: the dead
    optimizer's `zero_grad()` never reached them, so that those of all its steps have piled up.

    Call: model.zero_grad()

    optimizer = type(optimizer)(model.parameters(), **optimizer.defaults)

    Seen in: accelerate #4142 #3859 #3394; SimpleTuner #1886; Megatron-LM #5790

    Detected by: facts: a parameter of the optimizer is none of any watched or FSDP2-managed model, and a live one of
    its shape wants gradients and is in no watched optimizer. An optimizer that trains some parameters only, or another
    model, is no fault.

    Severity: silent: training is dead, or part of it.
    """
    return isinstance(it.facts, OptimizerFacts) and it.facts.orphans > 0


@rule("DK203", kinds=(PARAMETER,), severity="silent")
def tie_came_apart(it: Subject) -> bool:
    """A tie came apart: two slots that shared one parameter hold different ones

    What happens: Embedding and head share one parameter; FSDP2 keeps one record for both slots. A load by assignment
    of a checkpoint that holds both names puts two tensors there: until the next forward the head is its own, then
    FSDP2 puts the shared one back and the head's values are gone. Before wrapping, `to_empty` of a plain model on meta
    gives each slot memory of its own, and from then on two matrices are trained, and saved, that were one. Where the
    two slots are wrapped in two FSDP groups, torch 2.13 refuses at the first forward ("is shared with a parameter
    already managed by another FSDP group"), and a retry then meets DK601.

    How to see it: `model.head.weight is model.embed.weight` is False.

    Remedy: Tie again after giving memory and before `fully_shard`; wrap both modules in one group
    (`fully_shard([embed, head])`, or leave both to the root); load the canonical name only, without `assign=True`.

    Call: model.head.weight = model.embed.weight

    Seen in: verl #7835 #7834; slime #915; Automodel #3708

    Detected by: facts: FSDP2's record of shared slots, or a slot that a recording has seen tied before.

    Severity: silent; a hang where only some ranks are tied, because they gather different tensors.
    """
    parted = it.past.tied and it.tensor.shares is None and it.home != "meta"
    return parted or it.tensor.shares == "apart"
