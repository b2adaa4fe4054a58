"""The sentences in which findings tell what was seen. Facts in, words out."""

from __future__ import annotations

from collections.abc import Iterator

from diagkit.diagnosis.judge import Hit
from diagkit.diagnosis.moments import is_look
from diagkit.trace import RankTrace
from diagkit.trace.patterns import compress
from diagkit.trace.schema import (
    BUFFER,
    EXIT,
    EXPORT,
    GRADIENT,
    GROUP,
    OPTIMIZER_STATE,
    PARAMETER,
    EngineFacts,
    Facts,
    Failure,
    GroupFacts,
    Moment,
    OptimizerFacts,
    Residency,
    Row,
    device_type,
)

KINDS = {
    PARAMETER: ("parameter", "parameters"),
    BUFFER: ("buffer", "buffers"),
    GRADIENT: ("gradient", "gradients"),
    OPTIMIZER_STATE: ("optimizer state", "optimizer states"),
    EXPORT: ("exported tensor", "exported tensors"),
    "fsdp_group": ("FSDP group", "FSDP groups"),
    "engine": ("engine", "engines"),
    "optimizer": ("optimizer", "optimizers"),
}


def name_of(row: Row) -> str:
    """``"lm_head.weight"``, ``"lm_head.weight [exp_avg]"``, ``"(root)"`` for the outermost FSDP group."""
    part = row.part or {GRADIENT: "gradient", EXPORT: "exported"}.get(row.kind, "")
    name = row.name or "(root)"
    return f"{name} [{part}]" if part else name


def facts_of(hit: Hit) -> Facts | None:
    """The facts of a hit's first row at the moment that was judged; a row with elements goes before one without."""
    state = hit.rank.state(hit.judged.moment)
    found = [hit.rank.facts[state.facts[row]] for row in sorted(hit.facts) if row < len(state.facts)]
    full = [f for f in found if not (isinstance(f, Residency) and f.empty)]
    return next(iter(full or found), None)


def residency_text(hit: Hit) -> str:
    """``"npu:0/cpu pinned"``; "" for what is no tensor."""
    facts = facts_of(hit)
    return facts.short() if isinstance(facts, Residency) else ""


def evidence(hit: Hit, failure: Failure | None) -> Iterator[str]:
    """What was seen, one sentence each."""
    facts = facts_of(hit)
    noun = _counted(hit)
    if isinstance(facts, Residency):
        yield f"{noun}: {_tensor(facts)}"
    elif isinstance(facts, GroupFacts):
        yield f"{noun}: {_group(facts)}"
    elif isinstance(facts, EngineFacts):
        yield _engine(facts, hit.rank)
    if (policy := _policy(hit)) and not isinstance(facts, GroupFacts):
        yield policy
    if hit.origin is not None and hit.origin.index != 0:
        yield f"since {moment_text(hit.rank, hit.origin)}"
    yield _why(hit)
    if failure is not None:
        yield f"the exception: {failure.type}: {' '.join(failure.message.split())[:200]}"


def _counted(hit: Hit) -> str:
    """``"14 parameters and 1 buffer"``."""
    counts: dict[str, int] = {}
    for row in hit.rows:
        counts[row.kind] = counts.get(row.kind, 0) + 1
    return " and ".join(f"{count} {KINDS[kind][count != 1]}" for kind, count in counts.items())


def _tensor(facts: Residency) -> str:
    where = facts.storage_device or "unreadable memory"
    pinned = {True: "pinned ", False: "unpinned ", None: ""}[facts.pinned] if device_type(where) == "cpu" else ""
    text = f"the metadata says {facts.metadata_device}, the bytes are in {pinned}{where} memory"
    if facts.metadata_device == "meta":
        text = "on the meta device, without bytes"
    if facts.aliased is False and not facts.empty:
        text += f"; all-gather reads other bytes, on {facts.flat_device}"
    return text


def _group(facts: GroupFacts) -> str:
    parts = [f"lazy init {facts.lazy_init}"]
    if facts.training_state:
        parts.append(f"training state {facts.training_state}")
    if facts.backward_pending:
        parts.append("the final backward callback is marked as queued")
    if not facts.backward_running:
        parts.append("no backward is running")
    return ", ".join(parts)


def _engine(facts: EngineFacts, rank: RankTrace) -> str:
    flags = f"_uses_fsdp2_cpu_offload_policy {facts.uses_policy_flag}"
    flags += f", param_offload {facts.offload_param}, optimizer_offload {facts.offload_optimizer}"
    return f"{facts.type}: {flags}; its FSDP groups offload to the CPU by policy"


