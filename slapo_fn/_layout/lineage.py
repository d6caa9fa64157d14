"""What the tensors of a model were before it was transformed: the maps that its modules carry, one over the other.

h.0.mlp (base.weight: weight, over gate_up.weight: cat("gate.weight", "up.weight"))   ->   h.0.mlp.base.weight:
cat("h.0.mlp.gate.weight", "h.0.mlp.up.weight")

A map's names on the left are those that the modules inside give back; so a module inside can be replaced later on,
with a map of its own, and the outer one still holds.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# torch leaves named_modules without types.

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

from torch import Tensor, nn

from .._tree import below, join, own_tensors
from ..errors import WeightsError
from .inverse import over
from .sources import Cat, Shape, Source, WeightMap, names, rename, resolved

Place: TypeAlias = tuple[dict[str, Any], str]
ATTRIBUTE = "weight_map"


def places(module: nn.Module) -> dict[str, Place]:
    """Every parameter and persistent buffer by its dotted name: the table that holds it, and its name there."""
    found: dict[str, Place] = {}
    for path, one in module.named_modules(remove_duplicate=False):
        for held, skip in ((one._parameters, frozenset[str]()), (one._buffers, one._non_persistent_buffers_set)):
            table: dict[str, Any] = held
            found.update(
                (join(path, name), (table, name)) for name, t in table.items() if t is not None and name not in skip
            )
    return found


def declare(module: nn.Module, sources: Mapping[str, Source], up: int = 0) -> None:
    """Let a module carry a map, or none if there is nothing to say."""
    if sources:
        vars(module)[ATTRIBUTE] = WeightMap(tuple(sources.items()), up)
    else:
        vars(module).pop(ATTRIBUTE, None)


def folded(module: nn.Module) -> list[str]:
    """The paths of modules whose tensors cannot be given back: their ``weight_map`` is None on purpose."""
    paths = module.named_modules(remove_duplicate=False)
    return [path for path, one in paths if vars(one).get(ATTRIBUTE, module) is None]


# ---- read


def origins(
    module: nn.Module, keys: Iterable[str], path: str = "", without: Callable[[nn.Module], bool] = lambda one: False
) -> dict[str, Source]:
    """Where tensors of a module come from, by the maps that it and the modules inside it carry.

    Args:
        module: The module.
        keys: The names of its tensors, from the root.
        path: Where it stands.
        without: Modules whose maps do not count.

    Returns:
        Each name with its source, all from the root.

    Raises:
        WeightsError: A map leads above the root.
    """
    tables = _tables(module, path, without)
    found: dict[str, Source] = {key: key for key in keys}
    users: dict[str, set[str]] = {key: {key} for key in found}
    for depth in sorted(tables, reverse=True):
        outer = {name for other, table in tables.items() if other < depth for name in table}
        table = {name: source for name, source in tables[depth].items() if not _is_left_to(outer, name, source)}
        touched = [name for name in table if name in users]
        for key in {key for name in touched for key in users.pop(name)}:
            source = found[key] = over(found[key], table)
            for name in names(source):
                users.setdefault(name, set()).add(key)
    return found


def _tables(module: nn.Module, path: str, without: Callable[[nn.Module], bool]) -> dict[int, dict[str, Source]]:
    """What the maps say, from the root, by how deep the modules stand that carry them."""
    tables: dict[int, dict[str, Source]] = {}
    for inner, one in module.named_modules(remove_duplicate=False):
        given = vars(one).get(ATTRIBUTE)
        if isinstance(given, WeightMap) and not without(one):
            place = f"{path}.{inner}".strip(".")
            segments = place.split(".") if place else []
            if given.up > len(segments):
                raise WeightsError(
                    f"the weight_map of {place or 'the root'} leads {given.up} up, above the root", [place]
                )
            base = _above(place, given.up)
            table = tables.setdefault(len(segments), {})
            table.update((join(place, name), rename(one, partial(join, base))) for name, one in given.sources)
    return tables


def _above(place: str, up: int) -> str:
    return ".".join(place.split(".")[:-up]) if up else place


def _is_left_to(outer: Container[str], name: str, source: Source) -> bool:
    """Whether a map further out says itself where a tensor comes from, and not where the inner map's names do."""
    return name in outer and not any(one in outer for one in names(source))


# ---- write


def record(new: nn.Module, old: nn.Module, path: str = "", old_path: str | None = None) -> None:
    """Note on a new module where its tensors come from, before it is put in the place of another.

    That is known where it holds the old one's tensors, under other names say; where it, or a module that it was made
    with, carries a map already; and where a new tensor has the name and shape of an old one.

    Args:
        new: The new module; its attribute ``weight_map`` is set, if there is anything to say.
        old: The module in whose place it will stand.
        path: The place.
        old_path: Where the old one's names start, if that is elsewhere.

    Raises:
        WeightsError: A map that was declared does not fit the old module's tensors.
    """
    from_path = path if old_path is None else old_path
    if from_path == path and _is_as_before(new, old):
        return
    was, now = list(below(old)), list(below(new))
    if ATTRIBUTE not in vars(new) and _lost(was, now):
        vars(new)[ATTRIBUTE] = None
    if vars(new).get(ATTRIBUTE, new) is None:
        return
    theirs, mine = _tensors(old, from_path), _tensors(new, path)
    known: dict[int, list[str]] = {}
    for name, tensor in theirs.items():
        known.setdefault(id(tensor), []).append(name)
    if any(ATTRIBUTE in vars(one) for one in (*was, *now)):
        _write(new, path, _sources(new, old, path, from_path, mine, theirs, known))
    elif moved := {name: had for name, had in _kept(mine, known) if name != had}:
        _write(new, path, moved)


