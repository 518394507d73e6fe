"""Values that differ between the ranks of a job, and how a load distributes them if the number of ranks has changed."""

from __future__ import annotations

from typing import Any

from ._errors import Error, Problem, refused

POLICIES = ("refuse", "replicate", "merge", "split", "drop")


class PerRank:
    """An entry of a state dict that differs between ranks: a random generator, the position in the data.

    value: a value, or an object with state_dict() and load_state_dict(), whose state is a value (no tensors). After
    `load`, `value` is this rank's value; an object got it through load_state_dict().
    policy: what a rank gets if the checkpoint was saved by another number of ranks.
        "refuse": an error on all ranks, before any tensor is read.
        "replicate": the value of rank r mod N, where N ranks saved.
        "merge": the list of all values, by rank, also if the number of ranks is the same.
        "split": if the values are lists, they are joined in rank order, and each rank gets an equal part. Other values: the
        value of the same rank; a new rank r gets `branch(saved, r)` of its object, where saved is the value of rank r mod N.
        "drop": nothing is loaded; the value stays as it is.

    The checkpoint holds the values of all ranks as one list, named `NAME.ranks`, as checkpoints of Tessera's C++ library do.
    """

    def __init__(self, value: Any, policy: str = "refuse"):
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, found {policy!r}")
        self.value: Any = value
        self.policy = policy

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, {self.policy!r})"

    def state(self) -> Any:
        """Returns the value to save."""
        return self.value.state_dict() if self._is_object() else self.value

    def accept(self, value: Any) -> None:
        """Sets the value, or passes it to the object's load_state_dict()."""
        if self._is_object():
            self.value.load_state_dict(value)
        else:
            self.value = value

    def is_left(self, num_saved: int | None, num_ranks: int) -> bool:
        """Returns whether a load does not change the value. num_saved: the number of ranks that saved; None: the checkpoint
        does not have the value."""
        return self.policy == "drop" and num_saved != num_ranks

    def value_for(self, name: str, saved: list[Any], rank: int, num_ranks: int) -> Any:
        """Returns the value that a rank gets from the values of all ranks at the save. Raises Error if the policy refuses."""
        if self.policy == "merge":
            return saved
        if len(saved) == num_ranks:
            return saved[rank]
        if self.policy == "replicate":
            return saved[rank % len(saved)]
        if self.policy != "split":
            raise _refusal(name, "as many ranks as at the save, or a policy (replicate, merge, split, drop)",
                           f"{len(saved)} ranks at the save, {num_ranks} now")
        if all(isinstance(each, list) for each in saved):
            items = [item for each in saved for item in each]
            return items[len(items) * rank // num_ranks:len(items) * (rank + 1) // num_ranks]
        branch = getattr(self.value, "branch", None)
        if branch is None:
            raise _refusal(name, "a list on each rank, or an object with branch()", f"a value of type {type(saved[0]).__name__}")
        return saved[rank] if rank < len(saved) else branch(saved[rank % len(saved)], rank)

    def _is_object(self) -> bool:
        return hasattr(self.value, "state_dict") and hasattr(self.value, "load_state_dict")


def _refusal(name: str, expected: str, found: str) -> Error:
    return refused([], (Problem.of_entry("error", "per rank", name, expected, found),))


class rng:
    """The state of a device's default random generator, to put into a state dict as `PerRank(rng(), "split")`.

    device: "cpu", or a device such as "cuda" or "cuda:1". With "split", ranks that did not exist at the save get random numbers
    of their own.
    """

    def __init__(self, device: str = "cpu"):
        self.device = device

    def __repr__(self) -> str:
        return f"rng({self.device!r})"

    def state_dict(self) -> bytes:
        """Returns the generator's state."""
        import torch

        state = torch.get_rng_state() if self.device == "cpu" else self._module().get_rng_state(self.device)
        return _bytes(state)

    def load_state_dict(self, state: bytes) -> None:
        """Sets the generator's state."""
        import torch

        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if self.device == "cpu":
            torch.set_rng_state(tensor)
        else:
            self._module().set_rng_state(tensor, self.device)

    def branch(self, saved: bytes, rank: int) -> bytes:
        """Returns a generator state for a new rank, made from the saved state of another rank."""
        import torch

        generator = torch.Generator(self.device)
        generator.set_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8))
        drawn = int(torch.randint(2**62, (), generator=generator, device=self.device))
        generator.manual_seed((drawn ^ (0x9E3779B97F4A7C15 * (rank + 1))) % 2**63)  # the odd factor gives neighbouring ranks different seeds
        return _bytes(generator.get_state())

    def _module(self) -> Any:
        import torch

        return getattr(torch, torch.device(self.device).type)


def _bytes(state: Any) -> bytes:
    return bytes(state.numpy().tobytes())
