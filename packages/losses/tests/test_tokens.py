import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch
from posttrain_losses import dft, masked_mean, nll, token_logps


def test_token_logps_equals_log_softmax_in_float64():
    logits = (20 * torch.randn(2, 3, 50)).requires_grad_()
    targets = torch.randint(0, 50, (2, 3))
    ours = token_logps(logits, targets)
    wide = logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(ours.double(), wide, rtol=1e-5, atol=1e-5)
    for a, e in zip(torch.autograd.grad(ours.sum(), logits), torch.autograd.grad(wide.sum(), logits), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)
    assert token_logps(logits.bfloat16(), targets).dtype == torch.float32
    assert token_logps(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)).shape == (0,)
    with pytest.raises(ValueError, match=r"targets has shape \(2,\)"):
        token_logps(logits, targets[:, 0])


def test_nll_and_dft_by_hand_and_their_gradients():
    logps = torch.tensor([-0.1, -3.0, 0.0], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(nll(logps), torch.tensor([0.1, 3.0, 0.0], dtype=torch.float64))
    p = logps.detach().exp()
    torch.testing.assert_close(dft(logps), -p * logps)
    torch.testing.assert_close(torch.autograd.grad(dft(logps).sum(), logps)[0], -p)
    torch.testing.assert_close(torch.autograd.grad(nll(logps).sum(), logps)[0], -torch.ones_like(p))


def test_masked_mean_along_any_dimension():
    values = torch.tensor([[1.0, float("nan"), 5.0], [2.0, 4.0, float("inf")]], requires_grad=True)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    assert masked_mean(values, mask).tolist() == masked_mean(values.T, mask.T, dim=0).tolist() == [3.0, 3.0]
    assert masked_mean(values, torch.zeros(3, dtype=torch.bool)).tolist() == [0.0, 0.0]
    (grad,) = torch.autograd.grad(masked_mean(values, mask).sum(), values)
    assert grad.tolist() == [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]
    assert masked_mean(torch.empty(2, 0), torch.empty(2, 0, dtype=torch.bool)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("module", ["head", "metrics", "tokens"])
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"posttrain_losses.{module}"))
    assert result.failed == 0 and result.attempted > 0


def test_example_in_readme():
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert blocks
