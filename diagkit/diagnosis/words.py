"""The sentences in which findings tell what was seen. Facts in, words out."""

from __future__ import annotations

from collections.abc import Iterator

from diagkit.diagnosis.judge import Hit
from diagkit.diagnosis.moments import is_look
from diagkit.language import msg, tr, trn
from diagkit.trace import RankTrace
from diagkit.trace.nouns import counted
from diagkit.trace.patterns import compress
from diagkit.trace.schema import (
    ABSENT,
    BUFFER,
    CALL,
    EXIT,
    EXPORT,
    GRADIENT,
    GROUP,
    MARK,
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


def name_of(row: Row) -> str:
    """``"lm_head.weight"``, ``"lm_head.weight [exp_avg]"``, ``"(root)"`` for the outermost FSDP group."""
    part = row.part or {GRADIENT: "gradient", EXPORT: "exported"}.get(row.kind, "")
    name = row.name or "(root)"
    return f"{name} [{part}]" if part else name


def facts_of(hit: Hit) -> Facts | None:
    """The facts of a hit's first row at the moment that was judged; a row with elements goes before one without."""
    state = hit.rank.state(hit.judged.moment)
    found = [hit.rank.facts[state.facts[row.id]] for row in hit.rows if row.id < len(state.facts)]
    full = [f for f in found if not (isinstance(f, Residency) and f.empty)]
    return next(iter(full or found), None)


def residency_text(hit: Hit) -> str:
    """``"npu:0/cpu pinned"``; "" for what is no tensor."""
    facts = facts_of(hit)
    return facts.short() if isinstance(facts, Residency) else ""


def evidence(hit: Hit, failure: Failure | None, times: int = 1) -> Iterator[str]:
    """What was seen, one sentence each; ``times``: in how many phases like this one it began."""
    facts = facts_of(hit)
    noun = _counted(hit)
    if isinstance(facts, Residency):
        yield tr("{tensors}: {state}", tensors=noun, state=_tensor(facts))
    elif isinstance(facts, GroupFacts):
        yield tr("{tensors}: {state}", tensors=noun, state=_group(facts))
    elif isinstance(facts, EngineFacts):
        yield _engine(facts, hit.rank)
    elif isinstance(facts, OptimizerFacts):
        yield _optimizer(facts)
    if hit.note:
        yield hit.note
    if failure is not None and failure.asks and hit.rule.code == "DK404":
        yield tr("a device was taken from a parameter: {line}", line=failure.asks)
    if (policy := _policy(hit)) and (not isinstance(facts, GroupFacts) or hit.rule.code == "DK802a"):
        yield policy
    if hit.origin is not None and hit.origin.index != 0 and not _first_seen(hit, hit.origin):
        yield tr("since {moment}", moment=moment_text(hit.rank, hit.origin))
    yield _why(hit)
    if times > 1:
        yield trn("again in {count} later phase like it", "again in {count} later phases like it", times - 1)
    if failure is not None:
        text = f"{failure.type}: {' '.join(failure.message.split())[:200]}"
        yield tr("the exception: {text}", text=text)


def _first_seen(hit: Hit, origin: Moment) -> bool:
    """Whether a mere look found the rows so when it first found them: since when they are so, nobody saw."""
    if origin.kind != MARK:
        return False
    before = hit.rank.state(origin.index - 1).facts
    return all(before[row.id] == ABSENT for row in hit.rows)


def _counted(hit: Hit) -> str:
    """``"14 parameters and 1 buffer"``."""
    counts: dict[str, int] = {}
    for row in hit.rows:
        counts[row.kind] = counts.get(row.kind, 0) + 1
    return tr(" and ").join(counted(kind, count) for kind, count in counts.items())


def _tensor(facts: Residency) -> str:
    text = tr(_bytes_in(facts), metadata=facts.metadata_device, storage=facts.storage_device)
    if facts.aliased is False and not facts.empty:
        text += tr("; all-gather reads other bytes, on {device}", device=facts.flat_device)
    if facts.registered is False:
        text += tr("; the module's slot holds another tensor than the one that FSDP2 gathers")
    if facts.shares == "apart":
        text += tr("; FSDP2 takes it for tied to an earlier parameter, and the slot holds another tensor")
    if facts.storage_dtype and facts.dtype != facts.storage_dtype:
        text += tr("; the wrapper says {claimed}, the bytes are {held}", claimed=facts.dtype, held=facts.storage_dtype)
    if facts.unwritten:
        text += tr("; nothing was written into them since `to_empty` gave them")
    if facts.arrival == "read early":
        text += tr("; they were read before anything had waited for the copy")
    if facts.shares == "stale":
        text += tr("; they were its parameter's until that got others, and keep the values of then")
    if facts.shares == "written":
        text += tr("; they are its parameter's, and were written while the export was held")
    if not facts.shape_agrees:
        text += tr("; its shape is not the one that its layout needs")
    if facts.roomy:
        text += tr("; the storage behind the shard is at least twice as large as the shard")
    return text


def _optimizer(facts: OptimizerFacts) -> str:
    return tr(
        "{optimizer}: {dead} of its {parameters} parameters belong to no module, and {orphans} parameters of the model "
        "with their shapes are in no optimizer",
        optimizer=facts.type,
        dead=facts.dead,
        parameters=facts.parameters,
        orphans=facts.orphans,
    )


def _bytes_in(facts: Residency) -> str:
    if facts.metadata_device == "meta":
        return msg("on the meta device, without bytes")
    if facts.storage_device is None:
        return msg("the metadata says {metadata}, the bytes are in unreadable memory")
    if device_type(facts.storage_device) == "cpu" and facts.pinned is not None:
        if facts.pinned:
            return msg("the metadata says {metadata}, the bytes are in pinned {storage} memory")
        return msg("the metadata says {metadata}, the bytes are in unpinned {storage} memory")
    return msg("the metadata says {metadata}, the bytes are in {storage} memory")


def _group(facts: GroupFacts) -> str:
    parts = [tr("lazy init {state}", state=facts.lazy_init)]
    if facts.training_state:
        parts.append(tr("training state {state}", state=facts.training_state))
    if facts.sharded_state not in (None, "sharded"):
        parts.append(tr("parameters {state}", state=facts.sharded_state))
    if facts.stale:
        parts.append(tr("written by an optimizer while gathered"))
    if facts.backward_pending:
        parts.append(tr("the final backward callback is marked as queued"))
    if not facts.backward_running:
        parts.append(tr("no backward is running"))
    return ", ".join(parts)


def _engine(facts: EngineFacts, rank: RankTrace) -> str:
    flags = f"_uses_fsdp2_cpu_offload_policy {facts.uses_policy_flag}"
    flags += f", param_offload {facts.offload_param}, optimizer_offload {facts.offload_optimizer}"
    return tr("{engine}: {flags}; its FSDP groups offload to the CPU by policy", engine=facts.type, flags=flags)


def _policy(hit: Hit) -> str:
    groups = dict.fromkeys(map(_group_policy, _groups(hit)))
    more = trn(" and {count} other policy", " and {count} other policies", len(groups) - 2) if len(groups) > 2 else ""
    return "; ".join(list(groups)[:2]) + more


def _group_policy(group: GroupFacts) -> str:
    pins = f"{group.policy}(pin_memory={group.pin_memory})"
    policy = pins if group.offload else group.policy or tr("no offload policy")
    text = tr("policy {policy}, mesh {mesh}", policy=policy, mesh=group.mesh or "?")
    return text + (tr(", process group {backends}", backends=group.backends) if group.backends else "")


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
    if hit.judged.why == "failed":
        return tr("{operation} failed on it", operation=moment.failure.operation if moment.failure else name)
    text = {
        "ends": msg("still so when phase {name} ended"),
        "begins": msg("already so when phase {name} began"),
        "last": msg("it is so now") if is_look(hit.rank) else msg("still so when the trace ended"),
    }[hit.judged.why]
    return tr(text, name=name)


def as_of(hit: Hit) -> str:
    """When the state was so whose next operations are predicted; "" for a live look, where that is now.

    A hazard of an engine and the split it leads to stand in one list and speak of two states: before and after.
    """
    why, failure = hit.judged.why, hit.judged.moment.failure
    if why == "last":
        return "" if is_look(hit.rank) else tr("when the trace ended")
    if why == "failed" and failure is not None:
        return tr("when {name} failed", name=failure.operation)
    phase = hit.rank.phases.get(hit.judged.moment.phase)
    name = tr("phase {name}", name=phase.name) if phase and phase.name else tr("this part")
    text = {"ends": msg("when {name} ended"), "begins": msg("when {name} began"), "failed": msg("when {name} failed")}
    return tr(text[why], name=name)


def moment_text(rank: RankTrace, moment: Moment) -> str:
    """``"Module.to in phase save"``."""
    phase = rank.phases.get(moment.phase)
    what = moment.cause.operation if moment.cause and moment.kind != CALL else moment.label
    if moment.kind == EXIT and phase is not None:
        return tr("the end of phase {phase}", phase=phase.name)
    return tr("{call} in phase {phase}", call=what, phase=phase.name) if phase is not None and phase.name else what


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
        yield trn(
            "{count} buffer on the CPU ({names}): no fault if forward moves them itself; if it fails, see DK501",
            "{count} buffers on the CPU ({names}): no fault if forward moves them itself; if it fails, see DK501",
            len(names),
            names=shown,
        )


def idle_optimizers(rank: RankTrace) -> Iterator[str]:
    """A note on optimizers that train nothing of the model: made before `fully_shard` exchanged its parameters."""
    if not rank.moments or not any(isinstance(facts, OptimizerFacts) and facts.dead for facts in rank.facts):
        return
    state = rank.state(rank.moments[-1])
    for facts in (rank.facts[number] for number in dict.fromkeys(state.facts)):
        if isinstance(facts, OptimizerFacts) and facts.dead == facts.parameters > 0 == facts.orphans:
            yield trn(
                "none of the {optimizer}'s {count} parameters belongs to this model: "
                "training does not reach it; build the optimizer after fully_shard",
                "none of the {optimizer}'s {count} parameters belongs to this model: "
                "training does not reach it; build the optimizer after fully_shard",
                facts.parameters,
                optimizer=facts.type or tr("optimizer"),
            )
