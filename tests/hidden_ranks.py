"""PyTorch's private parts hidden, one at a time: what does a look say then? ``python hidden_ranks.py OUT [ONLY]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import culprits
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_state

import diagkit as dk
from diagkit.demo.predictions.bench import DECODER, Bench, build
from diagkit.demo.predictions.forked import fork_ranks, warm_up

Hide = Callable[[Bench], None]
HIDDEN: dict[str, Hide] = {}


def hides(name: str) -> Callable[[Hide], Hide]:
    def enter(function: Hide) -> Hide:
        HIDDEN[name] = function
        return function

    return enter


def states(bench: Bench) -> list[Any]:
    return [s for m in bench.model.modules() if (s := _fsdp_state._get_module_fsdp_state(m)) is not None]


def groups(bench: Bench) -> list[Any]:
    return [
        g
        for s in states(bench)
        for g in (getattr(s, "_fsdp_param_groups", None) or filter(None, [getattr(s, "_fsdp_param_group", None)]))
    ]


def params(bench: Bench) -> list[Any]:
    return [p for g in groups(bench) for p in g.fsdp_params]


def rename(things: list[Any], name: str) -> None:
    for thing in things:
        if name in vars(thing):
            vars(thing)[f"{name}_renamed"] = vars(thing).pop(name)


for _name in ("_sharded_param_data", "sharded_state", "_module_info", "_sharding_spec", "sharded_param"):
    hides(f"FSDPParam.{_name}")(lambda bench, name=_name: rename(params(bench), name))
for _name in ("_training_state", "offload_policy", "fsdp_params", "_sharded_state", "mesh_info", "device"):
    hides(f"FSDPParamGroup.{_name}")(lambda bench, name=_name: rename(groups(bench), name))
for _name in ("_is_root", "_state_ctx", "_fsdp_param_groups", "_fsdp_param_group"):
    hides(f"FSDPState.{_name}")(lambda bench, name=_name: rename(states(bench), name))


@hides("_get_module_fsdp_state")
def no_state_getter(bench: Bench) -> None:
    del _fsdp_state._get_module_fsdp_state


@hides("ShardedState")
def no_sharded_state(bench: Bench) -> None:
    del _fsdp_param.ShardedState


@hides("post_backward_final_callback_queued")
def no_callback_mark(bench: Bench) -> None:
    rename([s._state_ctx for s in states(bench)], "post_backward_final_callback_queued")


def main() -> None:
    folder, only = Path(sys.argv[1]), "".join(sys.argv[2:])
    warm_up()
    results = {}
    for name, hide in HIDDEN.items():
        if only not in name:
            continue

        def work(rank: int, tell: Callable[[dict[str, Any]], None], hide: Hide = hide, name: str = name) -> None:
            bench = build(DECODER, "pinned")
            bench.train()
            bench.optimizer.zero_grad()
            culprits.load_model_to_device(bench.model, "npu")
            error = None
            try:
                bench.model.state_dict()
            except RuntimeError as raised:
                error = raised
            hide(bench)
            look = dk.inspect(bench.model, bench.optimizer)
            told = repr(look)
            why = dk.explain(error)
            with dk.record(bench.model, bench.optimizer, out=folder / name) as rec, rec.phase("idle"):
                pass
            tell({
                "codes": list(look.findings.codes),
                "problems": list(look.findings.problems),
                "text": told,
                "explained": why.code,
                "html": len(look._repr_html_()),
            })  # fmt: skip

        results[name] = fork_ranks(work, 1, loud=bool(only))
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
