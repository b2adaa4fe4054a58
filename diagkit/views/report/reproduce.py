"""A small script that brings about the state that was found, on a model of three layers: nothing of the job is in it.

The rules: it needs torch alone; it runs on one process, with or without torchrun; it does what users do (moves, loads,
passes that fail), and what failed in the job comes last, so that its traceback is the last thing on the screen. A state
that only the job's own code can bring about has no script: a script that shows something else would be worse than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diagkit.diagnosis import Finding, Findings
from diagkit.diagnosis.predictions.facets import facets
from diagkit.diagnosis.signatures import said
from diagkit.trace import RankTrace, Trace

__all__ = ["script"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """``lines`` bring the state about; ``shows`` is the operation that fails on it, where the job had none of its own.

    ``built`` replaces the line that gives the model its values.
    """

    lines: tuple[str, ...]
    shows: str
    policy: str = "CPUOffloadPolicy(pin_memory=True)"
    built: str = ""


_FAIL = ("try:", "    train()", "except RuntimeError as error:", '    print("the first forward:", error)')
_ABORT = (
    "def fail(*_):",
    '    raise ValueError("a mistake in a hook")',
    "",
    "handle = model[0].register_full_backward_hook(fail)",
    "try:",
    "    train()",
    "except ValueError as error:",
    '    print("backward:", error)',
    "handle.remove()",
    "optimizer.zero_grad()",
)
_BUFFERS = "for buffer in model.buffers(): buffer.data = buffer.data.to(device)"

#: Hazard -> how it comes about.
RECIPES: dict[str, Recipe] = {
    "DK101": Recipe(("model.to(device)",), "state_dict"),
    "DK102": Recipe(("for p in model.parameters(): p._local_tensor = p._local_tensor.to(device)",), "state_dict"),
    "DK103a": Recipe(("model.to(device)",), "forward", "CPUOffloadPolicy(pin_memory=False)"),
    "DK103b": Recipe(("train()", "model[1].inner.to(device)  # a child that is no FSDP module"), "backward"),
    "DK104": Recipe((), "forward", built="pass  # nothing gives it memory"),
    "DK105": Recipe(
        (
            "train()",
            "for p in model.parameters(): p.data = p.data.to(torch.bfloat16)",
        ),
        "backward",
    ),
    "DK201": Recipe(
        ("train()", "for p in model.parameters(): p._local_tensor = p._local_tensor.clone().pin_memory()"), "losses"
    ),
    "DK202": Recipe(
        (
            "state = {name: value.clone() for name, value in model.state_dict().items()}",
            "model.load_state_dict(state, assign=True)  # puts others into the modules than the optimizer holds",
        ),
        "losses",
    ),
    "DK301": Recipe(("train(step=False)", "model.to(device)"), "optimizer.step"),
    "DK302": Recipe(
        (
            "train()",
            "model.to(device)",
            "optimizer.load_state_dict(optimizer.state_dict())  # casts to the device that the metadata claims",
            'model.to("cpu")',
            _BUFFERS,
        ),
        "optimizer.step",
    ),
    "DK501": Recipe(("model.to(device)", 'model.to("cpu")'), "forward"),
    "DK601": Recipe(("model.to(device)", *_FAIL, 'model.to("cpu")', _BUFFERS), "forward"),
    "DK604": Recipe(("train()", *_ABORT), "gradients"),
}

#: Operation of the tables of predictions, or the observed call's name -> the line that does it.
OPERATIONS: dict[str, str] = {
    "state_dict": "model.state_dict()",
    "Module.state_dict": "model.state_dict()",
    "forward": "train()",
    "backward": "train()",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "optimizer.step": "optimizer.step()",
    "Optimizer.step": "optimizer.step()",
    "losses": 'print("losses, which should fall:", [train() for _ in range(3)])',
    "gradients": 'train(step=False); print("gradients:", [p.grad for p in optimizer.param_groups[0]["params"]])',
}

_HEAD = '''\
"""{title}

On a laptop, with the simulated accelerator:   diagkit run --simulate reproduce.py
On a node with an accelerator:                 python reproduce.py
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=29533).items():
    os.environ.setdefault(name, str(value))
device = torch.accelerator.current_accelerator().type
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
mesh = init_device_mesh(device, (dist.get_world_size(),))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.inner(x) * self.scale


with torch.device("meta"):
    model = nn.Sequential(Layer(), Layer(), Layer())
for part in (*model, model):
    fully_shard(part, mesh=mesh, offload_policy={policy})
{built}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def train(step=True):
    loss = model(torch.ones(2, 8, device=device, requires_grad=True)).sum()
    loss.backward()
    if step:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def show(when):
    for name, p in model.named_parameters():
        if name.endswith("weight"):
            local = getattr(p, "_local_tensor", p)  # while it is gathered a plain parameter is in its place
            print(f"{{when}}: {{name}}: metadata {{p.device}}, bytes {{local.untyped_storage().device}}")
    print(f"{{when}}: buffers on", *{{str(buffer.device) for buffer in model.buffers()}})


'''
_BUILT = """\
model.to_empty(device="cpu")
for part in model:
    nn.init.constant_(part.inner.weight, 0.1)
    nn.init.zeros_(part.inner.bias)
    part.scale = torch.ones(8, device=device)"""


def script(findings: Findings, trace: Trace) -> tuple[str, str]:
    """The code of the hazard that is reproduced, and the script; two empty texts where there is none."""
    found = next((f for f in _in_order(findings) if f.code in RECIPES), None)
    if found is None:
        return "", ""
    recipe, rank = RECIPES[found.code], trace[found.ranks[0]]
    failed = _failed(found, rank)
    last = OPERATIONS.get(failed, OPERATIONS[recipe.shows])
    # What has run one pass before the state arose behaves otherwise than what has not.
    started = found.code not in ("DK104", "DK601", "DK604") and facets(rank, found.moment).lazy_init == "done"
    lines = [
        *(["train()"] if started and "train()" not in recipe.lines else []),
        'show("before")',
        *recipe.lines,
        'show("after")',
        *(["train(step=False)"] if last == OPERATIONS["optimizer.step"] and _has_no_gradients(recipe) else []),
        last,
    ]
    title = f"{found.code}: {found.rule.english_title}."
    head = _HEAD.format(title=title, policy=recipe.policy, built=recipe.built or _BUILT)
    return found.code, head + "\n".join(lines) + "\n"


def _in_order(findings: Findings) -> Sequence[Finding]:
    """The first to blame first; what explains a failure before what merely may."""
    return sorted(findings, key=lambda finding: (bool(finding.follows), not finding.failure))


#: Text of an exception -> the operation that raises it, where the observed call is a part of torch's own.
TEXTS = {"materialized": "forward", "param_dtype": "forward", "grad_device": "backward", "set_storage": "state_dict"}


def _failed(finding: Finding, rank: RankTrace) -> str:
    """The operation that failed on it; "" where none did."""
    moments = [m for m in rank.failures if m.failure and finding.failure.startswith(f"{m.failure.type}: ")]
    if not moments or moments[0].failure is None:
        return ""
    failure = moments[0].failure
    if failure.operation in OPERATIONS:
        return failure.operation
    return next((TEXTS[name] for name in sorted(said(failure.message)) if name in TEXTS), "")


def _has_no_gradients(recipe: Recipe) -> bool:
    return "train(step=False)" not in recipe.lines
