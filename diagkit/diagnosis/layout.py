"""How a rank's rows stand in its table: runs of one kind, and which FSDP group owns which name."""

from __future__ import annotations

from dataclasses import dataclass, field

from diagkit.trace.schema import GROUP, PARAMETER, Row


@dataclass(slots=True)
class Layout:
    """What depends on a rank's table alone."""

    segments: list[tuple[str, int, int]]  # kind, first row, one past the last
    group_of: dict[int, int | None] = field(default_factory=dict)  # parameter row -> row of its FSDP group
    groups: dict[tuple[str, str], int] = field(default_factory=dict)  # (model, module name) -> row of its group
    rooted: bool = False  # every model's root is an FSDP group, so that no parameter is without one


def layout_of(rows: list[Row]) -> Layout:
    """Runs of rows of one kind, and which group owns which name."""
    segments: list[tuple[str, int, int]] = []
    groups: dict[tuple[str, str], int] = {}
    models = set()
    for row in rows:
        if segments and segments[-1][0] == row.kind:
            segments[-1] = (row.kind, segments[-1][1], row.id + 1)
        else:
            segments.append((row.kind, row.id, row.id + 1))
        if row.kind == GROUP:
            groups.setdefault((row.model, row.name), row.id)
        elif row.kind == PARAMETER:
            models.add(row.model)
    return Layout(segments, groups=groups, rooted=all((model, "") in groups for model in models))


def registered_late(rows: list[Row]) -> frozenset[int]:
    """Parameters whose row came after their model's first FSDP group: rows are made in the order of arrival, and what
    `ignored_params` names was there before."""
    wrapped = {row.model: row.id for row in reversed(rows) if row.kind == GROUP}
    return frozenset(row.id for row in rows if row.kind == PARAMETER and row.id > wrapped.get(row.model, row.id))
