"""The machinery of one pass. `apply` and `plan` are its loop; what they do not say is here.

model, schedule  ->  fork  ->  (entry, site), (entry, site), …  ->  put  ->  model or problems
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from torch import nn

from ._algebra import empty_options
from ._fork import Fork
from ._graph.subgraph import Subgraph
from ._places import Places
from ._problems import Problem, raised
from ._relink import relink
from ._rng import Rng
from ._rules import Site
from ._text import kind, what
from ._tree import Tree, below, held_collector, join
from .errors import ArgumentError, MisfitError, NoMatchError, SlapoError
from .schedule import Entry, Schedule, traits_of

Model = TypeVar("Model", bound=nn.Module)


class Row(NamedTuple):
    """What one entry did at one place.

    Attributes:
        number: The entry's number in the schedule.
        path: The place.
        before: The class that stood there.
        after: The class that stands there now.
        aliases: Other paths of the same place.
        module: The module that the entry left there.
        replaced: Whether that is another one than before.
        is_part: Whether the place is a part of a forward.
    """

    number: int
    path: str
    before: str
    after: str
    aliases: tuple[str, ...]
    module: nn.Module
    replaced: bool
    is_part: bool = False


class Work(Generic[Model]):
    """One pass of a schedule over a model.

    Iterating gives ``(entry, site)`` in order of execution; each is lowered ``with work:``, which keeps the problem, if
    there is one, and goes on, so that all are told at once.
    """

    # C code, on purpose: a debugger's step-into passes over it and enters the primitive
    __enter__: Any = staticmethod(dict)  # pyright: ignore[reportUnknownVariableType]  # pyrefly: ignore[bad-argument-type]

    def __init__(self, model: Model, schedule: Iterable[Entry[Any]], *, inplace: bool) -> None:
        self.schedule = _checked(model, schedule)
        self.order = sorted(range(len(self.schedule)), key=lambda n: traits_of(self.schedule[n].primitive).phase)
        self.given = model
        self.inplace = inplace
        self.rows: list[Row] = []
        self.skipped: list[tuple[int, str, str]] = []
        self.problems: list[Problem] = []
        self.number = 0
        self.site: Site[nn.Module] | None = None

    # ---- the loop

    def __iter__(self) -> Iterator[tuple[Entry[Any], Site[nn.Module]]]:
        self.rng = Rng()
        self.fork: Fork | None = None
        try:
            with held_collector():
                self.fork = None if self.inplace else Fork(self.given)
                self.tree = Tree(self.fork.root if self.fork else self.given, keep_journal=self.inplace)
                self.places = Places(self.tree, self.fork.memo if self.fork else {})
                yield from self._places()
        except BaseException:  # an interruption, or a loop that was left
            self._abort()
            raise

    def _places(self) -> Iterator[tuple[Entry[Any], Site[nn.Module]]]:
        for number in self.order:
            entry, self.number, self.site = self.schedule[number], number, None
            replaced = len(self.tree.gone)
            self.tree.templates.clear()
            self.rng.begin_entry(f"{entry.name}:{entry.selector.rule}")
            for site in self._sites(entry):
                if len(self.tree.gone) > replaced and not self.tree.holds(site.module):
                    self.skipped.append((self.number, site.path, "inside a module that this entry replaced"))
                    continue
                if self.inplace:
                    self.tree.touch(*below(site.module))
                self.site, site.tree = site, self.tree
                self.rng.begin(f"{site.path}:{entry.name}")
                yield entry, site
            for site, error in self.places.close():
                self.site = site
                self._keep(error)

    def _sites(self, entry: Entry[Any]) -> tuple[Site[nn.Module], ...]:
        try:
            sites = entry.selector.resolve(self.tree.root)
            for rule in empty_options(entry.selector.rule, self.tree.root):
                self.skipped.append((self.number, str(rule), "matches nothing, which is optional"))
            self.places.open(sites)
        except Exception as error:
            self._keep(error)
            return ()
        return sites

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.rng.end()
        if isinstance(error, Exception):
            self._keep(error)
            return True
        if error is not None:
            self._abort()
        return False

    def put(self, site: Site[nn.Module], new: nn.Module) -> None:
        """Let a primitive's result stand at its place.

        Raises:
            MisfitError: It is no module, or one that stands elsewhere already.
            TieError: It would separate tied parameters.
            HookError: It would lose hooks.
        """
        entry, old = self.schedule[self.number], site.module
        if not isinstance(new, nn.Module):
            raise MisfitError(
                f"{entry.name} gave {what(new)} where a module has to stand; to leave a place as it is, give the old module",
                [site.path],
            )
        before, path, aliases = kind(old), site.path, tuple[str, ...]()
        if self.tree.shared(old):
            aliases = tuple(path for path in self.tree.paths(old) if path != site.path)
        if new is not old:
            path = self.places.put(site, new, entry.args, shared=bool(aliases))
        else:
            self.tree.refresh(old)
        if self.fork:  # in place nobody asks for the record
            after = kind(new)
            if site.children:
                path, (before, after) = join(path, f"{{{','.join(site.children)}}}"), site.shown
            self.rows.append(
                Row(self.number, path, before, after, aliases, new, new is not old, isinstance(old, Subgraph))
            )

    # ---- the end

    def finish(self) -> Model:
        """The transformed model.

        Raises:
            SlapoError: There was a problem; nothing was changed.
        """
        try:
            if self.problems:
                raise raised(self.problems)
            self._refuse_written()
            relink(self.tree, self.fork.links if self.fork else None, self.site.module if self.site else None)
            self.rng.restore()
        except BaseException:
            self._abort()
            raise
        return self.tree.root  # type: ignore[return-value]

    def _refuse_written(self) -> None:
        written = self.fork.written() if self.fork else []
        if written:
            places = [name for one in written for name in self.tree.names(one)] or ["a tensor that is no longer there"]
            raise MisfitError(
                f"{', '.join(places)}: a factory or a primitive wrote into it, and the given model shares it and has "
                "changed, too. Make a new tensor, and exchange the two with site.renew(old, new).",
                places,
            )

    def _abort(self) -> None:
        self.rng.restore()
        if "tree" in vars(self):  # it may have been interrupted before
            self.tree.roll_back()

    def _keep(self, error: Exception) -> None:
        """Keep a problem, with the entry, the place and the line that it comes from."""
        entry = self.schedule[self.number]
        if isinstance(error, NoMatchError) and self.site is None:
            if any(known.placed for known in self.problems):
                return  # an earlier entry failed, and this one may only have missed what that would have made
            self._tell_who_took_it(error, entry)
        place = f" at {self.site.path or 'the root'}" if self.site else ""
        said = f"entry {self.number}: {entry!r}, written at {entry.origin or 'an unknown line'}"
        error.add_note(said + place)
        self.problems.append(Problem(error, said, self.site.path if self.site else "", self.site is not None))

    def _tell_who_took_it(self, error: NoMatchError, entry: Entry[Any]) -> None:
        if self.fork is None or not self.rows:
            return
        try:
            sites = entry.selector.resolve(self.given)
        except SlapoError:
            return
        wanted = {site.path for site in sites}
        owners = {site.path.rpartition(".")[0] for site in sites if isinstance(site.module, Subgraph)}
        parts = [row for row in self.rows if row.is_part and row.path.rpartition(".")[0] in owners]
        took = [row for row in self.rows if _is_above(row.path, wanted)]
        if parts and not took:
            error.add_note(
                f"it matches the model as given, but entry {parts[0].number} ({self.schedule[parts[0].number].name}, written at "
                f"{self.schedule[parts[0].number].origin}) has taken the operations {parts[0].before} there, as {parts[0].path}"
            )
            return
        for number in dict.fromkeys(row.number for row in took if row.before != row.after):
            first = next(row for row in took if row.number == number)
            error.add_note(
                f"it matches the model as given, but entry {number} ({self.schedule[number].name}, written at "
                f"{self.schedule[number].origin}) put {first.after} in the place of {first.before} at {first.path}: "
                "select by path alone, without the class"
            )


def _is_above(path: str, wanted: Iterable[str]) -> bool:
    return any(one == path or one.startswith(path + ".") for one in wanted)


def prepare(model: Model, schedule: Iterable[Entry[Any]], *, inplace: bool = False) -> Work[Model]:
    """Begin a pass: check the arguments, fork the model unless it is edited in place, sort the entries by phase."""
    return Work(model, schedule, inplace=inplace)


def _checked(model: nn.Module, schedule: Iterable[Entry[Any]]) -> Schedule:
    if not isinstance(model, nn.Module):
        hint = "; the model comes first: apply(model, schedule)" if isinstance(model, Schedule) else ""
        raise ArgumentError(f"the first argument is {what(model)}, not a model{hint}")
    if isinstance(schedule, Schedule):
        found = schedule
    elif isinstance(schedule, nn.Module) or not isinstance(schedule, Iterable):
        raise ArgumentError(f"the second argument is {what(schedule)}, not a schedule")
    else:
        found = Schedule(schedule)
    for number, entry in enumerate(found):
        if not isinstance(entry, Entry):
            raise ArgumentError(
                f"entry {number} of the schedule is {what(entry)}; build entries with add or a primitive"
            )
    return found
