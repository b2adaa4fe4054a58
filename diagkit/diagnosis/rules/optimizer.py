"""Optimizer state apart from its parameters."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import OPTIMIZER_STATE, device_type


@rule("DK302", kinds=(OPTIMIZER_STATE,), severity="now", says=("same_device",), follows=("DK102", "DK103a", "DK103b"))
def stranded_state(it: Subject) -> bool:
    """Optimizer state on the wrong device

    What happens: Moments were moved, or loaded, to another device than their parameter's bytes. An engine that
    loads the optimizer to the accelerator by hand does this under the offload policy, and
    `optimizer.load_state_dict()` does it while the parameters are split: it casts to the device that the wrapper
    claims. The next step raises "Expected all tensors to be on the same device". A `step` counter on the
    accelerator of an optimizer that is neither fused nor capturable does not raise: each step then waits for the
    device.

    How to see it: The storage device of `exp_avg` (or its like) differs from that of the parameter; or
    `state["step"]` is not on the CPU.

    Remedy: Under the policy leave the optimizer alone: its state is born on the CPU, where the parameters are. Mend
    by moving the entries to their parameter's bytes, as `dk.heal(model, optimizer)` does, and load optimizer state
    only into a healthy model.

    Call: dk.heal(model, optimizer)  # or by hand:

    for p, s in optimizer.state.items(): s.update({k: v.to("cpu") for k, v in s.items()})

    Seen in: UniRL #441; prime-rl #2729; pytorch #144397 #117476

    Detected by: facts. Without the policy, state that an engine parked on the CPU is a fault only when a step fails.

    Severity: now, at the optimizer step; slow for the step counter.
    """
    if it.owner is None or it.owner.storage_device is None or it.bytes_at in (None, "meta") or it.tensor.empty:
        return False
    if it.part == "step":  # born beside its parameter, if the optimizer is fused or capturable, and else on the CPU
        return it.bytes_at != "cpu" and it.offloaded and device_type(it.owner.storage_device) == "cpu"
    parked = not it.offloaded and "same_device" not in it.world.said
    apart = not it.tensor.split and it.bytes_at != device_type(it.owner.storage_device)
    return apart and not parked and not rehomed_by_factory(it)


@rule("DK303", kinds=(OPTIMIZER_STATE,), severity="later", says=("same_device",))
def split_state(it: Subject) -> bool:
    """Split inside optimizer state: a state's metadata and bytes are on different devices, parameters are healthy

    What happens: An offloader exchanges the local tensors of the optimizer's DTensors (`value._local_tensor = ...`) to
    save accelerator memory, and does not, or not everywhere, put them back. `state_dict()`, `get_optimizer_state_dict`
    and `deepcopy` work and save the right values, everything that asks `value.device` is content, and the next step
    raises "Expected all tensors to be on the same device".

    How to see it: `value.device` differs from `value._local_tensor.untyped_storage().device` for values of
    `optimizer.state`.

    Remedy: Move whole entries: `state[name] = value.to(device)`. To mend, give each local tensor back to the device
    that its wrapper names, by the means that took it away. `dk.heal(model, optimizer)` does so on the CPU, where the
    parameters under the policy are.

    Call: dk.heal(model, optimizer)  # or by hand:

    for s in optimizer.state.values(): s.update({k: v.clone().to(v.device) for k, v in s.items()})

    Seen in: prime-rl #1694; Megatron-LM #4623

    Detected by: facts, at a live look, a failure, a mark and the end of a recording; in between a recorder knows a
    state by its object, which is still the same one.

    Severity: later: the next step.
    """
    healthy = it.owner is not None and not it.owner.split
    return healthy and it.tensor.split and not it.tensor.empty


@rule("DK401", kinds=(OPTIMIZER_STATE,), severity="now", says=("same_device", "sharding"))
def rehomed_by_factory(it: Subject) -> bool:
    """A factory re-homed the DTensor: state built from a shard sits on the mesh's device, or has the wrong shape

    What happens: An optimizer builds its state with `DTensor.from_local(torch.zeros_like(p.to_local()), mesh,
    placements)`. `from_local` brings a CPU shard to the mesh's device, where the offload policy has no parameter: the
    step raises "Expected all tensors to be on the same device". And it takes the shard's size times the ranks for
    the global shape: where shards are uneven, ranks believe in different shapes, and the step raises that it cannot
    broadcast, or communicates tensors of different sizes.

    How to see it: The state appears in the step, on the mesh's device, while its parameter is on the CPU; or
    `state.shape` differs from `p.shape` while the local shapes are equal.

    Remedy: `torch.zeros_like(p)` keeps device, layout and shape. Where `from_local` must be, pass `shape=p.shape,
    stride=p.stride()` and move the result back to the device of the parameter's bytes.

    Call: optimizer.state.clear()  # and build it with zeros_like

    Seen in: pytorch/ao #1931 #2195; axolotl #3977; pytorch #126795

    Detected by: facts; that a step made it is known in a recording alone, a live look tells of DK302.

    Severity: now, in the step that builds it.
    """
    if it.owner is None or it.tensor.wrapper != "DTensor" or it.tensor.split:
        return False
    born_there = it.past.born == "Optimizer.step" and it.offloaded and device_type(it.owner.storage_device) == "cpu"
    rehomed = born_there and it.home == it.bytes_at == it.computes_on != "cpu"
    return rehomed or not it.tensor.shape_agrees
