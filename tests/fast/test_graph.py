"""A step as a CUDA graph, whose results come to the host."""

import pytest
import torch

from fast.graph import CapturedStep
from generate import to_host


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_steps_results_are_the_hosts_while_the_next_step_runs():
    x = torch.zeros(3, 370, device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        x.add_(1)
        return x.long(), x.t() / 4, x[0, :1].int()

    launch, held = CapturedStep(step, step()), None
    # In memory that is free.
    others = [torch.full((3,), 7, device="cuda", dtype=torch.int32) for _ in range(99)]
    for n in range(2, 40):
        launched = to_host(launch())
        if held:  # of the launch before
            whole, quarters, one = held()
            assert whole.equal(torch.full((3, 370), n - 1)) and quarters.equal(
                torch.full((370, 3), (n - 1) / 4)
            )
            assert one.tolist() == [n - 1] and whole.is_pinned()
        held = launched
    assert torch.stack(others).eq(7).all()
