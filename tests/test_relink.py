"""References to a replaced module are followed in place, and looked for only where there may be some."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
from torch import nn

import slapo_fn as slapo
from slapo_fn import _relink

SCH = slapo.replace(slapo.Schedule(), nn.GELU, nn.ReLU())


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often every attribute was looked at."""
    seen: list[int] = []
    found = _relink._found
    monkeypatch.setattr(_relink, "_found", lambda modules: seen.append(1) or found(modules))
    return seen


FRESH = """
from torch import nn
import slapo_fn as slapo
from slapo_fn import _relink
_relink._found = None  # to call it is an error
net = nn.Sequential(nn.GELU(), nn.Sequential(nn.GELU(), nn.Linear(2, 2)))
slapo.apply(net, slapo.replace(slapo.Schedule(), nn.GELU, nn.ReLU()), inplace=True)
print(type(net[1][0]).__name__)
"""


def test_modules_that_nothing_refers_to_cost_no_look_at_every_attribute() -> None:
    """In a process of its own: a tool that watches frames holds references, and then the look is taken."""
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=False)
    assert run.stdout == "ReLU\n", run.stderr


@pytest.mark.parametrize("keep", [lambda m: [m], lambda m: {"a": m}, lambda m: (m,), weakref.ref, lambda m: m.forward])
def test_a_reference_to_a_leaf_is_followed(looks: list[int], keep: object) -> None:
    net = nn.Sequential(nn.GELU(), nn.Linear(2, 2))
    net.__dict__["kept"] = keep(net[0])
    slapo.apply(net, SCH, inplace=True)
    kept = net.kept
    found = {list: lambda: kept[0], tuple: lambda: kept[0], dict: lambda: kept["a"], weakref.ref: lambda: kept()}
    assert found.get(type(kept), lambda: kept.__self__)() is net[0]
    assert looks == [1]
