"""What an engine believes about offload, against what its module does."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import ENGINE, EngineFacts


@rule("DK603", kinds=(ENGINE,), severity="now", says=("materialized", "grad_device", "same_device"), rests=False)
def two_owners(it: Subject) -> bool:
    """Two owners of placement: the offload policy, and an engine that moves the model by hand

    What happens: `CPUOffloadPolicy` and the engine's own `param_offload` or `optimizer_offload` are on together.
    FSDP2 keeps the parameters on the CPU, and the engine loads them to the accelerator around each operation.
    Saving and exporting may be guarded; the train context seldom is, so the first train step fails, and a retry
    fails differently.

    How to see it: The engine's offload flags are True while its module's FSDP groups offload by policy.

    Remedy: Let one of them own placement. With the policy, set `param_offload` and `optimizer_offload` to False.

    Seen in: verl #2822 #7804; slime #915; VeOmni #642

    Detected by: facts of the engine, before anything failed: at a live look, or where a phase begins that moves by
    hand. Saves and loads that such an engine guards are no fault.

    Severity: now, at the first train step.
    """
    facts = it.facts
    if not isinstance(facts, EngineFacts) or not it.world.offloads:
        return False
    due = it.world.expects("train", "eval", "move") or bool(it.world.said)
    return due and "True" in (facts.offload_param, facts.offload_optimizer)


@rule("DK901", kinds=(ENGINE,), severity="later", rests=False)
def flag_disagrees(it: Subject) -> bool:
    """The engine's flag disagrees with its module

    What happens: An engine decides by a flag of its own (`_uses_fsdp2_cpu_offload_policy`) whether a whole-model
    move is safe. The flag is missing, because a subclass does not call the `__init__` that sets it, or is False
    although the module's groups offload by policy. The guard that was meant to protect save and export does not,
    and they split the parameters.

    How to see it: The engine's code reads the flag, the instance has none or has False, and the groups' policy is
    `CPUOffloadPolicy`.

    Remedy: Set the flag from the policy itself, where the policy is made; read it with a default. The flag alone does
    nothing for a save or an export that does not ask it: such an operation needs the guard as well (for verl's FSDP
    engine, export asks since #6463 and save since #6604; for its VeOmni engine both since #7103).

    Call: engine._uses_fsdp2_cpu_offload_policy = True  # helps only where save and export ask for it

    Seen in: verl #6604 #7103

    Detected by: facts of the engine, before anything failed: at a live look, or where a save or an export begins. An
    engine whose code knows no such flag has none to disagree.

    Severity: later: the next save or export.
    """
    facts = it.facts
    if not isinstance(facts, EngineFacts) or not it.world.offloads:
        return False
    return it.world.expects("save", "export") and facts.reads_policy_flag and facts.uses_policy_flag != "True"
