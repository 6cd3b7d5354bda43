import torch

from unequal.models.vector_math import FUNCTIONS, settle


def test_every_function_exists_and_is_called_without_harm():
    settle()
    assert all(callable(getattr(torch, name)) for name in FUNCTIONS)
    values = torch.linspace(0.1, 3, 200_000)
    for name in ("exp", "log", "sqrt", "tanh"):
        exact = getattr(torch, name)(values.double())
        torch.testing.assert_close(getattr(torch, name)(values).double(), exact, rtol=1e-6, atol=1e-7)
