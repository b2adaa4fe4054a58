"""The lab's engines: each guard does exactly what it is for, and values survive saving, loading and exporting."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import engine_ranks
import pytest
from ranks import run_ranks

from diagkit.demo.expected import FAILURES, expected
from diagkit.demo.experiments import Experiment
from diagkit.errors import UsageError
from diagkit.lab.engines import GUARDS, REVISIONS, Guard, revision
from diagkit.lab.engines.guards import FLAG_HAS_DEFAULT, FSDP_SAVE_ASKS_FLAG, VEOMNI_POLICY_SETS_FLAG

MIXED, ALONE = "cpu:gloo,npu:hccl", "hccl"
Operations = list[tuple[str, str]]
OPERATIONS: Operations = [
    *(("save", flags) for flags in ("policy", "both", "lora", "manual")),
    *(("load", flags) for flags in ("policy", "both", "manual")),
    *(("export", flags) for flags in ("policy", "both", "lora", "manual")),
    ("train", "both"),
]
# Enough to see that a guard of one engine is none of the other's: what reads each of its conditions.
OF_THE_OTHER = [("save", "policy"), ("load", "both"), ("export", "policy"), ("train", "both")]
SAVES = {"save policy", "save both", "save lora"}
EXPORTS = {"export policy", "export both", "export lora", "export policy alone"}

# What flips when one guard is taken out of the revision that brought it, and of today's. Nothing else may.
FLIPS: dict[str, tuple[set[str], set[str]]] = {
    # Nobody clears VeOmni's manual flags: without this guard the FSDP engine has the same trouble.
    "fsdp.policy-clears-offload-flags": ({"load both", "train both"}, {"save both", "load both", "train both"}),
    # Export reads the flag without a default.
    "fsdp.flag-starts-false": ({"export manual"}, {"export manual"}),
    # Today two guards keep export in place; only with LoRA the flag is the one that counts.
    "fsdp.policy-sets-flag": (EXPORTS, SAVES | {"export lora"}),
    "fsdp.export-asks-flag": (EXPORTS, {"export lora"}),
    "fsdp.save-asks-flag": (SAVES, SAVES),
    # It needs a second hole: see the test of the missing attribute.
    "flag-has-default": (set(), set()),
    "fsdp.export-in-place": ({"export manual"}, {"export manual"}),
    "fsdp.export-leaves-in-place": ({"export manual"}, {"export manual"}),
    "veomni.policy-sets-flag": (SAVES | EXPORTS | {"load both"}, SAVES | EXPORTS | {"load both"}),
    "veomni.save-asks-flag": (SAVES, SAVES),
    "veomni.load-asks-flag": ({"load both"}, {"load both"}),
    "veomni.export-asks-flag": (EXPORTS, EXPORTS),
    "veomni.export-stages-each-tensor": (EXPORTS, EXPORTS),
}


def cells_of(
    engine: str, name: str, without: tuple[str, ...] = (), group: str = MIXED, operations: Operations = OPERATIONS
) -> list[Experiment]:
    chosen = operations if group == MIXED else [("export", "policy")]
    return [Experiment(engine, name, operation, flags, group, without) for operation, flags in chosen]


def plan(group: str) -> list[Experiment]:
    """Each guard out of its own engine, as it came and today, and out of the other; before them the cells whole."""
    mutants: list[Experiment] = []
    for guard in GUARDS:
        for name in dict.fromkeys((guard.since, "current")):
            mutants += cells_of(guard.engine, name, (guard.name,), group)
        mutants += cells_of(_other(guard), "current", (guard.name,), group, OF_THE_OTHER)
    whole = dict.fromkeys(replace(cell, without=()) for cell in mutants)
    return [*whole, *mutants, *([BOTH_HOLES] if group == MIXED else [])]


BOTH_HOLES = Experiment(
    "veomni", "current", "save", "policy", MIXED, (VEOMNI_POLICY_SETS_FLAG.name, FLAG_HAS_DEFAULT.name)
)


def _other(guard: Guard) -> str:
    return "veomni" if guard.engine == "fsdp" else "fsdp"


Found = dict[Experiment, dict[str, Any]]


@pytest.fixture(scope="module")
def found(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    results: Found = {}
    for group in (MIXED, ALONE):
        folder = tmp_path_factory.mktemp("cells")
        cells = plan(group)
        path = folder / "plan.json"
        path.write_text(json.dumps([asdict(cell) for cell in cells]))
        # One rank is enough for all but the collective that the accelerator's backend alone refuses.
        ranks = 1 if group == MIXED else 2
        run_ranks(engine_ranks.run_cells, ranks, args=[str(path), group, str(folder)], timeout=800)
        results.update(zip(cells, json.loads(path.with_suffix(".found.json").read_text()), strict=True))
    return results


def sign(record: dict[str, Any]) -> tuple[object, ...]:
    """What makes two runs of a cell the same: outcome, kind of failure, where the exported tensors are, the moves."""
    message = record["exception"]["message"] if record["exception"] else ""
    failure = next((name for name, text in FAILURES.items() if text in message), message)
    return record["outcome"], failure, record["exported"], tuple(record["moves"])


def flips(found: Found, engine: str, name: str, guard: Guard, operations: Operations = OPERATIONS) -> set[str]:
    words = {MIXED: "", ALONE: " alone"}
    return {
        f"{cell.operation} {cell.flags}{words[group]}"
        for group in (MIXED, ALONE)
        for cell in cells_of(engine, name, (), group, operations)
        if sign(found[cell]) != sign(found[replace(cell, without=(guard.name,))])
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("guard", GUARDS, ids=str)
def test_taking_one_guard_out_flips_exactly_the_cells_it_is_for(found: Found, guard: Guard) -> None:
    as_it_came, today = FLIPS[guard.name]
    assert flips(found, guard.engine, guard.since, guard) == as_it_came
    assert flips(found, guard.engine, "current", guard) == today
    assert flips(found, _other(guard), "current", guard, OF_THE_OTHER) == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_all_guards_in_place_every_cell_is_as_expected_also_beside_others_in_one_process(found: Found) -> None:
    for cell, record in found.items():
        if cell.without:
            continue
        want = expected(cell)
        assert (record["outcome"] == "crash") == (want.failure is not None), cell.name
        assert record["moves"] == [f"Module.{move}" for move in want.moves.split()], cell.name
        if want.failure is not None:
            assert FAILURES[want.failure] in record["exception"]["message"], cell.name
        elif want.exported is not None:
            assert record["exported"] == ("npu" if want.exported == "device" else "cpu"), cell.name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_subclass_that_skips_its_parents_init_lacks_the_flag_and_only_the_default_saves_it(found: Found) -> None:
    error = found[BOTH_HOLES]["exception"]
    assert error["type"] == "AttributeError"
    assert "_uses_fsdp2_cpu_offload_policy" in error["message"]
    one_hole = Experiment("veomni", "current", "save", "policy", MIXED, (VEOMNI_POLICY_SETS_FLAG.name,))
    assert FAILURES["split"] in found[one_hole]["exception"]["message"]


@pytest.mark.slow
def test_values_survive_saving_loading_and_exporting_bit_for_bit(compiler: str, tmp_path: Path) -> None:
    run_ranks(engine_ranks.check_values, 2, env={"FOLDER": str(tmp_path)}, timeout=280)


def engine_sources() -> list[tuple[Path, ast.Module]]:
    folder = Path(engine_ranks.__file__).parent.parent / "diagkit" / "lab"
    return [(path, ast.parse(path.read_text())) for path in [*folder.glob("engines/*.py"), folder / "models.py"]]


def calls_of_has(tree: ast.AST) -> list[str]:
    return [
        node.args[0].attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "has"
        and isinstance(node.args[0], ast.Attribute)
    ]


def test_each_guard_is_asked_in_exactly_one_place_and_nothing_else_depends_on_the_revision() -> None:
    from diagkit.lab.engines import guards

    names = {name for name, value in vars(guards).items() if isinstance(value, Guard)}
    asked = [name for _, tree in engine_sources() for name in calls_of_has(tree)]
    assert sorted(asked) == sorted(names)
    assert {vars(guards)[name] for name in names} == set(GUARDS)
    uses = [
        f"{path.name}:{node.lineno}"
        for path, tree in engine_sources()
        if path.name in ("fsdp.py", "veomni.py", "moves.py", "modes.py", "checkpoint.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "revision" and isinstance(node.ctx, ast.Load)
    ]
    assert len(uses) == 1, f"only FSDPEngine.has may read the revision: {uses}"


def test_the_engines_know_nothing_of_what_watches_them() -> None:
    watchers = (
        "diagkit.capture",
        "diagkit.trace",
        "diagkit.diagnosis",
        "diagkit.demo",
        "diagkit.live",
        "diagkit.remedy",
    )
    for path, tree in engine_sources():
        for node in ast.walk(tree):
            modules = _imported(node)
            assert not any(module.startswith(watchers) for module in modules), path


def _imported(node: ast.AST) -> Sequence[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_guards_arrive_with_their_revision_and_stay() -> None:
    for name in REVISIONS:
        code = revision(name)
        for guard in GUARDS:
            assert code.has(guard) == (REVISIONS.index(guard.since) <= REVISIONS.index(name))
        assert revision(name) == code


def test_an_unknown_revision_or_a_guard_that_is_not_there_is_told_with_the_choices() -> None:
    with pytest.raises(UsageError, match=r"unknown revision: found #1\. Choose one of before, #6463, #6604"):
        revision("#1")
    with pytest.raises(UsageError, match=r"revision before has no guard fsdp\.save-asks-flag"):
        revision("before").without(FSDP_SAVE_ASKS_FLAG)
