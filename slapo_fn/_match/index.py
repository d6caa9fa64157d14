"""A forward's graph, indexed by what its operations compute."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's arguments have no types.

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn

from .calls import Attr, Form, counts, form, form_of, plain, size_item, whole_size


class Index:
    """The operations of one graph.

    Attributes:
        owner: The module whose forward it is.
        forms: How each operation is read.
        modules: The modules that are called.
        named: The operations by what they compute, in graph order. What writes in place, and may be seen to, has a name apart.
        nodes: All of the graph's nodes, in order.
        position: The place of each.
        cheap: Operations that only tell about a tensor.
        writes: The positions of operations that write in place.
        tensors: The first node that looks a tensor up, by the tensor's path.
    """

    def __init__(self, graph: fx.Graph, owner: nn.Module) -> None:
        self.owner = owner
        self.forms: dict[fx.Node, Form] = {}
        self.modules: dict[fx.Node, nn.Module] = {}
        self.named: dict[Any, list[fx.Node]] = {}
        self.position: dict[fx.Node, int] = {}
        self.cheap: set[fx.Node] = set()
        self.writes: list[int] = []
        self.tensors: dict[str, fx.Node] = {}
        self._args: dict[fx.Node, Any] = {}
        self.nodes = [*graph.nodes]
        for position, node in enumerate(self.nodes):
            self.position[node] = position
            if node.op == "get_attr":
                self.tensors.setdefault(str(node.target), node)
            elif node.op in ("call_function", "call_method", "call_module"):
                self._enter(node)

    def _enter(self, node: fx.Node) -> None:
        module = None
        if node.op == "call_module":
            module = self.modules[node] = self.owner.get_submodule(str(node.target))
            read = form_of(module)
        elif node.target is getattr:
            read = form("attribute", node.args[1])
        else:
            read = form("call_method", "size") if size_item(node) else form(node.op, node.target)
        self.forms[node] = read
        key = read.key
        if (read.op is not None and read.op.cheap) or (self.cheap and self._counts(node)):
            self.cheap.add(node)
        elif read.writes(node.args, node.kwargs, module) and not self._unseen(node):
            self.writes.append(self.position[node])
            key = ("in place", key) if read.op is not None else key
        self.named.setdefault(key, []).append(node)

    def _counts(self, node: fx.Node) -> bool:
        used = node.all_input_nodes
        return counts(node) and bool(used) and all(one in self.cheap for one in used)

    def _unseen(self, node: fx.Node) -> bool:
        """Whether nobody can tell that a node writes into its argument."""
        target = next(iter(node.all_input_nodes), None)
        if target is None or target in self.cheap:
            return True
        made = self.forms.get(target)
        return made is not None and made.op is not None and not made.op.alias and len(target.users) == 1

    def leaf(self, node: fx.Node) -> Any:
        """A node as an argument: a tensor that is looked up goes by its path."""
        return Attr(str(node.target)) if node.op == "get_attr" else node

    def args(self, node: fx.Node) -> Any:
        """The arguments of an operation, in one order."""
        found = self._args.get(node)
        if found is None:
            found = self._args[node] = self._read(node)
        return found

    def _read(self, node: fx.Node) -> Any:
        if size_item(node):
            return (plain(node.args[0].args[0], self.leaf), node.args[1])  # type: ignore[union-attr]
        args, kwargs = self.raw(node)
        path = str(node.target)
        return self.forms[node].read(args, kwargs, self.modules.get(node), lambda name, value: Attr(f"{path}.{name}"))

    def raw(self, node: fx.Node) -> tuple[Any, dict[str, Any]]:
        """The arguments of an operation as they are written."""
        args = node.args[:1] if node.target is getattr else node.args
        return plain(args, self.leaf), {name: plain(value, self.leaf) for name, value in node.kwargs.items()}

    def tensor(self, path: str) -> Tensor | None:
        """A tensor of the owner by its path; None if there is none."""
        try:
            found = attrgetter(path)(self.owner)
        except AttributeError:
            return None
        return found if isinstance(found, Tensor) else None

    def users(self, node: fx.Node) -> int:
        """How many operations, cheap ones left out, use a node's value."""
        return len(node.users) - (sum(user in self.cheap for user in node.users) if self.cheap else 0)

    def reached(self, node: fx.Node) -> list[fx.Node]:
        """What uses a node's value, an item of its shape among it."""
        return [one for user in node.users for one in (user, *(user.users if whole_size(user) else ()))]
