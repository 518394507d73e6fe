"""Makes random state dicts: what trainers save, and what they could save. Each is a function of a seed."""

import argparse
import collections
import datetime
import io
import math
import pathlib
import random

import numpy as np
import torch
from torch import optim

DTYPES = [getattr(torch, name) for name in """
    float32 bfloat16 float16 float64 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex64 complex128
    complex32 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2""".split()]
OPTIMIZERS = [getattr(optim, name) for name in """
    AdamW AdamW Adam SGD Adagrad RMSprop Adadelta NAdam RAdam Rprop ASGD Adafactor LBFGS""".split()]
WORDS = "w weight bias fc block layers emb norm up head a b scale step exp_avg rng ema scales.0 scales.1".split()
ODD_WORDS = """. a. .a a..b 0 1 00 -1 10 Ж é 名前 😀 a=b = * ? [0] !a \\ / ../x per_rank ~tessera __metadata__ $x $tuple
    tessera.values state param_groups optim model extra_state _extra_state value tensor %s None True 1.5 model.w
    optim.state state.0 names shape dtype data_offsets format format.x ranks ' \"""".split() + [
    "", "e\u0301", "a b", "(1, 2)", "\n", "\t", "a\u2028b", "\x7f", "\x00", "x" * 300]
ODD_KEYS = [0, 1, 2, 10, -1, 2**70, True, False, None, 1.5, math.inf, (1, "a"), ("x", ("y", 2)), b"k", 2 + 3j, (),
            torch.float32, torch.device("cpu"), frozenset((1, 2)), torch.Size((1, 2))]
NUMBERS = [0, 1, -1, 7, 2**31, 2**53 + 1, -(2**63), 2**63, 2**64, 10**40, -(2**200), 0.1, -0.0, 1e-320, 1e308, math.nan,
           math.inf, -math.inf, True, False]
TEXTS = ["", "adamw", "a\nb", "Ж😀", "\ud800", "\x00", "x" * 200, '{"$tuple": []}', "\u2028", "torch.float32", "nan"]
NUMPY_NUMBERS = [np.float64(0.1), np.float32(0.1), np.int64(-5), np.uint8(200), np.bool_(True), np.float16(0.5),
                 np.uint64(2**64 - 1)]
NAN_WITH_A_PAYLOAD = float(np.frombuffer(np.uint64(0xFFF8000000000123).tobytes(), np.float64)[0])
REFUSED = [datetime.datetime(2024, 1, 2), argparse.Namespace(lr=0.1), range(3), np.arange(4.0), collections.deque([1]),
           [1, datetime.date(2024, 1, 1)], {"x": datetime.date(2024, 1, 1), "y": 1}]


