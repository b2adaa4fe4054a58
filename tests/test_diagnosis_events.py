"""What events between two looks show: exports, empty buffers, early reads (DK204 DK205 DK403 DK502 DK703)."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from diagkit.diagnosis import Finding, Findings, diagnose
from diagkit.torch_internals import torch_version
from diagkit.trace import open_trace

HERE = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(300)
Answers = dict[str, list[dict[str, Any]]]
ALL = 14  # parameters of the model
#: Since torch 2.13 what was handed out stays live; before, the first forward gives padded shards other storages.
LIVE = torch_version() >= (2, 13)


def padded(names: int) -> list[tuple[str, tuple[int, ...], int]]:
    """What is found beside DK204 where the first forward came after the export: rank 1 holds the padded shards."""
    return [] if LIVE else [("DK205", (1,), names)]


@pytest.fixture(scope="module")
def folder(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("events")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    command = [sys.executable, str(HERE / "events_ranks.py"), str(place), "dk2,dk4,dk5,dk7"]
    subprocess.run(command, env=env, check=True, timeout=280)
    return place


@pytest.fixture(scope="module")
def answers(folder: pathlib.Path) -> Answers:
    found: Answers = json.loads((folder / "results.json").read_text())
    return found


def findings(folder: pathlib.Path, name: str) -> Findings:
    return diagnose(open_trace(folder / name))


def only(folder: pathlib.Path, name: str, code: str) -> Finding:
    (found,) = findings(folder, name)
    assert found.code == code
    return found


def culprit(finding: Finding) -> str:
    assert finding.cause is not None and finding.cause.frame is not None
    assert finding.cause.frame.file.endswith("culprits.py")
    return finding.cause.frame.function


# ---- DK204


def test_an_export_that_is_kept_over_a_step_holds_other_values_and_is_told_with_the_line_that_wrote(
    folder: pathlib.Path, answers: Answers
) -> None:
    assert [answer["changed then"] for answer in answers["dk204"]] == [0, 0]  # a copy is the remedy
    assert [answer["changed"] for answer in answers["dk204"]] == [ALL, ALL if LIVE else 4]
    found, *frozen = findings(folder, "dk204")
    assert [found.code, *((f.code, f.ranks, len(f.names)) for f in frozen)] == ["DK204", *padded(ALL - 4)]
    assert len(found.names) == ALL and all(name.endswith("[exported]") for name in found.names)
    assert (found.ranks, found.phase, found.severity) == ((0, 1), "train", "silent")
    assert culprit(found) == "train" and not found.lasting
    assert any("written while the export was held" in line for line in found.evidence)


def test_only_what_was_handed_out_before_the_write_is_told(folder: pathlib.Path) -> None:
    found, *frozen = findings(folder, "dk204_half_way")
    assert [found.code, *((f.code, f.ranks, len(f.names)) for f in frozen)] == ["DK204", *padded(3)]
    assert found.names[0] == "embed.weight [exported]" and len(found.names) == 4


def test_an_export_that_is_read_in_time_is_no_fault_though_it_aliases(folder: pathlib.Path, answers: Answers) -> None:
    assert [answer["sent"] for answer in answers["dk204_read_in_time"]] == [ALL, ALL]
    trace = open_trace(folder / "dk204_read_in_time")
    assert any(getattr(facts, "shares", None) == "parameter" for facts in trace[0].facts)
    assert not diagnose(trace)


# ---- DK205


def test_a_snapshot_from_before_the_first_forward_that_pinned_anew_is_frozen_and_told(
    folder: pathlib.Path, answers: Answers
) -> None:
    assert answers["dk205"] == [{"frozen": ALL, "right then": True}] * 2
    (found,) = (f for f in findings(folder, "dk205") if f.code == "DK205")
    assert len(found.names) == ALL and (found.ranks, found.phase) == ((0, 1), "eval")
    assert found.cause is not None and found.cause.operation == "first forward"
    assert any("keep the values of then" in line for line in found.evidence)


def test_a_healthy_models_snapshot_stays_live_on_torch_2_13_and_is_frozen_where_it_is_padded_before(
    folder: pathlib.Path, answers: Answers
) -> None:
    frozen = [answer["frozen"] for answer in answers["dk205_live"]]
    assert (frozen == [0, 0]) is LIVE
    assert ("DK205" in findings(folder, "dk205_live").codes) is not LIVE
    assert all(answer["right then"] for answer in answers["dk205_live"])


# ---- DK403


def test_a_host_tensor_in_an_accelerators_channel_is_told_with_the_line_that_sent_it(
    folder: pathlib.Path, answers: Answers
) -> None:
    for answer in answers["dk403"]:
        assert "No backend type associated with device type cpu" in answer["export failed"]
        assert answer["sent"] == ALL  # each staged on the mesh's device
    found = only(folder, "dk403", "DK403")
    assert (found.names, found.ranks, found.phase) == (("embed.weight [exported]",), (0, 1), "export")
    assert culprit(found) == "send" and found.severity == "now"
    assert found.residency == "cpu/cpu" and "No backend type" in found.failure


def test_a_device_type_in_the_code_that_is_not_there_is_told(folder: pathlib.Path, answers: Answers) -> None:
    assert re.search("CUDA|NVIDIA", answers["dk403_hard_coded"][0]["export failed"])
    found = only(folder, "dk403_hard_coded", "DK403")
    assert culprit(found) == "stage" and "literal" in found.remedy


# ---- DK502


def test_a_buffer_that_nobody_wrote_since_to_empty_makes_other_outputs_and_is_told(
    folder: pathlib.Path, answers: Answers
) -> None:
    for answer in answers["dk502"]:
        assert answer["right"] is False and answer["right then"] is True and answer["cured"] is True
    found = only(folder, "dk502", "DK502")
    assert (found.names, found.ranks, found.severity) == (("scale",), (0, 1), "silent")
    assert not found.lasting and any("nothing was written" in line for line in found.evidence)


def test_a_buffer_that_was_computed_anew_is_no_fault(folder: pathlib.Path, answers: Answers) -> None:
    assert [answer["right"] for answer in answers["dk502_made_anew"]] == [True, True]
    assert not findings(folder, "dk502_made_anew")


def test_a_buffer_that_differs_by_rank_is_seen_by_who_asked_for_values_and_by_no_other(
    folder: pathlib.Path, answers: Answers
) -> None:
    assert [answer["unchanged"] for answer in answers["dk502_by_rank"]] == [True, True]
    found = only(folder, "dk502_by_rank", "DK502")
    assert (found.names, found.ranks, found.phase, found.lasting) == (("scale",), (1,), "eval", False)
    assert any(line.startswith("beside rank 0: digest ") for line in found.evidence)
    unasked = open_trace(folder / "dk502_by_rank" / "unasked")
    assert not diagnose(unasked)
    assert all(getattr(facts, "digest", None) is None for rank in unasked for facts in rank.facts)


def test_statistics_that_begin_alike_and_part_in_training_are_no_fault(folder: pathlib.Path, answers: Answers) -> None:
    first, second = answers["dk502_statistics"]
    assert first["mean"] != second["mean"]
    trace = open_trace(folder / "dk502_statistics")
    assert len({getattr(facts, "digest", None) for facts in trace[0].facts}) > 3
    assert not diagnose(trace)


def test_a_cache_a_ranks_number_and_its_batch_statistics_differ_rightly(folder: pathlib.Path) -> None:
    trace = open_trace(folder / "dk502_own")
    for name in ("cache", "rank_offset", "norm.running_mean"):
        (row,) = (row.id for row in trace[0].rows if row.name == name)
        first, second = (rank.facts[rank.state(-1).facts[row]] for rank in trace)
        assert getattr(first, "digest", None) != getattr(second, "digest", None) is not None
    assert not diagnose(trace)


# ---- DK703


def test_a_copy_that_is_read_before_anything_waited_holds_other_bytes_and_is_told_with_the_line_that_read(
    folder: pathlib.Path, answers: Answers
) -> None:
    assert answers["dk703"] == [{"right": [False, True]}]  # waiting once is the remedy
    found = only(folder, "dk703", "DK703")
    assert len(found.names) == ALL and all(name.endswith("[copy]") for name in found.names)
    assert culprit(found) == "checksum" and found.phase == "export" and not found.lasting
    assert any("before anything had waited" in line for line in found.evidence)


def test_a_model_that_is_parked_without_waiting_is_saved_wrong_and_its_padded_shards_are_wrong_for_good(
    folder: pathlib.Path, answers: Answers
) -> None:
    assert all(answer["wrong"] for answer in answers["dk703_whole_model"])
    told = {culprit(found): found for found in findings(folder, "dk703_whole_model") if found.code == "DK703"}
    saved, padded = told["<dictcomp>"], told["park"]
    assert saved.ranks == (0, 1)
    # FSDP2's reset copies an uneven shard into its padding at once: nobody else had a chance to wait.
    assert padded.ranks == (1,) and "embed.weight [copy]" in padded.names


def test_copies_that_somebody_waited_for_and_fsdp2s_own_are_no_fault(folder: pathlib.Path, answers: Answers) -> None:
    assert [answer["same"] for answer in answers["dk703_waited_for"]] == [True, True]
    trace = open_trace(folder / "dk703_waited_for")
    assert any(getattr(facts, "arrival", None) == "under way" for facts in trace[0].facts)
    assert trace[0].phases[1].calls["copy to npu, non_blocking"] > ALL
    assert [rank.troubles for rank in trace] == [[], []] and not diagnose(trace)


def test_each_copy_says_whence_whither_and_whose_line(folder: pathlib.Path) -> None:
    moments = [m for m in open_trace(folder / "dk703")[0].moments if m.label == "copy to cpu, non_blocking"]
    causes = [m.cause for m in moments if m.cause is not None]
    assert len(causes) == 2 * ALL and {cause.request for cause in causes} == {"npu:0 -> cpu, non_blocking"}
    assert causes[0].target == "embed.weight" and causes[0].chain[-1] == "Tensor.to"
    assert causes[0].frame is not None and "stage_to_host" in causes[0].chain
