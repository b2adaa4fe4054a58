"""Which operation was under way, told by the functions on a stack: for exceptions as for the tracebacks in a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Function names -> the operation (a name of the prediction tables); ``None`` as file means any.
_FUNCTIONS: dict[str, str] = {
    "get_model_state_dict": "state_dict",
    "state_dict": "state_dict",
    "_save_to_state_dict": "state_dict",
    "get_state_dict": "state_dict",
    "load_state_dict": "load_state_dict",
    "_load_from_state_dict": "load_state_dict",
    "set_model_state_dict": "load_state_dict",
    "clip_grad_norm_": "clip_grad_norm_",
    "get_total_norm": "clip_grad_norm_",
    "_get_total_norm": "clip_grad_norm_",
    "clip_grads_with_norm_": "clip_grad_norm_",
    "full_tensor": "full_tensor",
    "redistribute": "full_tensor",
    "backward": "backward",
    "_engine_run_backward": "backward",
    "_pre_backward": "backward",
    "post_backward": "backward",
    "_root_post_backward_final_callback": "backward",
    "_lazy_init": "forward",
    "pre_forward": "forward",
    "_pre_forward": "forward",
    "forward": "forward",
    "_call_impl": "forward",
    "_apply": ".to(device)",
}


def operation_of(frames: Iterable[tuple[str, str]]) -> str:
    """The operation of a stack of (file, function), outermost first; "" where none is known.

    The innermost function that names one decides, except that a backward pass goes before what it calls, and that a
    forward (a module's, or an autograd function's inside something else) gives way to everything but a move.
    """
    found = ""
    for file, function in frames:
        name = _one(file.replace("\\", "/"), function)
        if name and found != "backward" and (name != "forward" or found in ("", ".to(device)")):
            found = name
    return found


def _one(file: str, function: str) -> str:
    if function == "step" and ("/optim/" in file or "optim" in file.rpartition("/")[2]):
        return "optimizer.step"
    if "/torch/optim/" in file and function not in ("state_dict", "load_state_dict"):
        return "optimizer.step" if function not in ("zero_grad", "__init__", "add_param_group") else ""
    return _FUNCTIONS.get(function, "")


#: Text -> operation -> codes, the likeliest first; "" is any other operation.
LIKELY: dict[str, dict[str, tuple[str, ...]]] = {
    "set_storage": {"": ("DK101", "DK102")},
    "materialized": {"": ("DK101", "DK103a", "DK103b", "DK603")},
    "grad_device": {"": ("DK101", "DK103a", "DK103b", "DK102")},
    "swap": {"": ("DK101", "DK102")},
    "no_backend": {"": ("DK402", "DK403")},
    "other_device": {"": ("DK403",)},
    "param_dtype": {"": ("DK601",)},
    "meta": {"": ("DK104",)},
    "mixed": {"": ("DK604", "DK602")},
    "gathered": {"": ("DK602",)},
    # Of all texts the one with most causes: who raised it decides. Elsewhere it is somebody's own mix-up.
    "several_devices": {"": ("DK802a",)},
    "grad_dtype": {"": ("DK105",)},
    "sharding": {"optimizer.step": ("DK401",), "": ()},
    "same_device": {
        "optimizer.step": ("DK301", "DK302", "DK303", "DK401", "DK102", "DK103b", "DK103a"),
        "clip_grad_norm_": ("DK301",),
        "forward": ("DK501", "DK802b"),
        "backward": ("DK301", "DK501"),
        "": (),
    },
}


#: Codes that a text never suggests, and facts can prove.
PROVEN = ("DK404",)


def likely(names: Iterable[str], operation: str) -> tuple[str, ...]:
    """Codes that may stand behind these texts during this operation, the likeliest first.

    >>> likely(["same_device"], "optimizer.step")[:2]
    ('DK301', 'DK302')
    """
    codes: dict[str, None] = {}
    for name in sorted(names):
        table = LIKELY.get(name, {})
        codes.update(dict.fromkeys(table.get(operation, table.get("", ()))))
    return tuple(codes)


def ordered(codes: Sequence[str], names: Iterable[str], operation: str) -> list[str]:
    """Codes that facts have shown, in the order in which text and operation make them likely."""
    order = {code: n for n, code in enumerate(likely(names, operation))}
    return sorted(codes, key=lambda code: (order.get(code, len(order)), codes.index(code)))
