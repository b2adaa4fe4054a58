"""`print(trace)`: what moved, when, and whose line moved it, in a few lines."""

from __future__ import annotations

from traces import Rank, cause, engine_trace, on

from diagkit.trace.merged import Trace
from diagkit.trace.schema import CALL, ENTER, EXIT, Frame


def test_it_tells_what_moved_when_and_by_whose_line() -> None:
    trace = engine_trace(ranks=2)
    assert str(trace).splitlines() == [
        repr(trace),
        "rank 0:",
        "  init: 21 parameters meta/meta -> npu:0/cpu pinned by engine.py:12 save_checkpoint: "
        "FSDPEngine.initialize -> Module.to",
        "  init: buffer model.rotary_emb.inv_freq meta/meta -> npu:0/npu:0 by engine.py:12 save_checkpoint: "
        "FSDPEngine.initialize -> Module.to",
        "  init: 21 parameters npu:0/cpu pinned -> cpu/cpu pinned by engine.py:14 save_checkpoint: "
        "FSDPEngine.initialize -> Module.cpu",
        "  save: 21 parameters cpu/cpu pinned -> npu:0/cpu pinned by engine.py:41 save_checkpoint: "
        "FSDPEngine.save_checkpoint -> load_model_to_device -> Module.to -> FSDPParam.reset_sharded_param",
        "  save: Module.state_dict failed at engine.py:44 save_checkpoint: RuntimeError: Attempted to set the storage "
        'of a tensor on device "cpu" to a storage on different device "npu:0".',
    ]
    assert "failed" not in str(engine_trace(guarded=True))


def _moving(rounds: int, lines: int = 1, name: str = "train") -> Trace:
    """A phase again and again (`{}` in its name is its number), in which a parameter travels to the device and back."""
    rank = Rank(["w"], buffers=())
    write = rank.writer.moment
    for n in range(1, rounds + 1):
        write(ENTER, "train: enter", n, rank.parameters(on("cpu")), key=n == 1, begins={"name": name.format(n)})
        for line in range(lines):
            for device in ("npu:0", "cpu"):
                write(CALL, "Module._apply", n, rank.parameters(on(device)), cause=cause("Module.to", line=line))
        write(EXIT, "train: exit", n, [])
    return Trace({0: rank.read()})


def test_what_repeats_is_told_once_with_its_count() -> None:
    head, *told = str(_moving(50)).splitlines()
    assert head.startswith("<Trace") and told == [
        "  train: parameter w cpu/cpu -> npu:0/npu:0 by engine.py:0 save_checkpoint: Module.to, 50 times",
        "  train: parameter w npu:0/npu:0 -> cpu/cpu by engine.py:0 save_checkpoint: Module.to, 50 times",
    ]


def test_numbered_steps_are_one_loop() -> None:
    assert str(_moving(50, name="step {}")).splitlines()[1:] == [
        "  step 1: parameter w cpu/cpu -> npu:0/npu:0 by engine.py:0 save_checkpoint: Module.to, 50 times",
        "  step 1: parameter w npu:0/npu:0 -> cpu/cpu by engine.py:0 save_checkpoint: Module.to, 50 times",
    ]


def test_it_stays_short() -> None:
    lines = str(_moving(2, lines=300)).splitlines()
    assert len(lines) == 13 and lines[-1] == "  and 589 more: trace.frame() has them all"
    assert max(map(len, lines)) <= 202


def test_nothing_moved_and_nothing_told_moves_a_cursor() -> None:
    assert str(_moving(1, lines=0)).splitlines()[1:] == ["  nothing moved"]
    rank = Rank(["w\x1b[2J\u202e"], buffers=())
    rank.writer.moment(CALL, "a", 0, rank.parameters(on("cpu")), key=True)
    rank.writer.moment(CALL, "b", 0, rank.parameters(on("npu:0")))
    text = str(Trace({0: rank.read()}))
    assert "outside any phase: parameter w\ufffd[2J\ufffd cpu/cpu -> npu:0/npu:0 by b" in text


def test_a_rank_shows_itself_in_one_line() -> None:
    trace = engine_trace(ranks=2)
    assert repr(trace[1]) == "<RankTrace test: rank 1 of 2, simulated npu, 24 rows, 12 moments, 1 failure>"
    trace[1].ended = None
    assert repr(trace[1]).endswith("1 failure, cut off>")


def test_a_line_of_a_notebook_is_told_by_itself_because_its_file_has_a_made_up_name() -> None:
    for file in ("/tmp/ipykernel_41/2176953414.py", "<ipython-input-7-0123456789ab>"):
        frame = Frame(file, 9, "save_checkpoint", "model.to(device)")
        assert (frame.place, str(frame)) == ("notebook, line 9", "notebook, line 9: model.to(device)")
    assert str(Frame("/jobs/engine.py", 9, "save_checkpoint", "model.to(device)")) == "engine.py:9 save_checkpoint"
