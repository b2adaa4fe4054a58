"""Traces for tests, written with the public writer and read back: an engine's life, of any size, with or without the
guard.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from diagkit.trace.merged import Trace
from diagkit.trace.reader import RankTrace, read_rank
from diagkit.trace.schema import (
    BUFFER,
    CALL,
    ENGINE,
    ENTER,
    EXIT,
    FAILURE,
    GROUP,
    PARAMETER,
    Cause,
    Change,
    EngineFacts,
    Facts,
    Failure,
    Frame,
    GroupFacts,
    Header,
    Residency,
    Row,
)  # fmt: skip
from diagkit.trace.writer import MemorySink, TraceWriter

SPLIT_MESSAGE = 'Attempted to set the storage of a tensor on device "cpu" to a storage on different device "npu:0".'


def decoder_names(layers: int) -> list[str]:
    """Parameter names of a decoder: nine a layer and three more."""
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    inner = [f"model.layers.{i}.{part}.weight" for i in range(layers) for part in parts]
    return ["model.embed_tokens.weight", *inner, "model.norm.weight", "lm_head.weight"]


def unlike_names(count: int, length: int) -> list[str]:
    """Names of one length that no pattern joins."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ("".join(word) for word in itertools.product(letters, repeat=4))
    filler = ".".join(["block"] * 40)
    return [f"{filler[: length - 5]}.{word}" if length > 5 else word for word in itertools.islice(words, count)]


def engine_trace(
    names: Sequence[str] | None = None,
    *,
    guarded: bool = False,
    ranks: int = 1,
    fails: bool = True,
    heals: bool = False,
) -> Trace:
    """init (with its momentary split), train, save: the move splits and `state_dict` raises, unless guarded."""
    names = decoder_names(2) if names is None else list(names)
    return Trace({rank: _rank(names, guarded, rank, ranks, fails, heals) for rank in range(ranks)})


def cause(*chain: str, line: int = 41, function: str = "save_checkpoint") -> Cause:
    frame = Frame("/site/verl/engine.py", line, function, "load_model_to_device(self.module)")
    return Cause("Module._apply", chain, frame, (frame,), "model", "device=npu:0")


class Rank:
    """Writes one rank's moments, change by change."""

    def __init__(
        self,
        names: Sequence[str],
        rank: int = 0,
        ranks: int = 1,
        buffers: Sequence[str] = ("model.rotary_emb.inv_freq",),
    ) -> None:
        self.sink = MemorySink()
        header = Header(
            run="test",
            rank=rank,
            world_size=ranks,
            torch="2.13.0",
            device="npu",
            simulated=True,
            job={"engine": "FSDPEngine"},
        )
        self.writer = TraceWriter(self.sink, header)
        self.count = len(names)
        self.buffers = len(buffers)
        rows = [Row(i, PARAMETER, "model", name, shape=(8, 8)) for i, name in enumerate(names)]
        self.writer.table(rows)
        self.writer.table([Row(self.count + i, BUFFER, "model", name, shape=(8,)) for i, name in enumerate(buffers)])
        last = self.count + self.buffers
        self.writer.table([Row(last, GROUP, "model", "")])
        self.writer.table([Row(last + 1, ENGINE, "model", "engine")])
        self.device = f"npu:{rank}"

    def parameters(self, facts: Residency) -> list[Change]:
        return [Change(0, self.count, self.writer.fact_id(facts))]

    def buffer(self, device: str) -> list[Change]:
        return (
            [Change(self.count, self.buffers, self.writer.fact_id(Residency(device, device)))] if self.buffers else []
        )

    def others(self) -> list[Change]:
        group: list[Facts] = [GroupFacts(True, True, "CPUOffloadPolicy", device="npu"), EngineFacts("FSDPEngine")]
        return [Change(self.count + self.buffers + i, 1, self.writer.fact_id(facts)) for i, facts in enumerate(group)]

    def read(self) -> RankTrace:
        self.writer.close()
        return read_rank(self.sink.lines)


def on(device: str, pinned: bool = False, storage: str | None = None, **more: object) -> Residency:
    return Residency(device, storage or device, pinned=pinned, wrapper="DTensor", aliased=True, registered=True, **more)  # type: ignore[arg-type]


def _rank(names: Sequence[str], guarded: bool, rank: int, ranks: int, fails: bool, heals: bool) -> RankTrace:
    trace = Rank(names, rank, ranks)
    write = trace.writer.moment
    meta, healthy = on("meta"), on("cpu", True)
    split = on(trace.device, True, "cpu")
    write(ENTER, "init: enter", 1, [], key=True, begins={"name": "init", "label": "FSDPEngine.initialize"})
    write(CALL, "fully_shard", 1, [*trace.parameters(meta), *trace.buffer("meta"), *trace.others()])
    write(
        CALL,
        "Module._apply",
        1,
        [*trace.parameters(split), *trace.buffer(trace.device)],
        cause=cause("FSDPEngine.initialize", "Module.to", line=12),
    )
    write(
        CALL, "Module._apply", 1, trace.parameters(healthy), cause=cause("FSDPEngine.initialize", "Module.cpu", line=14)
    )
    write(EXIT, "init: exit", 1, [])
    write(ENTER, "train: enter", 2, [], begins={"name": "train"})
    write(CALL, "Optimizer.step", 2, [])
    write(EXIT, "train: exit", 2, [])
    write(ENTER, "save: enter", 3, [], begins={"name": "save", "label": "FSDPEngine.save_checkpoint"})
    if guarded:
        write(CALL, "Module.state_dict", 3, [])
        write(EXIT, "save: exit", 3, [])
        return trace.read()
    chain = ("FSDPEngine.save_checkpoint", "load_model_to_device", "Module.to", "FSDPParam.reset_sharded_param")
    write(CALL, "Module._apply", 3, trace.parameters(split), cause=cause(*chain))
    if fails:
        failure = Failure("RuntimeError", SPLIT_MESSAGE, "Module.state_dict")
        write(
            FAILURE,
            "Module.state_dict",
            3,
            [],
            failure=failure,
            cause=cause("FSDPEngine.save_checkpoint", "Module.state_dict", line=44),
        )
    if heals:
        write(
            CALL,
            "Module._apply",
            3,
            trace.parameters(healthy),
            cause=cause("FSDPEngine.save_checkpoint", "Module.cpu", line=50),
        )
    write(EXIT, "save: exit", 3, [])
    return trace.read()
