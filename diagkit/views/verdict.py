"""One story in two sentences: what happened, where and when; and what came of it.

The rules: a split that heals inside the phase in which it arose, before anything failed on it, is no fault and is not
told as one; a sentence says only what the trace holds, never what would happen next (that is diagnosis).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diagkit.language import msg, msgn, tr, trn
from diagkit.trace.schema import EXIT, PARAMETER, EngineFacts, Failure, GroupFacts, device_type
from diagkit.trace.table import rank_of
from diagkit.views.scene import clean
from diagkit.views.story import Column, Story

__all__ = ["Run", "Verdict", "context", "judge", "short_call", "split_runs"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``title`` answers where and when, ``sentence`` says what came of it, ``short`` is a title for narrow places.

    ``good``: nothing is wrong. ``failed``: an operation failed; a split that nothing has met is neither.
    """

    title: str
    sentence: str
    short: str
    good: bool
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Some tensors were split from ``columns[start]`` to ``columns[end]``; ``lasting`` says whether that is a fault."""

    start: int
    end: int
    lasting: bool


def split_runs(columns: Sequence[Column]) -> list[Run]:
    """The stretches of moments at which something was split."""
    runs: list[Run] = []
    start: int | None = None
    for i, column in enumerate((*columns, None)):
        if column is not None and column.splits and start is None:
            start = i
        elif start is not None and (column is None or not column.splits):
            inside = columns[start:i]
            arose = inside[0].phase.ordinal
            ended = any(c.moment.kind == EXIT and c.phase.ordinal == arose for c in inside)
            runs.append(Run(start, i - 1, column is None or ended or any(c.failed for c in inside)))
            start = None
    return runs


def judge(story: Story) -> Verdict:
    """The verdict on a story."""
    columns = story.every
    failure = next((c for c in columns if c.moment.failure), None)
    runs = split_runs(columns)
    lasting = next((run for run in runs if run.lasting), None)
    raised = _raised(failure.moment.failure) if failure and failure.moment.failure else ""
    if lasting is not None:
        return _split(story, lasting, raised)
    if failure is not None:
        where = failure.phase.name or tr("the run")
        short = tr("{phase} fails, with metadata and bytes together", phase=where)
        title = tr("{phase} fails while metadata and bytes of {tensors} agree", phase=where, tensors=_all(story))
        title = _capital(title)
        return Verdict(title, raised, short, False, True)
    title, short = _healthy(story)
    sentence = tr("No split and no failure.")
    if runs:
        where = _listed(list(dict.fromkeys(clean(columns[run.start].phase.name) or tr("a block") for run in runs)))
        text = msg("A split inside {phase} lasted for a moment and healed before it ended: no fault.")
        sentence = tr(text, phase=where)
    return Verdict(title, sentence, short, True)


def context(story: Story) -> str:
    """The circumstances: ``"VeOmniEngine · CPUOffloadPolicy(pin_memory=True) · torch 2.13.0 · simulated npu · rank 0
    (of 0..1)"``.
    """
    rank, words = story.rank, []
    engine = next((facts.type for facts in rank.facts if isinstance(facts, EngineFacts) and facts.type), "")
    experiment = str(rank.header.job.get("experiment", ""))
    words.append(experiment or engine or str(rank.header.job.get("engine", "")))
    revision = str(rank.header.job.get("revision", ""))
    if revision and not experiment:
        words.append(tr("revision {revision}", revision=revision))
    group = next((facts for facts in rank.facts if isinstance(facts, GroupFacts) and facts.offload), None)
    if group is not None:
        words.append(f"{group.policy or 'CPUOffloadPolicy'}(pin_memory={group.pin_memory})")
    if rank.header.torch:
        words.append(f"torch {rank.header.torch}")
    device = rank.header.device
    words.append(tr("simulated {device}", device=device) if rank.header.simulated else device)
    words.append(rank_of(rank.rank, rank.header.world_size))
    return clean(" · ".join(word for word in words if word))


def _split(story: Story, run: Run, raised: str) -> Verdict:
    columns = story.every
    worst = max(columns[run.start : run.end + 1], key=lambda column: column.splits)
    first = columns[run.start]
    phase = clean(first.phase.name) or tr("the run")
    call = clean(first.moment.label if first.moment.cause is None else _call(first))
    many = _all(story) if worst.splits == _number(story) else trn(*_counted(story), worst.splits)
    pair = next((c for history in story.histories for c in (story.cells[n] for n in history) if c and c.split), None)
    title = tr("In {phase}, {call} splits {tensors}", phase=phase, call=call, tensors=many)
    if pair:
        title += tr(
            ": metadata says {metadata}, the bytes are on {storage}", metadata=pair.metadata, storage=pair.storage
        )
    return Verdict(
        title,
        tr("Then {raised}", raised=raised) if raised else _unmet(columns, run),
        tr("{phase} splits {tensors}", phase=phase, tensors=many)
        if first.phase.name
        else tr("{tensors} split outside any phase", tensors=_capital(many)),
        False,
        bool(raised),
    )


def _unmet(columns: Sequence[Column], run: Run) -> str:
    """What became of a split on which nothing has failed."""
    if run.end + 1 == len(columns):
        return tr("No operation has failed on them in this trace.")
    mended = columns[run.end + 1]
    by = clean(mended.moment.label) if mended.moment.cause is None else _call(mended)
    if mended.phase.name:
        by = tr("{call} in {phase}", call=by, phase=clean(mended.phase.name))
    return tr("No operation has failed on them in this trace; {call} mended them.", call=by)


def _healthy(story: Story) -> tuple[str, str]:
    path: list[str] = []
    pinned = True
    for c in range(len(story.columns)):
        cells = [
            cell
            for tensor, cell in zip(story.tensors, story.at(c), strict=True)
            if cell is not None and (tensor[0] == PARAMETER or not _parameters(story))
        ]
        places = sorted({device_type(cell.storage) or "?" for cell in cells})
        if places == ["meta"] and not path:
            continue  # nothing has bytes yet: that is no place to have moved from
        pinned = pinned and all(cell.pinned for cell in cells)
        if places and path[-1:] != [tr(" and ").join(places)]:
            path.append(tr(" and ").join(places))
    names = list(dict.fromkeys(clean(c.phase.name) for c in story.every if c.phase.name))
    through = tr(" through {phases}", phases=_listed(names)) if 0 < len(names) <= 5 else ""
    of = _all(story)
    if len(path) <= 1:
        place = path[0] if path else tr("no device")
        if pinned and path:
            place = tr("{device}, pinned", device=place)
        text = (
            msg("{tensors} stays on {place}{through}")
            if _number(story) == 1
            else msg("{tensors} stay on {place}{through}")
        )
        comma = "," if pinned and through else ""
        title = tr(text, tensors=of, place=place, through=comma + through)
        return title if story.subject else _capital(title), tr(text, tensors=of, place=place, through="")
    journey = " → ".join(path[:5]) + (" → …" if len(path) > 5 else "")
    title = tr(
        "Metadata and bytes of {tensors} move together{through}: {path}", tensors=of, through=through, path=journey
    )
    return title, tr("{tensors} in one piece: {path}", tensors=of, path=journey)


def _call(column: Column) -> str:
    """The torch call that a reader knows: ``Module.to`` rather than the ``Module._apply`` beneath it."""
    cause = column.moment.cause
    public = [word for word in (cause.chain if cause else ()) if word.startswith("Module.") and "._" not in word]
    return public[-1] if public else (cause.operation if cause else column.moment.label)


def _raised(failure: Failure) -> str:
    message = _first_sentence(clean(failure.message))
    error = f"{clean(failure.type)}{': ' if message else ''}{message}"
    return tr("{operation} raises {error}", operation=short_call(failure.operation) or tr("it"), error=error)


def _first_sentence(text: str) -> str:
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def short_call(operation: str) -> str:
    """``"Module.state_dict"`` -> ``"state_dict"``: the name under which it is called."""
    return clean(operation).rpartition(".")[2]


def _parameters(story: Story) -> int:
    return sum(kind == PARAMETER for kind, *_ in story.tensors)


def _number(story: Story) -> int:
    return _parameters(story) or len(story.tensors)


def _counted(story: Story) -> tuple[str, str]:
    if _parameters(story):
        return msgn("{count} parameter", "{count} parameters")
    return msgn("{count} tensor", "{count} tensors")


def _all(story: Story) -> str:
    """``"1 parameter"``, ``"both parameters"``, ``"all 21 parameters"``; or the one that the story is about."""
    if story.subject:
        return story.subject
    number = _number(story)
    if number < 2:
        return trn(*_counted(story), number)
    if number == 2:
        return tr("both parameters") if _parameters(story) else tr("both tensors")
    text = msg("all {count} parameters") if _parameters(story) else msg("all {count} tensors")
    return tr(text, count=format(number, ","))


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else tr(" and ").join((", ".join(names[:-1]), names[-1]))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
