"""What every test starts from: one thread, one seed, a fresh compiler."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # to explain takes longer than all the rest
settings.register_profile(
    "quick",
    deadline=None,
    max_examples=25,
    phases=PHASES,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test draws the same random numbers, and none inherits another's compiled code."""
    torch.manual_seed(0)
    yield
    if torch._dynamo.utils.counters:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