def _policy(hit: Hit) -> str:
    groups = dict.fromkeys(map(_group_policy, _groups(hit)))
    return "; ".join(list(groups)[:2]) + (f" and {len(groups) - 2} other policies" if len(groups) > 2 else "")


def _group_policy(group: GroupFacts) -> str:
    policy = f"{group.policy}(pin_memory={group.pin_memory})" if group.offload else group.policy or "no offload policy"
    backends = f", process group {group.backends}" if group.backends else ""
    return f"policy {policy}, mesh {group.mesh or '?'}{backends}"


def _groups(hit: Hit) -> list[GroupFacts]:
    """The FSDP groups that own the parameters concerned, or all of the model where none of them has an owner.

    A module whose children own all its parameters has a group without parameters, policy and mesh: never that one.
    """
    state = hit.rank.state(hit.judged.moment)
    known: dict[tuple[str, str], GroupFacts] = {}
    for row in hit.rank.rows:
        facts = hit.rank.facts[state.facts[row.id]] if row.kind == GROUP and row.id < len(state.facts) else None
        if isinstance(facts, GroupFacts) and (facts.parameters or facts.policy):
            known[row.model, row.name] = facts
    owners: dict[GroupFacts, None] = {}
    for row in hit.rows if known else ():
        name, dot = row.name, "."
        while (row.model, name) not in known and dot:
            name, dot, _ = name.rpartition(".")
        if (row.model, name) in known:
            owners[known[row.model, name]] = None
    models = {row.model for row in hit.rows}
    return list(owners) or [facts for (model, _), facts in known.items() if model in models]


def _why(hit: Hit) -> str:
    moment = hit.judged.moment
    phase = hit.rank.phases.get(moment.phase)
    name = phase.name if phase and phase.name else ""
    return {
        "ends": f"phase {name} ended so",
        "begins": f"phase {name} began on it",
        "failed": f"{moment.failure.operation if moment.failure else name} failed on it",
        "last": "it is so now" if is_look(hit.rank) else "the trace ended so",
    }[hit.judged.why]


def as_of(hit: Hit) -> str:
    """When the state was so whose next operations are predicted; "" for a live look, where that is now.

    A hazard of an engine and the split it leads to stand in one list and speak of two states: before and after.
    """
    phase = hit.rank.phases.get(hit.judged.moment.phase)
    name = f"phase {phase.name}" if phase and phase.name else "this part"
    failure = hit.judged.moment.failure
    return {
        "ends": f"when {name} ended",
        "begins": f"when {name} began",
        "failed": f"when {failure.operation if failure else name} failed",
        "last": "" if is_look(hit.rank) else "when the trace ended",
    }[hit.judged.why]


def moment_text(rank: RankTrace, moment: Moment) -> str:
    """``"Module._apply in phase save"``."""
    phase = rank.phases.get(moment.phase)
    what = moment.cause.operation if moment.cause else moment.label
    if moment.kind == EXIT and phase is not None:
        return f"the end of phase {phase.name}"
    return f"{what} in phase {phase.name}" if phase is not None and phase.name else what


def resting_buffers(rank: RankTrace) -> Iterator[str]:
    """A note on buffers that rest on the CPU beside an accelerator mesh: information, not a fault."""
    if not rank.moments:
        return
    state = rank.state(rank.moments[-1])
    groups = [f for f in rank.facts if isinstance(f, GroupFacts)]
    if not any(g.mesh_device not in (None, "cpu") for g in groups):
        return
    names = [
        row.name
        for row in rank.rows
        if row.kind == BUFFER
        and isinstance(f := rank.facts[state.facts[row.id]], Residency)
        and device_type(f.storage_device) == "cpu"
    ]
    if names:
        shown = ", ".join(map(str, compress(names)[:3]))
        noun = KINDS[BUFFER][len(names) != 1]
        yield f"{len(names)} {noun} on the CPU ({shown}): no fault if forward moves them itself; if it fails, see DK501"


def idle_optimizers(rank: RankTrace) -> Iterator[str]:
    """A note on optimizers that train nothing of the model: made before `fully_shard` exchanged its parameters."""
    if not rank.moments:
        return
    state = rank.state(rank.moments[-1])
    for facts in (rank.facts[number] for number in dict.fromkeys(state.facts)):
        if isinstance(facts, OptimizerFacts) and facts.dead == facts.parameters > 0:
            yield (
                f"none of the {facts.type or 'optimizer'}'s {facts.parameters} parameters belongs to this model: "
                "training does not reach it; build the optimizer after fully_shard"
            )