def _is_as_before(new: nn.Module, old: nn.Module) -> bool:
    """Whether no tensor has another name, and no map is carried, in modules without children."""
    if new._modules or old._modules or ATTRIBUTE in new.__dict__ or ATTRIBUTE in old.__dict__:
        return False
    for mine, theirs in ((new._parameters, old._parameters), (new._buffers, old._buffers)):
        for name, tensor in mine.items():
            if tensor is not theirs.get(name) and any(tensor is one for _, one in own_tensors(old)):
                return False
    return True


def _lost(was: Iterable[nn.Module], now: Iterable[nn.Module]) -> bool:
    """Whether a module whose tensors cannot be given back is gone, so that those made of them cannot either."""
    kept = {id(one) for one in now}
    return any(vars(one).get(ATTRIBUTE, one) is None and id(one) not in kept for one in was)


def _tensors(module: nn.Module, path: str) -> dict[str, Tensor]:
    return {join(path, name): held[key] for name, (held, key) in places(module).items()}


def _sources(
    new: nn.Module,
    old: nn.Module,
    path: str,
    old_path: str,
    mine: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    known: Mapping[int, list[str]],
) -> dict[str, Source]:
    """Where each name that the modules inside the new one give back comes from."""
    moved = {id(one) for one in below(old)}
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items() if not nn.parameter.is_lazy(tensor)}
    same = dict(_kept(mine, known))
    prefixes = dict(_settled(new, path, moved, same, shapes))
    before = origins(old, theirs, old_path)
    declared = origins(new, mine, path, lambda one: id(one) in moved)
    inside = origins(new, mine, path, lambda one: one is new)
    found: dict[str, Source] = {}
    for name, tensor in mine.items():
        source = rename(declared[name], lambda one: _with_prefix(one, prefixes, theirs))
        if name in same and not (source != name and all(one in theirs for one in names(source))):
            source = same[name]
        elif source == name and (name not in theirs or tensor.shape != theirs[name].shape):
            continue  # a tensor that nothing says anything about
        source = over(source, before)
        if not _match(inside[name], source, found):
            found[name] = source
    return found


def _kept(mine: Mapping[str, Tensor], known: Mapping[int, list[str]]) -> Iterator[tuple[str, str]]:
    """The names of old tensors with their old names; of several that a tied one had, each once, the most alike first."""
    used = {name for name, tensor in mine.items() if name in known.get(id(tensor), ())}
    for name, tensor in mine.items():
        olds = known.get(id(tensor), [])
        if name in olds:
            yield name, name
        elif olds:
            best = max(olds, key=lambda old: (old not in used, _alike(old, name)))
            used.add(best)
            yield name, best


def _alike(one: str, other: str) -> int:
    """How many of the last segments of two names are the same."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _settled(
    new: nn.Module, path: str, moved: Container[int], same: Mapping[str, str], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, str]]:
    """Let the maps that were made with a new module know their sizes; gives the paths that they should begin with, where
    a module was made of one at another path, which its map cannot know.
    """
    for inner, one in new.named_modules():
        given = vars(one).get(ATTRIBUTE)
        if not isinstance(given, WeightMap) or id(one) in moved:
            continue
        place = f"{path}.{inner}".strip(".")
        base = start = _above(place, given.up)
        wanted = {name for _, source in given.sources for name in names(source)}
        if not any(join(base, name) in shapes for name in wanted):
            fits = _fits(wanted, shapes)
            kept = [(same[join(place, name)], source) for name, source in given.sources if join(place, name) in same]
            sure = [other for other in fits if any(had == join(other, str(source)) for had, source in kept)]
            start = found[0] if len(found := sure or fits) == 1 else base
            yield base, start
        if all(join(start, name) in shapes for name in wanted):
            local = {name: shapes[join(start, name)] for name in wanted}
            vars(one)[ATTRIBUTE] = replace(
                given, sources=tuple((name, resolved(source, local)) for name, source in given.sources)
            )


def _fits(wanted: Collection[str], known: Iterable[str]) -> list[str]:
    """The paths under which all of some names are known."""
    there, last = set(known), "." + next(iter(wanted), "")
    fits = [f".{name}".removesuffix(last)[1:] for name in there if f".{name}".endswith(last)]
    return [path for path in fits if all(join(path, name) in there for name in wanted)]


def _with_prefix(name: str, prefixes: Mapping[str, str], theirs: Container[str]) -> str:
    if name not in theirs:
        for prefix, other in prefixes.items():
            rest = name.removeprefix(prefix + ".") if prefix else name
            if (not prefix or rest != name) and join(other, rest) in theirs:
                return join(other, rest)
    return name


def _match(have: Source, want: Source, found: dict[str, Source]) -> bool:
    """Find what the names in one source have to come from, for it to be another; False if it cannot be."""
    if isinstance(have, str):
        return found.setdefault(have, want) == want
    if isinstance(have, Cat) and isinstance(want, Cat):
        if (have.dim, have.sizes) != (want.dim, want.sizes):
            return False
        return all(_match(one, other, found) for one, other in zip(have.sources, want.sources, strict=True))
    if isinstance(have, Cat) or isinstance(want, str | Cat) or replace(have, source="") != replace(want, source=""):
        return False
    return _match(have.source, want.source, found)


def _write(new: nn.Module, path: str, found: Mapping[str, Source]) -> None:
    """Let a module carry what was found, relative to its path."""
    mine = {
        name: source for name, source in found.items() if source != name and (not path or name.startswith(path + "."))
    }
    base, up = path, 0
    while base and not all(one.startswith(base + ".") for source in mine.values() for one in names(source)):
        base, up = base.rpartition(".")[0], up + 1
    start, cut = len(path) + bool(path), len(base) + bool(base)
    declare(new, {name[start:]: rename(source, lambda one: one[cut:]) for name, source in mine.items()}, up)
