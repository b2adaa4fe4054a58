"""Reads one tensor's residency, exactly, moving nothing.

The rules: attributes and pointers only; no operation on a wrapper (some raise on a split parameter), no ``.data``,
``.item()`` or ``repr``; no reference to a tensor outlives the call. A reading is a **key**, a tuple of cheap hashable
values that is turned into a `Residency` once per distinct key, and an **identity**, the address of the storage's C++
object, by which an exchange of the storage is noticed. A storage that is still the one of the last reading is not asked
again what only another storage could answer otherwise (where it is, whether it is pinned); a reading without ``known``
asks all. `quiet()` keeps the caller's dispatch and
function modes from seeing the one operator that asking needs (``is_pinned``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.trace.schema import Residency

Key = tuple[Any, ...]
#: Identity of a tensor that has no storage to name.
NO_STORAGE = 0
#: Where a key says whether the local shape is the promised one.
SHAPE_AGREES = 7

_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, nn.Parameter)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, no dispatch mode and no function mode of the caller sees our reading."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def read(
    tensor: torch.Tensor, like: torch.Size | None = None, known: Key | None = None, known_storage: int = NO_STORAGE
) -> tuple[Key, int]:
    """Key and identity of any tensor. ``like``: the local shape that it should have; without it a DTensor is held
    against its own layout.

    Never raises: what cannot be read becomes part of the key.
    """
    try:
        cls = type(tensor)
        device = tensor.device
        inner = tensor if cls in _PLAIN else internals.innermost(tensor)
        if inner is None:
            return _unreadable(tensor, f"the bytes of a {cls.__name__} cannot be found"), NO_STORAGE
        storage = inner.untyped_storage()
        identity = storage._cdata
        wants_grad = tensor.requires_grad
        same = known is not None and identity == known_storage and known[0] == cls.__name__
        if known is not None and same and known[1] == device and known[9] == wants_grad:
            return known[:10], identity
        mesh, agrees = None, True
        outer = internals.local_tensor(tensor)
        if outer is not None:
            mesh = internals.mesh_device(internals.dtensor_mesh(tensor))
            promised = like if like is not None else internals.promised_local_shape(tensor)
            agrees = promised is None or tuple(outer.shape) == tuple(promised)
        place = storage.device
        pinned = inner.is_pinned() if place == _CPU else None
        empty = inner.numel() == 0
        return (
            cls.__name__, device, place, tensor.dtype, (inner if outer is None else outer).dtype, pinned, mesh, agrees,
            empty, wants_grad,
        ), identity  # fmt: skip
    except Exception as error:  # a tensor without storage (sparse, fake, functional), or a torch with other names
        why = type(error).__name__ if isinstance(tensor, torch.Tensor) else "no tensor"
        return _unreadable(tensor, why), NO_STORAGE


def read_managed(
    param: torch.Tensor,
    fsdp_param: Any,
    slot: object,
    sharded: Any,
    known: Key | None = None,
    known_storage: int = NO_STORAGE,
) -> tuple[Key, int]:
    """Key and identity of a parameter that FSDP2 manages.

    ``param`` is ``FSDPParam.sharded_param``, ``slot`` what the module's slot holds now, ``states`` the words for
    ShardedState.
    """
    try:
        outer = local = param._local_tensor  # type: ignore[attr-defined]
        gathered = fsdp_param._sharded_param_data
        if type(outer) is not torch.Tensor:  # of one family: bytes are compared with bytes, not with a wrapper's
            local, gathered = internals.innermost(outer), internals.innermost(gathered)
            if local is None or gathered is None:
                return _unreadable(param, "the local tensor's bytes cannot be found"), NO_STORAGE
        storage = local.untyped_storage()
        identity = storage._cdata
        if known is not None and identity == known_storage and len(known) > 15:
            place, pinned, mesh, roomy = known[2], known[5], known[6], known[15]
        else:
            place = storage.device
            pinned = local.is_pinned() if place == _CPU else None
            mesh = fsdp_param._sharding_spec.mesh.device_type
            # Padding makes a shard larger by less than a row per rank; a view of the whole tensor keeps all of it.
            roomy = storage.nbytes() >= 2 * max(gathered.nbytes, local.nbytes) > 0
        flat = gathered.untyped_storage()
        if flat._cdata == identity:
            flat_place, flat_pinned, aliased = place, pinned, True
        else:
            flat_place, aliased = flat.device, False
            flat_pinned = gathered.is_pinned() if flat_place == _CPU else None
        size = outer.shape
        state = fsdp_param.sharded_state
        key = (
            "DTensor",
            param.device,
            place,
            param.dtype,
            outer.dtype,
            pinned,
            mesh,
            size == fsdp_param.sharded_size,
            size.numel() == 0,
            param.requires_grad,
            flat_place,
            flat_pinned,
            aliased,
            slot is param or state is not sharded,
            state,
            roomy,
        )
        return key, identity
    except Exception as error:
        return _unreadable(param, f"{type(error).__name__}: {error}"[:200]), NO_STORAGE


#: What a key may end with: `Residency.shares`, `Residency.arrival`, the word for `unwritten`, and, as bytes, a digest.
SHARES = ("tie", "apart", "parameter", "written", "stale")
ARRIVALS = (UNDER_WAY, EARLY) = ("under way", "read early")
UNWRITTEN = "unwritten"
_ENDS = frozenset((*SHARES, *ARRIVALS, UNWRITTEN))


def decode(key: Key) -> Residency:
    """The record of a key."""
    ends: list[str | bytes] = []
    while isinstance(last := key[-1], bytes) or (isinstance(last, str) and last in _ENDS):
        ends.append(last)
        key = key[:-1]
    shares = next((end for end in ends if end in SHARES), None)
    if key[0] is None:
        return Residency(metadata_device=str(key[1]), wrapper=str(key[2]), shares=shares, unreadable=str(key[3]))
    wrapper, device, place, dtype, local_dtype, pinned, mesh, agrees, empty, wants_grad, *managed = key
    flat_place, flat_pinned, aliased, registered, state, roomy = managed or (None,) * 6
    return Residency(
        metadata_device=str(device),
        storage_device=str(place),
        dtype=_dtype(dtype),
        storage_dtype=_dtype(local_dtype),
        pinned=pinned,
        wrapper="Tensor" if wrapper in ("Tensor", "Parameter") else wrapper,
        mesh_device=mesh,
        shape_agrees=agrees,
        empty=empty,
        requires_grad=wants_grad,
        flat_device=None if flat_place is None else str(flat_place),
        flat_pinned=flat_pinned,
        aliased=aliased,
        registered=registered,
        sharded_state=internals.enum_name(state),
        roomy=bool(roomy),
        shares=shares,
        unwritten=UNWRITTEN in ends,
        digest=next((end.hex() for end in ends if isinstance(end, bytes)), None),
        arrival=next((end for end in ends if end in ARRIVALS), None),
    )


def residency(tensor: torch.Tensor, fsdp_param: Any = None) -> Residency:
    """Where one tensor lives; ``fsdp_param`` is FSDP2's record of it, where there is one.

    >>> residency(torch.zeros(2)).short()
    'cpu/cpu'
    """
    with quiet():
        if fsdp_param is None:
            key, _ = read(tensor)
        else:
            module, name = internals.param_slots(fsdp_param)[0]
            slot = module._parameters.get(name)
            key, _ = read_managed(fsdp_param.sharded_param, fsdp_param, slot, internals.sharded())
    return decode(key)


def _unreadable(tensor: torch.Tensor, why: str) -> Key:
    try:
        device = str(tensor.device)
    except Exception:
        device = "?"
    return (None, device, type(tensor).__name__, f"{why}, on torch {torch.__version__}")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
