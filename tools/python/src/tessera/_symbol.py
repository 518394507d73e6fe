"""Constants of PyTorch, such as dtypes, which a checkpoint stores by name."""

from __future__ import annotations

from typing import Any


class Symbol(str):
    """The name of a constant of PyTorch: 'torch.float32', 'torch.strided', 'device:cuda:0'."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Symbol({super().__repr__()})"

    def torch(self) -> Any:
        """Returns the torch.dtype, torch.layout, torch.memory_format or torch.device of this name."""
        import torch

        kind, _, device = self.partition(":")
        if kind == "device":
            return torch.device(device)
        found = getattr(torch, self.removeprefix("torch."), None)
        # The name comes from a file, so it must not give access to anything else in torch.
        if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            raise ValueError(f"{self}: expected the name of a dtype, layout, memory format or device of torch")
        return found


def with_constants(value: Any) -> Any:
    """Returns a value in which each Symbol is replaced by the constant of torch that it names."""
    if isinstance(value, Symbol):
        return value.torch()
    if isinstance(value, dict):
        return {with_constants(key): with_constants(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(with_constants(item) for item in value)
    return value
