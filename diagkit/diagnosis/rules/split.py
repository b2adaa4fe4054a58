"""Parameters whose metadata and bytes, or whose two handles on the bytes, have come apart."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import PARAMETER


@rule(
    "DK101",
    kinds=(PARAMETER,),
    severity="later",
    says=("set_storage", "materialized", "grad_device", "same_device", "swap", "no_backend"),
)
def pinned_split(it: Subject) -> bool:
    """Pinned split: the metadata says accelerator, the bytes are in pinned CPU memory

    What happens: Under `CPUOffloadPolicy(pin_memory=True)` a whole-module `.to(device)` (also `.cuda()`, `.npu()`,
    or an engine's "load model to the accelerator") moves every parameter, and FSDP2's own reset then puts the bytes
    back into pinned CPU memory, since the policy asks for that. It exchanges the local tensor alone: the DTensor
    goes on saying that it is on the accelerator.

    On torch 2.9 and newer `state_dict()`, `detach()`, `.data` and `view` then raise "Attempted to set the storage of
    a tensor on device ... to a storage on different device": each makes another DTensor of the parameter, which takes
    its device from the bytes and its storage from the old wrapper, and PyTorch refuses a pair that differs. The first
    forward raises "FSDP parameters should be materialized on CPU"; after lazy init forward works, and backward raises
    "attempting to assign a gradient with device type 'cpu'". On torch 2.8 the same state is silent. `p.to(device)`
    does nothing, because the metadata is there already.

    How to see it: `p.device` says the accelerator, `p._local_tensor.untyped_storage().device` says cpu, and the local
    tensor is pinned. `repr(p)`, `is_pinned()` and `p.untyped_storage().device` look fine and prove nothing.

    Remedy: Do not move a module that is under an offload policy: its parameters belong on the CPU, and FSDP2 brings
    them to the accelerator layer by layer. Guard the move by the policy itself, not by where the first parameter
    is; `with dk.guard(model):` stops such a move and names its line. `dk.heal(model, optimizer)` mends a live model.
    By hand, move it back, then put the buffers back on the accelerator, since the way back drags them to the CPU. To
    export, take each tensor to the accelerator alone.

    Call: dk.heal(model, optimizer)  # or by hand:

    model.to("cpu")

    for b in model.buffers(): b.data = b.data.to(device)

    Seen in: verl #5995 #6188 #6463 #6604 #7077 #7103 #5390; pytorch #157209; prime-rl #1636

    Detected by: facts; any snapshot shows it. Momentary splits inside an initialisation that ends healthy are no fault.

    Severity: later; now at state_dict, at the first forward, or at backward.
    """
    tensor = it.tensor
    held = tensor.empty or (tensor.pinned is True and tensor.aliased is not False)
    # Where the policy cannot be read, pinned bytes behind one handle are proof enough of it.
    pins = it.pins or (it.policy_unknown and tensor.pinned is True)
    return pins and tensor.split and it.home == it.computes_on and it.bytes_at == "cpu" and held


@rule("DK102", kinds=(PARAMETER,), severity="silent", says=("set_storage", "grad_device", "same_device", "swap"))
def hand_made_split(it: Subject) -> bool:
    """Hand-made or inverse split: only one of wrapper and local tensor was moved

    What happens: Somebody exchanged a DTensor's local tensor, or its metadata, by itself: `p._local_tensor = ...`,
    `p.data = ...`, or an offloader that knows one of the two. What is trained, what is gathered and what the
    metadata claims are then different memory. Forward passes read the bytes that FSDP2 still holds, so they compute
    on old values without a word, once lazy init has run (before it, lazy init itself takes the new bytes over);
    `state_dict()` raises, or returns what nobody computes with.

    How to see it: Metadata device and storage device differ, and the flat bytes that all-gather reads share no
    storage with the local tensor; or the bytes are on the accelerator while the metadata says cpu.

    Remedy: Never exchange one of the two: change wrapper and local tensor together, through a module-level `_apply`
    such as `model.to(...)`, or copy values in place with `copy_`. `dk.heal(model, optimizer)` joins the handles; what
    the optimizer trained stays. By hand, put both on one device again by the means that parted them, then move the
    whole module to the CPU (on the split itself `model.to` raises "Couldn't swap"). If values were written to one side
    only, load the checkpoint again.

    Call: dk.heal(model, optimizer)

    Seen in: torch-xpu-ops #2677; pytorch #192441; vllm-omni #1888 #2021

    Detected by: facts; any snapshot shows it.

    Severity: silent (old values are computed with); now at state_dict or at backward.
    """
    return it.tensor.split and not it.tensor.empty and not pinned_split(it)


@rule("DK103a", kinds=(PARAMETER,), severity="now", says=("materialized", "grad_device", "same_device", "no_backend"))
def on_accelerator_whole(it: Subject) -> bool:
    """Wholly on the accelerator under the offload policy

    What happens: Parameters under `CPUOffloadPolicy` were moved, or loaded, to the accelerator with all they have
    (with `pin_memory=False` a whole-module `.to(device)` does this; so does `load_state_dict(assign=True)` with
    accelerator tensors). Metadata and bytes agree, so everything that looks at devices is content. The first
    forward raises "FSDP parameters should be materialized on CPU"; if lazy init ran before, backward or the
    optimizer raises instead, because FSDP2 brings gradients to the CPU.

    How to see it: Metadata and storage device are both the accelerator, the group's policy offloads, and the flat bytes
    share the local tensor's storage.

    Remedy: Build and load under the policy on the CPU: `to_empty(device="cpu")`, CPU tensors, `assign=False`. A
    live model is brought back by `dk.heal(model, optimizer)`; by hand with `.to("cpu")`, and its buffers to the
    accelerator after that.

    Call: dk.heal(model, optimizer)  # or by hand:

    model.to("cpu")

    Seen in: pytorch #135156 #126305 #139110; accelerate #3910; LlamaFactory #10318; torchtune #1495; verl #4218 #1978

    Detected by: facts. A policy with per-phase flags may rest on the accelerator rightly and is not judged.

    Severity: now at the first forward; later, at backward, once lazy init has run.
    """
    return _wholly_moved(it) and it.tensor.aliased is not False


@rule("DK103b", kinds=(PARAMETER,), severity="silent", says=("grad_device", "same_device", "materialized"))
def on_accelerator_past_reset(it: Subject) -> bool:
    """Moved past FSDP2's reset: forward passes go on reading the old bytes on the CPU

    What happens: A child that is no FSDP module itself was moved (`model.layers[0].mlp.to(device)`), so FSDP2 was
    not told. The parameter is wholly on the accelerator, but all-gather still reads the flat bytes that stayed on
    the CPU. `state_dict()` returns the new tensor, forward computes with the old one; whatever is loaded or written
    from now on changes nothing that is computed. So it is once lazy init has run; before it the first forward raises
    "FSDP parameters should be materialized on CPU".

    How to see it: Metadata and storage device are the accelerator, the flat bytes are on the CPU: they share no
    storage.

    Remedy: Move nothing under the policy. `dk.heal(model, optimizer)` brings the new bytes back and keeps them. By
    hand, move the FSDP module that owns the parameter, not the child: its `_apply` tells FSDP2, which takes the new
    bytes over.

    Call: dk.heal(model, optimizer)  # or by hand:

    model.to("cpu")

    Seen in: pytorch #135156 #126305 #139110; accelerate #3910; LlamaFactory #10318; torchtune #1495; verl #4218 #1978

    Detected by: facts; any snapshot shows it.

    Severity: silent; now at backward, where a CPU gradient meets an accelerator parameter.
    """
    return _wholly_moved(it) and it.tensor.aliased is False


def _wholly_moved(it: Subject) -> bool:
    tensor = it.tensor
    sharded = tensor.wrapper == "DTensor" and tensor.sharded_state in (None, "sharded")
    judged = it.group is not None and not it.group.policy_flags
    moved = it.home == it.bytes_at == it.computes_on != "cpu"
    return it.offloaded and judged and sharded and moved and not tensor.empty
