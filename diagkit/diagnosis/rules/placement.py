"""Who decides where things are: code that asks a parameter, and parts of a model that follow different rules."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import GROUP, PARAMETER, GroupFacts


@rule("DK404", kinds=(PARAMETER,), severity="now", says=("same_device",), rests=False)
def device_taken_from_a_parameter(it: Subject) -> bool:
    """Device taken from a parameter: under the offload policy a parameter is on the CPU, what it computes is not

    What happens: Code asks `next(model.parameters()).device` for the device to work on. Under `CPUOffloadPolicy` that
    says cpu, rightly: parameters rest there. Inputs sent there do no harm, because FSDP2's root brings them to the
    accelerator; what meets the model's outputs does: labels in a loss, tokens to append to, a mask made beside the
    model. It raises "Expected all tensors to be on the same device" in code that has nothing to do with FSDP2, and
    the model has no fault at all. Tried again it may work, since a no-grad forward leaves the root's parameters
    gathered, which say the accelerator until something shards them.

    How to see it: Every parameter is where it belongs, and a function that the exception passed takes a device from a
    parameter.

    Remedy: Ask for the device of the computation: `torch.accelerator.current_accelerator()`, the mesh's
    `device_type`, or the device of the outputs themselves.

    Call: device = torch.accelerator.current_accelerator()

    Seen in: ms-swift #9844; sglang #33864; xDiT #715

    Detected by: the exception: the source of the functions that it passed. A device handed down from elsewhere (a
    `model.device` property) is not seen.

    Severity: now, where outputs meet what was put beside the parameters.
    """
    failure = it.world.failure
    asked = failure is not None and bool(failure.asks) and "same_device" in it.world.said
    return asked and it.offloaded and it.home == it.bytes_at == "cpu" != it.computes_on


@rule("DK802a", kinds=(GROUP,), severity="later", says=("several_devices",))
def policies_disagree(it: Subject) -> bool:
    """Groups disagree: some FSDP groups of a model offload to the CPU, some do not

    What happens: `fully_shard` was called with `offload_policy` for some modules and without it for others. Training is
    right, bit for bit, and so are clipping and plain state dicts: each group knows its own place. What takes the model
    for one thing fails: `set_model_state_dict(..., broadcast_from_rank0=True)` raises "Multiple devices found", its
    counterpart for optimizers "Device mismatch". Code that guards whole-module moves by a look at the first parameter
    decides by chance.

    How to see it: `offload_policy` differs between the model's groups.

    Remedy: One policy for every `fully_shard` of a model. What must not be sharded or offloaded is named in
    `ignored_params`. Where the mixture is meant, load each part with its own `set_model_state_dict`.

    Seen in: pytorch #148242 #149074; Lightning #18613

    Detected by: facts.

    Severity: later: the next load that broadcasts from rank 0.
    """
    return isinstance(it.facts, GroupFacts) and it.facts.parameters > 0 and it.model in it.world.mixed


@rule("DK802b", kinds=(PARAMETER,), severity="now", says=("same_device",))
def registered_after_wrapping(it: Subject) -> bool:
    """A plain CPU parameter was registered after wrapping

    What happens: An adapter, a new head or a bias was put into a module that `fully_shard` had already taken over.
    FSDP2 knows nothing of it: it is neither sharded nor brought to the accelerator, and its gradient is reduced
    over no ranks. The forward that uses it raises "Expected all tensors to be on the same device".

    How to see it: The parameter is no DTensor, and `p.device` is cpu beside a mesh of the accelerator's.

    Remedy: Change the model before `fully_shard`. What is added later has to be wrapped itself (a module of its own:
    `fully_shard(adapter)`), or be put on the accelerator and its gradient reduced by hand.

    Seen in: pytorch #148242 #149074; Lightning #18613

    Detected by: facts of a recording that saw it come; at a live look the exception. Parameters that `ignored_params`
    names are there before, and no fault.

    Severity: now, at the forward that uses it.
    """
    unmanaged = it.tensor.wrapper == "Tensor" and it.tensor.sharded_state is None and it.group is not None
    beside = it.home == it.bytes_at == "cpu" and it.computes_on not in (None, "cpu")
    return unmanaged and beside and (it.past.late or "same_device" in it.world.said)
