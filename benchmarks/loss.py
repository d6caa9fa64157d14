"""loss: a head and its cross entropy, chunk by chunk, beside the same with all logits at once: memory and time.

Peak memory is the process's own, in a fresh one for each case, and what the step needs anyway, the gradients, is taken off:
what is left is the logits' share.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import slapo_fn as slapo

from ._measure import Case, Row, in_turn, ms, ratio

VOCABULARY, TOKENS, HIDDEN, ROUNDS = 49_152, 1_024, 576, 3
MIB = 2**20
Step = Callable[[tuple[Tensor, Tensor, Tensor]], tuple[Tensor, ...]]


def plain(given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The loss and its gradients, by torch."""
    x_ND, weight_VD, target_N = given
    loss = F.cross_entropy(F.linear(x_ND, weight_VD), target_N)
    return loss.detach(), *torch.autograd.grad(loss, [x_ND, weight_VD])


def chunked(given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The loss and its gradients, by ours."""
    x_ND, weight_VD, target_N = given
    loss = slapo.nn.linear_cross_entropy(x_ND, weight_VD, target_N)
    return loss.detach(), *torch.autograd.grad(loss, [x_ND, weight_VD])


STEPS: dict[str, Step] = {"plain": plain, "chunked": chunked}


def rows() -> Iterator[Row]:
    """Measure the memory in processes of their own, then the time side by side, on one thread."""
    logits = VOCABULARY * TOKENS * 4
    share = {name: _measured(name) for name in STEPS}
    value = share["chunked"] / share["plain"]
    note = ", ".join(f"{name} {one / MIB:,.0f} MiB" for name, one in share.items())
    yield Row(
        f"linear_cross_entropy, {TOKENS:,} tokens, {VOCABULARY:,} classes: peak memory of a training step beyond its "
        "gradients, over cross_entropy of linear",
        f"{value:.2f}x",
        "at most 0.33x",
        value <= 1 / 3,
        f"{note}; the logits alone are {logits / MIB:,.0f} MiB",
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        few, given = _given(600, 99), _given()
        torch.testing.assert_close(chunked(few), plain(few))
        times = in_turn({name: Case(lambda: given, step) for name, step in STEPS.items()}, ROUNDS, warm_up=0)
    finally:
        torch.set_num_threads(threads)
    value = ratio(times, "chunked", "plain")
    yield Row(
        "the same: time of a training step",
        f"{value:.2f}x",
        "at most 1.15x",
        value <= 1.15,
        f"{ms(times['chunked'])} over {ms(times['plain'])}",
    )


def _given(tokens: int = TOKENS, classes: int = VOCABULARY) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x_ND = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight_VD = torch.empty(classes, HIDDEN).normal_(std=0.05).requires_grad_()
    return x_ND, weight_VD, torch.randint(classes, (tokens,))


def _measured(name: str) -> int:
    command = [sys.executable, "-m", __name__, name]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found: int = json.loads(done.stdout)
    return found


def _peak_beyond_gradients(step: Step) -> int:
    torch.set_num_threads(1)
    step(_given(8, 8))  # its code is loaded before it counts
    given = _given()
    before = _resident("VmRSS")
    grads = step(given)
    return _resident("VmHWM") - before - sum(grad.numel() * grad.element_size() for grad in grads)


def _resident(which: str) -> int:
    """How much memory this process holds now (VmRSS), or has held at most (VmHWM), in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # there, unlike the other, the most is never that of the process that began this one
        line = next(line for line in status.read_text().splitlines() if line.startswith(which))
        return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    print(_peak_beyond_gradients(STEPS[sys.argv[1]]))