class StateMaker:
    """Makes one state dict. `wild`: with names and types that no trainer uses, but that Python allows."""

    def __init__(self, rng: random.Random, wild: bool):
        self.rng, self.wild = rng, wild
        self.tensors, self.names = [], []  # what was made, to make it again
        self.torch_rng = torch.Generator().manual_seed(rng.getrandbits(32))

    def chance(self, probability):
        return self.rng.random() < probability

    # Names and keys

    def word(self):
        if self.names and self.chance(0.15):  # a name that begins or ends as another one
            name = self.rng.choice(self.names)
            return self.rng.choice([name + "_a", self.rng.choice(WORDS) + "." + name, name[1:] or "w", name[:-1] or "w",
                                    name + self.rng.choice("01"), "block." + name])
        return self.rng.choice(ODD_WORDS if self.wild and self.chance(0.25) else WORDS)

    def text_key(self):
        self.names.append(".".join(self.word() for _ in range(self.rng.choice([1, 1, 1, 2, 3]))))
        return self.names[-1]

    def key(self):
        return self.rng.choice(ODD_KEYS) if self.wild and self.chance(0.12) else self.text_key()

    # Tensors

    def normal(self, shape, dtype=torch.float32):
        return torch.randn(shape, generator=self.torch_rng, dtype=torch.float64).to(dtype)

    def bits(self, shape, dtype):
        """Returns a tensor of random numbers, or of random bits: also NaNs with payloads and denormal numbers."""
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=self.torch_rng).to(torch.bool)
        if self.chance(0.5) and dtype in DTYPES[:4]:
            return self.normal(shape, dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 256, (nbytes,), generator=self.torch_rng, dtype=torch.uint8)
        return raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)

    def shape(self):
        if self.chance(0.005):
            return [self.rng.randint(200, 900), self.rng.randint(200, 700)]
        num_dims = 0 if self.chance(0.12) else self.rng.choice([1, 1, 2, 2, 2, 3, 4])
        return [0 if self.chance(0.04) else self.rng.choice([1, 1, 2, 3, 4, 5, 7, 8, 16]) for _ in range(num_dims)]

    def tensor(self):
        if self.tensors and self.chance(0.18):
            return self.again(self.rng.choice(self.tensors))
        made = self.bits(self.shape(), self.rng.choice(DTYPES if self.chance(0.6) else DTYPES[:2]))
        if made.dtype is not torch.float4_e2m1fn_x2 and self.chance(0.25):
            made = self.strided(made)
        if self.chance(0.08) and (made.is_floating_point() or made.is_complex()):
            made = torch.nn.Parameter(made) if self.chance(0.6) else made.detach().requires_grad_()
        elif self.chance(0.04):
            made = torch.nn.Buffer(made) if self.chance(0.5) else torch.nn.Parameter(made, requires_grad=False)
        if self.chance(0.02):
            made.note = "mine"
        self.tensors.append(made)
        return made

    def again(self, tensor):
        """Returns a second name for the same memory, or a view that overlaps it."""
        what, plain = self.rng.randrange(6), tensor.detach()
        if what == 0 and plain.dim() and plain.size(0) > 1:
            return plain[1:]
        if what == 1 and plain.dim() == 2:
            return plain.t()
        if what == 2 and plain.is_contiguous():
            return plain.view(-1)
        return plain if what == 3 else tensor

    def strided(self, tensor):
        """Returns a view with gaps, repetitions or a lazy conjugation, if one fits the tensor."""
        what, num_dims = self.rng.randrange(7), tensor.dim()
        if what == 0 and num_dims >= 2:
            return tensor.transpose(0, -1)
        if what == 1 and num_dims and tensor.size(-1) > 1:
            return tensor[..., ::2]
        if what == 2 and num_dims and tensor.numel():
            return tensor[:1].expand(self.rng.randint(1, 4), *tensor.shape[1:])
        if what == 3 and num_dims and tensor.size(0) > 1:
            return tensor[1:]
        if what in (4, 5) and num_dims and tensor.dtype in (torch.complex64, torch.complex128):
            conjugate = torch.complex(*self.normal([2, *tensor.shape], tensor.real.dtype)).conj()
            return conjugate if what == 4 else conjugate.imag  # whose numbers are the negatives of its bytes
        return tensor.unfold(0, 3, 1) if what == 6 and num_dims == 1 and tensor.numel() > 3 else tensor

    # Values

    def number(self):
        return self.rng.choice([*NUMBERS, self.rng.getrandbits(63), self.rng.gauss(0, 1)])

    def plain(self, depth=0):
        """Returns a value without tensors that Tessera can read."""
        if depth > 3 or self.chance(0.35):
            return self.number()

        def few():
            return (self.plain(depth + 1) for _ in range(self.rng.choice([0, 1, 2, 3])))

        def pairs():
            return {self.key(): item for item in few()}

        rng = self.rng
        kinds = [lambda: rng.choice(TEXTS), lambda: rng.choice(TEXTS), lambda: None, lambda: tuple(few()), pairs,
                 lambda: list(few()), lambda: rng.randbytes(rng.choice([0, 1, 5, 100])),
                 lambda: set(rng.sample([1, "b", 2.5, None, (1, 2), b"x", 2**65, -7], rng.randint(0, 4)))]
        odd = [lambda: complex(rng.choice([0.0, -0.0, math.nan, 1.5]), rng.choice([-2.0, math.inf, -0.0])),
               lambda: frozenset(rng.sample([1, "b", 2.5, (1, 2)], rng.randint(0, 3))), lambda: bytearray(b"ab"),
               lambda: torch.Size((2, 3)), lambda: rng.choice(DTYPES), lambda: torch.device("cuda", 3),
               lambda: torch.strided, lambda: rng.choice(NUMPY_NUMBERS), lambda: np.arange(5, dtype=np.uint32),
               lambda: io.BytesIO(b"mine"), lambda: pathlib.PosixPath("/data/run é"), lambda: NAN_WITH_A_PAYLOAD,
               lambda: collections.Counter({2: 1, "a": 3}), lambda: collections.OrderedDict(pairs() or {"a": 1}),
               lambda: collections.defaultdict(list, pairs())]
        return rng.choice(kinds * 2 + odd if self.wild else kinds)()

    # State dicts

    def tree(self, depth=0):
        """Returns a random container of tensors and values."""
        if depth > 3 or (depth and self.chance(0.55)):
            return self.tensor() if self.chance(0.65) else self.plain()
        num_items = self.rng.choice([0, 1, 2, 2, 3, 4, 5])
        if depth and self.chance(0.38):
            return (list if self.chance(0.6) else tuple)(self.tree(depth + 1) for _ in range(num_items))
        made = {self.key(): self.tree(depth + 1) for _ in range(num_items or depth == 0)}
        return self.with_metadata(made) if made and self.chance(0.12) else made

    def with_metadata(self, state):
        """Returns the state as an OrderedDict, perhaps with the attribute that a module's state_dict() has."""
        ordered = collections.OrderedDict(state)
        if self.chance(0.5):
            ordered._metadata = collections.OrderedDict({"": {"version": 1}})
        return ordered

    def model(self):
        """Returns the state dict of a module of several units."""
        state, units = {}, [self.text_key() for _ in range(self.rng.randint(1, 4))]
        for unit in units * 2:
            made = self.normal(self.shape(), self.rng.choice([torch.float32, *DTYPES[:4]]))
            state[f"{unit}.{self.word()}"] = torch.nn.Parameter(made) if self.chance(0.2) else made
        if len(state) > 1 and self.chance(0.4):
            first, second = self.rng.sample(list(state), 2)
            state[first] = state[second]
        if self.chance(0.4):
            state |= {f"{units[0]}.running_mean": self.normal([3]), f"{units[0]}.num_batches_tracked": torch.tensor(5)}
        if self.chance(0.2):
            state[f"{units[0]}._extra_state"] = self.rng.choice(
                [b"\x80\x04N.", None, io.BytesIO(b"x"), torch.arange(5, dtype=torch.uint8), {"a": 1}])
        return self.with_metadata(state) if self.chance(0.3) else state

    def optimizer(self, model, is_named):
        """Returns the state dict of an optimizer of PyTorch after a step on copies of the model's parameters."""
        names = trained_names(model)
        parameters = [torch.nn.Parameter(model[name].detach().clone().contiguous().float()) for name in names]
        if not parameters:
            return {"state": {}, "param_groups": []}
        cls, cut = self.rng.choice(OPTIMIZERS), self.rng.randrange(len(parameters))
        groups = [{"params": part, "lr": 0.1} for part in (parameters[:cut], parameters[cut:]) if part]
        amsgrad = {"amsgrad": True} if cls in (optim.AdamW, optim.Adam) and self.chance(0.4) else {}
        made = cls(parameters) if cls is optim.LBFGS else cls(groups, lr=0.1, **amsgrad)
        for parameter in [parameters[0], *(p for p in parameters if self.chance(0.9))]:  # the others have no state
            parameter.grad = torch.ones_like(parameter)
        made.step((lambda: sum(p.sum() for p in parameters)) if cls is optim.LBFGS else None)
        for group in made.param_groups if self.chance(0.2) else []:
            group["note"] = self.plain()
        has_names = is_named and cls is not optim.LBFGS
        return with_keys(made.state_dict(), names.__getitem__) if has_names else made.state_dict()

    def train_state(self):
        """Returns what a trainer saves: a model, its optimizers, and what else it needs to continue."""
        model = self.model()
        state = {self.rng.choice(["model", "model", "model", "state_dict", "module", "net"]): model}
        for name in self.rng.sample(["optim", "optim", "optimizer", "optim_d"], self.rng.choice([0, 1, 1, 1, 2])):
            state[name] = self.optimizer(model, is_named=self.chance(0.4))
        rng_states = {"torch": torch.get_rng_state(), "python": random.Random(3).getstate(),
                      "cuda": [torch.get_rng_state()[:16]], "numpy": np.random.RandomState(4).get_state()}
        others = {"optimizers": lambda: [self.optimizer(model, False), self.optimizer(model, False)],
                  "scaler": lambda: {"scale": 65536.0, "_growth_tracker": 3},
                  "rng": lambda: rng_states,
                  "ema": lambda: {name: t.detach().clone() for name, t in model.items() if isinstance(t, torch.Tensor)}}
        state |= {name: make() for name, make in others.items() if self.chance(0.2)}
        state |= {self.key(): self.tree(2) for _ in range(self.rng.randint(0, 3))}
        return dict(self.rng.sample(list(state.items()), len(state))) if self.chance(0.4) else state

    def state(self):
        kind = self.rng.random()
        state = self.train_state() if kind < 0.6 else dict(self.model()) if kind < 0.65 else self.tree()
        if self.wild and self.chance(0.06):
            quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
            state[self.text_key()] = self.rng.choice([*REFUSED, torch.eye(3).to_sparse(), quantized])
        return {} if self.chance(0.005) else state


def trained_names(model):
    """Returns the names of the tensors that StateMaker's optimizers have, in their order: of tied ones, the first."""
    found = {}
    for name, leaf in model.items():
        is_parameter = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not name.endswith("running_mean")
        if is_parameter and leaf.numel():
            found.setdefault(id(leaf), name)
    return list(found.values())


def with_keys(optimizer, key_of):
    """Returns the state dict of an optimizer with other names or numbers for its parameters."""
    return optimizer | {"state": {key_of(key): state for key, state in optimizer["state"].items()},
                        "param_groups": [group | {"params": list(map(key_of, group["params"]))}
                                         for group in optimizer["param_groups"]]}


def random_state(seed, wild):
    return StateMaker(random.Random(seed), wild).state()
