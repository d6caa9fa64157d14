"""What a new module takes over from the one in whose place it stands: mode, device, dtype, frozenness, hooks, layers.

old (eval, bf16, frozen, hooked)   new (train, float32)   ->   new (eval, bf16, frozen, hooked)
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# torch leaves named_modules and some hook tables without types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ._forward import rewrap
from ._relink import relink_within
from ._text import fold
from ._tree import Tree, all_tensors, below, join
from ._weights import renewed
from .errors import HookError

TABLES = (
    ("_forward_pre_hooks", ("_forward_pre_hooks_with_kwargs",)),
    ("_forward_hooks", ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
    ("_backward_pre_hooks", ()),
    ("_backward_hooks", ()),
)


def inherit(tree: Tree, old: nn.Module, new: nn.Module) -> None:
    """Let a new module take over from the old one, before it is put in the tree.

    Only what is new is changed: modules that were there before keep their mode, and tensors that the tree holds already
    are left alone.

    Raises:
        HookError: A module inside the old one has hooks and is not in the new one.
    """
    if old._modules or new._modules:
        was = {id(module): module for module in below(old)}
        now = {id(module): module for module in below(new)}
        _refuse_lost_hooks(tree, old, new, was, now)
        fresh = [module for key, module in now.items() if key not in was]
    else:
        now, fresh = {id(new): new}, [new]
    for module in fresh:
        if module.training != old.training:
            if len(fresh) == len(now):
                new.train(old.training)  # it reaches only what is new, so a module's own train is heeded
                break
            module.training = old.training
    for module in fresh:
        if module._parameters or module._buffers:
            _tensors(tree, old, new, fresh)
            break
    if has_hooks(old):
        _move_hooks(old, new)
    rewrap(old, new)


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is hooked to a module's forward or backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _refuse_lost_hooks(
    tree: Tree, old: nn.Module, new: nn.Module, was: dict[int, nn.Module], now: dict[int, nn.Module]
) -> None:
    hooked = [m for key, m in was.items() if m is not old and key not in now and has_hooks(m)]
    hooked = [m for m in hooked if all(id(parent) in was for parent, _ in tree.registrations(m))]
    if not hooked:
        return
    theirs = dict(new.named_modules(remove_duplicate=False))
    mine = {id(module): path for path, module in old.named_modules()}
    lost = [module for module in hooked if not _carries(theirs.get(mine[id(module)]), module)]
    if lost:
        paths = [tree.path(module) for module in lost]
        raise HookError(
            f"hooks on {', '.join(fold(paths))} would be lost: these modules are inside {tree.path(old) or 'the root'}, which "
            f"is replaced{_whose(lost)}. Keep the modules in the new one, remove the hooks first, or give inherit=False.",
            paths,
        )


def _carries(new: nn.Module | None, old: nn.Module) -> bool:
    """Whether the module at the same place in the new one, a copy of the old one say, has its hooks."""
    return new is not None and all(vars(old)[table].keys() <= vars(new)[table].keys() for table, _ in TABLES)


def _whose(hooked: list[nn.Module]) -> str:
    found = {getattr(one, "__module__", "") for m in hooked for table, _ in TABLES for one in vars(m)[table].values()}
    if any(name.startswith("transformers.") for name in found):
        return (
            " (they are transformers' own, from a forward that gave hidden states or attentions: transform it before)"
        )
    return ""


def _tensors(tree: Tree, old: nn.Module, new: nn.Module, fresh: list[nn.Module]) -> None:
    mine = dict(old.named_parameters())
    known = all_tensors(below(old))
    like = _reference(tree, old)
    frozen = {name for name, tensor in mine.items() if not tensor.requires_grad}
    wraps = any(module is old for module in below(new))
    all_frozen = bool(mine) and len(frozen) == len(mine) and not wraps
    made: dict[int, Tensor] = {}
    names = {id(module): path for path, module in new.named_modules()}
    for module in fresh:
        for held, convert in ((module._parameters, True), (module._buffers, False)):
            tensors: dict[str, Any] = held
            for name, tensor in tensors.items():
                if tensor is None or id(tensor) in known or like is None:
                    continue
                freeze = convert and (all_frozen or join(names[id(module)], name) in frozen)
                dtype = convert or name not in module._non_persistent_buffers_set
                if id(tensor) not in made:
                    made[id(tensor)] = _like(tensor, like, dtype, freeze, lambda t: bool(tree.slots(t)))
                tensors[name] = made[id(tensor)]
    relink_within(new, {key: tensor for key, tensor in made.items() if id(tensor) != key})


def _reference(tree: Tree, old: nn.Module) -> Tensor | None:
    """A floating tensor that tells device and dtype: the old module's own, else its nearest ancestor's."""
    near: list[nn.Module] = [old, *(parent for parent, _ in tree.registrations(old)[:1]), tree.root]
    for module in near:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                return tensor
    return None


def _like(tensor: Tensor, like: Tensor, dtype: bool, freeze: bool, in_tree: Callable[[Tensor], bool]) -> Tensor:
    """A tensor on the device and, where asked and floating, of the dtype of another; itself if it is so already."""
    to_dtype = like.dtype if dtype and tensor.is_floating_point() else tensor.dtype
    grad = tensor.requires_grad and not freeze
    same = tensor.device == like.device and tensor.dtype == to_dtype and tensor.requires_grad == grad
    if same or tensor.is_meta or isinstance(tensor, nn.UninitializedParameter) or in_tree(tensor):
        return tensor
    return renewed(tensor, device=like.device, dtype=to_dtype, requires_grad=grad)


def _move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hang the old module's very tables of hooks on the new one, so that handles on them still remove their hooks; the
    new module's own hooks come after.
    """
    mine, theirs = vars(old), vars(new)
    if mine["_backward_hooks"] and not theirs["_backward_hooks"]:
        theirs["_is_full_backward_hook"] = mine["_is_full_backward_hook"]
    for table, flags in TABLES:
        if not mine[table]:
            continue
        for key in (table, *flags):
            added, empty = theirs[key], type(mine[key])()
            mine[key].update(added)
            theirs[key], mine[key] = mine[key], empty
