"""Random options of a move that change what a state dict holds, and the state dict that they must make of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from differences import flatten, is_opened, memory_of, name_of, remade, spelled, tensors_of
from random_state import with_keys

MODELS = {"model", "state_dict", "module", "net"}
OPTIMIZERS = {"optim", "optimizer", "optim_d"}
MISSING = object()


@dataclass
class Change:
    """`expect` returns the state dict that the move must make, given the one that it made."""

    options: list
    expect: Callable
    num_left_out: int | None = None
    names: list | None = None  # the new names of the parameters of an optimizer that numbers them


def glob_of(name):
    """Returns a pattern that fits only this name, after a `!`, `=` or `*`."""
    return "".join("\\" + letter if letter in "*?[\\!" else letter for letter in name)


def is_argument(name):
    return bool(name) and "\0" not in name and "\ud800" not in name


def selected(value, keep, path=()):
    """Returns the part of a state dict whose names `keep` takes, or MISSING."""
    if not is_opened(value):
        return value if keep(name_of(path)) else MISSING
    if isinstance(value, dict):
        made = {key: selected(item, keep, (*path, key)) for key, item in value.items()}
        return remade(value, {key: item for key, item in made.items() if item is not MISSING}) or MISSING
    items = [selected(item, keep, (*path, i)) for i, item in enumerate(value)]
    while items and items[-1] is MISSING:
        items.pop()
    return type(value)(None if item is MISSING else item for item in items) if items else MISSING


def mapped(value, change):
    """Returns the state dict with change(leaf) in place of each leaf."""
    if isinstance(value, dict) and is_opened(value):
        return {key: mapped(item, change) for key, item in value.items()}
    return type(value)(mapped(item, change) for item in value) if is_opened(value) else change(value)


def selection(rng, walk):
    """`--only`: names that begin or end as a name of the state dict, or all others."""
    names = list(flatten(walk.state))
    chosen = rng.choice(names)
    parts = chosen.split(".")
    prefix, end = ".".join(parts[:rng.randint(1, len(parts))]), parts[-1]

    def is_below(name):
        return name == prefix or name.startswith(prefix + ".")

    pattern, keep = rng.choice([
        ("=" + glob_of(chosen), lambda name: name == chosen), ("!=" + glob_of(chosen), lambda name: name != chosen),
        (glob_of(prefix), is_below), ("!" + glob_of(prefix), lambda name: not is_below(name)),
        ("*" + glob_of(end), lambda name: end + "." in name + ".")])
    kept = selected(walk.state, keep)
    if not is_argument(chosen) or not prefix or not end or pattern.startswith(("==", "!==")) or kept is MISSING:
        return None
    return Change(["--only", pattern], lambda found: kept, sum(not keep(name) for name in names))


def renaming(rng, walk):
    """`--rename`: an outermost key gets another name, or all names get a prefix. So do the entries of single ranks."""
    state = remade(walk.state, {key: item for key, item in walk.state.items() if key != "per_rank"})
    own = walk.state.get("per_rank", {})
    is_dotted = any(isinstance(key, str) and key.startswith(f"{spelled(other)}.") for key in state for other in state)
    if not isinstance(own, dict) or not all(isinstance(values, dict) for values in own.values()):
        return None
    fitting = [key for key in state if not is_dotted and isinstance(key, str) and is_argument(key) and not set("=.") & set(key)
               and not any(name.startswith((key, "renamed")) and name.split(".")[0] != key for name in flatten(state))]
    key = rng.choice([*fitting, ""])
    is_flat = all(path == (name,) for name, (path, _) in flatten(state).items())

    def renamed(entries):
        if key:
            return remade(entries, {"renamed" if k == key else k: item for k, item in entries.items()})
        return remade(entries, {f"run.{k}": item for k, item in entries.items()}) if is_flat else {"run": entries}

    change = renamed(state)
    if own:
        change["per_rank"] = {rank: renamed(values) for rank, values in own.items()}
    return Change(["--rename", f"{key}=renamed" if key else "=run."], lambda found: change)


def is_named(optimizer):
    """Returns whether an optimizer has names, not numbers, for its parameters. None: it is no optimizer."""
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        return None
    groups = optimizer["param_groups"]
    if not all(isinstance(group, dict) and "params" in group for group in groups):
        return None
    listed = [name for group in groups for name in group["params"]]
    kinds = {type(name) for name in [*listed, *optimizer["state"]]}
    return kinds == {str} if kinds in ({str}, {int}) and set(optimizer["state"]) <= set(listed) else None


def is_trained(state):
    """Returns whether a state dict is that of a trainer: one model, and optimizers of its parameters."""
    models = MODELS & state.keys()
    others = [name.split(".") for name, (path, _) in flatten(state).items() if path[0] not in OPTIMIZERS]
    return (len(models) == 1 and all(isinstance(state[key], dict) for key in models) and "per_rank" not in state
            and all(is_named(state[key]) is not None for key in OPTIMIZERS & state.keys())
            and not any({"state", "param_groups"} & set(words) for words in others))


def recipe(rng, walk):
    """`--recipe`: a tensor of the model gets another name, and may be transposed. Its state under names follows."""
    state = walk.state
    [key], tensors = MODELS & state.keys(), tensors_of(state)
    fitting = [name for name, tensor in state[key].items() if isinstance(tensor, torch.Tensor) and isinstance(name, str)
               and is_argument(name) and not set("{}*") & set(name)
               and not any(other.startswith(f"{key}.{name}.") for other in tensors)]
    if not fitting or "by_recipe" in state[key]:
        return None
    name = rng.choice(fitting)
    shape, named = state[key][name].shape, {k for k in OPTIMIZERS & state.keys() if is_named(state[k])}
    is_tied = sum(memory_of(other) == memory_of(state[key][name]) for other in tensors.values()) > 1
    has_numbers = named != OPTIMIZERS & state.keys()
    turn = len(shape) == 2 and not (is_tied or has_numbers or state[key][name].requires_grad) and rng.random() < 0.7

    def new(old):
        return "by_recipe" if old == name else old

    def turned(items):
        """Returns {name: leaf or dict of leaves} under the new names."""
        return {new(old): mapped(item, turn_leaf) if old == name else item for old, item in items.items()}

    def turn_leaf(leaf):
        return leaf.detach().t() if turn and isinstance(leaf, torch.Tensor) and leaf.shape == shape else leaf

    made = {**state, key: remade(state[key], turned(state[key]))}
    made |= {k: {**with_keys(state[k], new), "state": turned(state[k]["state"])} for k in named}
    rule = {"from": name, "to": "by_recipe"} | ({"ops": [{"transpose": [0, 1]}]} if turn else {})
    file = walk.new_file("recipe", {"schema": 1, "rest": "keep", "rules": [rule]})
    return Change(["--recipe", file, "--set", f"prefix={key}."], lambda found: made, names=list(map(new, walk.names)))


def without_optimizer(rng, walk):
    left = {key: value for key, value in walk.state.items() if key not in OPTIMIZERS}
    return Change(["--drop-optimizer"], lambda found: left)


def optimizer_names(rng, walk):
    """`--optimizer-params`: numbers become names, by a list or by `auto`, or names become numbers."""
    optimizer = walk.state.get("optim")
    if "model" not in walk.state or OPTIMIZERS & walk.state.keys() != {"optim"}:
        return None
    listed = [key for group in optimizer["param_groups"] for key in group["params"]]
    if is_named(optimizer):
        numbered = walk.state | {"optim": with_keys(optimizer, listed.index)}
        return Change(["--optimizer-params", "numbers"], lambda found: numbered, names=listed)
    if sorted(listed) != list(range(len(walk.names))) or not set(walk.names) <= walk.state["model"].keys():
        return None
    file = walk.new_file("names", [walk.names[number] for number in listed])
    named = walk.state | {"optim": with_keys(optimizer, walk.names.__getitem__)}
    return Change(["--optimizer-params", rng.choice([file, "auto"])], lambda found: named)


def cast(rng, walk):
    """`--cast`. The page says which tensors are cast; of state, also beside a model, the move itself shows it."""
    dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])

    def expect(found):
        results, made, tensors = tensors_of(found), {}, tensors_of(walk.state)
        has_model = any(MODELS & set(name.split(".")) for name in tensors)
        for name, tensor in tensors.items():
            keys = name.split(".")
            is_beside_model = has_model and keys[0] not in MODELS
            may_be_state = is_beside_model or {"state", "param_groups", "optimizers", *OPTIMIZERS} & set(keys)
            is_kept = may_be_state and name in results and results[name].dtype == tensor.dtype
            if is_kept or not tensor.is_floating_point() or not tensor.dim():
                made[memory_of(tensor)] = tensor
        for name, tensor in tensors.items():
            if memory_of(tensor) not in made:
                made[memory_of(tensor)] = rounded(tensor.detach(), dtype, results.get(name))
        return mapped(walk.state, lambda leaf: made[memory_of(leaf)] if isinstance(leaf, torch.Tensor) else leaf)

    return Change(["--cast", str(dtype).removeprefix("torch.")], expect)


def rounded(tensor, dtype, result):
    """Returns the tensor rounded once (torch rounds float64 twice). Its NaNs have the bits of `result`."""
    single = tensor.float() if dtype.itemsize == 2 else tensor
    if tensor.dtype is torch.float64 and dtype.itemsize == 2:  # to odd, so that the second rounding changes nothing
        away = torch.where(tensor > single.double(), torch.inf, -torch.inf).float()
        is_even = single.contiguous().view(torch.int32) & 1 == 0
        is_exact = (single.double() == tensor) | ~single.isfinite()
        single = torch.where(is_even & ~is_exact, torch.nextafter(single, away), single)
    made = single.to(dtype)
    is_like = result is not None and result.shape == made.shape and result.dtype == dtype
    return torch.where(made.isnan() & result.isnan(), result, made) if is_like else made


CHANGES = {selection: 12, renaming: 10, recipe: 20, without_optimizer: 6, optimizer_names: 20, cast: 8}
OF_A_TRAINER = (recipe, without_optimizer, optimizer_names)


def random_change(rng, walk):
    """Returns a change that fits the state dict, or None."""
    if rng.random() < 0.5 or not isinstance(walk.state, dict) or not walk.state:
        return None
    make = rng.choices(list(CHANGES), CHANGES.values())[0]
    if make in OF_A_TRAINER and not is_trained(walk.state) or make is selection and walk.values_vary:
        return None
    return make(rng, walk) if make is renaming or "per_rank" not in walk.state else None
