"""`ckpt-inspect scan` beside Python's two unpicklers: what either calls, the scan must find. Nothing is imported or run:
the unpicklers get classes that only note their calls.

For longer: `python test_scan_beside_unpicklers.py SEED NUM_PICKLES`.
"""

import io
import json
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from ckpt_tools import run  # noqa: E402

DANGEROUS = [("os", "system"), ("posix", "system"), ("builtins", "eval"), ("subprocess", "Popen"), ("__builtin__", "exec")]
HARMLESS = [("collections", "OrderedDict"), ("builtins", "list"), ("mypackage", "make"), ("torch", "FloatStorage")]
ODD_BYTES = b"0123456789" * 3 + b" \t\r\x0b\x0c_+-LlxXobBOeE.naifNT\0\x1c\x85\xa0\\'\"Jjy"
ODD_NUMBERS = [b"", b" ", b"-0", b"+1", b"-1", b"9" * 25, b"0x_f", b"0b1", b"0o7", b"1_0", b"010", b"1e400", b"inf", b"-nan", b" 7 ", b"\0", b"1\0zz"]
CALLED = set()


class Made:
    """An object of a class that a pickle names."""

    def __new__(cls, *_, **__):
        CALLED.add(cls.names)
        return object.__new__(cls)

    def __init__(self, *_, **__):
        pass

    def append(self, _):
        pass

    extend = add = __setstate__ = append

    def __setitem__(self, key, value):
        pass


class Recording:
    def find_class(self, module, name):
        return type("Named", (Made,), {"names": (module, name)})

    def persistent_load(self, pid):
        return pid


class InC(Recording, pickle.Unpickler):
    pass


class InPython(Recording, pickle._Unpickler):
    pass


def length(number, nbytes):
    return number.to_bytes(nbytes, "little")


class Pickles:
    """Pickles with odd opcodes around a call of a dangerous name."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def odd_number(self):
        pick = self.random.random()
        digits = str(self.random.randrange(300)).encode()
        if pick < 0.3:
            return digits
        if pick < 0.6:
            at = self.random.randrange(len(digits) + 1)
            return digits[:at] + bytes([self.random.choice(ODD_BYTES)]) + digits[at:]
        if pick < 0.7:
            return b"0" * self.random.randrange(1, 90) + digits
        if pick < 0.8:
            return self.random.choice(ODD_NUMBERS)
        return bytes(self.random.choices(ODD_BYTES, k=self.random.randrange(8)))

    def sized(self, opcode, nbytes):
        text = self.random.choice([b"a", b"", b"\xff", b"os"])
        return opcode + length(len(text), nbytes) + text

    def value(self, depth=0):
        """Opcodes that push one value, or that a loader refuses."""
        choice, randbytes = self.random.choice, self.random.randbytes
        module, name = (part.encode() for part in choice(HARMLESS))
        nbytes = self.random.randrange(12)
        values = [self.value(depth + 1) for _ in range(self.random.choice([0, 0, 0, 1, 2, 3]))] if depth < 3 else []
        joined = b"".join(values)
        entries = b"".join(b"K" + length(i, 1) + each for i, each in enumerate(values))
        if values:
            return choice([
                joined + [b"", b"\x85", b"\x86", b"\x87"][len(values)],
                b"(" + joined + choice([b"t", b"l", b"\x91"]),
                b"(" + entries + b"d",
                b"](" + joined + b"e",
                b"}(" + entries + b"u",
                values[0] + b"Q",
            ])  # fmt: skip
        return choice([
            choice([b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f"]),
            choice([b"I", b"L", b"F", b"P"]) + self.odd_number() + choice([b"", b"L"]) + b"\n",
            choice([b"I", b"L", b"F", b"P"]) + self.odd_number() + b"\n",
            choice([b"K" + randbytes(1), b"M" + randbytes(2), b"J" + randbytes(4), b"G" + randbytes(8)]),
            choice([b"\x8a" + length(nbytes, 1), b"\x8b" + length(nbytes, 4)]) + randbytes(nbytes),
            b"S" + choice([b"'a'", b'"os"', b"a", b"'\\x41'", b"'\\141'", b"'\\q'", b"'\xff'", b"'it\\'s'", b"'"]) + b"\n",
            b"V" + choice([b"a", b"\\u0041", b"\\\\u0041", b"\\U00110000", b"\\u12", b"\xe9", b"", b"\\", b"a\rb", b"\0"]) + b"\n",
            self.sized(choice([b"\x8c", b"C", b"U"]), 1),
            self.sized(choice([b"X", b"B", b"T"]), 4),
            self.sized(choice([b"\x8d", b"\x8e", b"\x96"]), 8),
            b"c" + module + b"\n" + name + b"\n" + choice([b"", b")R", b")\x81", b")}\x92", b")R}b"]),
            b"(i" + module + b"\n" + name + b"\n",
            b"N" + choice([b"p" + self.odd_number() + b"\n", b"q" + randbytes(1), b"r" + length(choice([1, 300, 70000]), 4), b"\x94"]),
        ])  # fmt: skip

    def filler(self):
        """Opcodes that leave the stack as it is."""
        slot = self.odd_number()
        frame = self.random.choice([0, 1, 4, 5, 30, 200, 10**6, 1 << 40, (1 << 63) - 1, 1 << 63])
        return self.random.choice([
            self.value() + b"0",
            self.value() + b"0",
            self.value() + b"200",
            b"Np" + slot + b"\n0" + self.random.choice([b"", b"g" + slot + b"\n0"]),
            b"(" + self.value() + self.random.choice([b"1", b"t0", b"l0"]),
            b"(0",
            b"\x95" + length(frame, 8),
        ])  # fmt: skip

    def text(self, text):
        escaped = "".join(f"\\u{ord(c):04x}" if self.random.random() < 0.4 else c for c in text).encode()
        text = text.encode()
        return self.random.choice([
            b"S'" + text + b"'\n", b"V" + text + b"\n", b"V" + escaped + b"\n", b"S'" + text.replace(b"s", b"\\x73") + b"'\n",
            b"X" + length(len(text), 4) + text, b"\x8c" + length(len(text), 1) + text, b"U" + length(len(text), 1) + text,
        ])  # fmt: skip

    def dangerous_call(self):
        module, name = self.random.choice(DANGEROUS)
        filler = self.filler() if self.random.random() < 0.5 else b""
        lines = module.encode() + b"\n" + name.encode() + b"\n"
        named = self.random.choice([b"c" + lines, self.text(module) + filler + self.text(name) + b"\x93"])
        arguments = self.random.choice([b"K\1\x85", b")", b"(K\1t", b"(t", b"](K\1e"])
        slot = self.odd_number()
        return self.random.choice([
            b"(K\1i" + lines,
            b"(" + named + filler + b"K\1o",
            named + filler + arguments + filler + b"R",
            named + arguments + b"\x81",
            named + arguments + b"}\x92",
            named + b"p" + slot + b"\n0" + filler + b"g" + slot + b"\n" + arguments + b"R",
            named + b"\x940h\0" + arguments + b"R",
        ])  # fmt: skip

    def mutated(self, data):
        data, at = bytearray(data), self.random.randrange(len(data))
        data[at : at + self.random.randrange(3)] = self.random.choice([b"", self.random.randbytes(1), bytes([self.random.choice(ODD_BYTES)])])
        return bytes(data)

    def next(self):
        data = self.random.choice([b"", b"", b"\x80\2", b"\x80\4", b"\x80\5"])
        if self.random.random() < 0.15:
            data += self.value() + b"." + self.random.choice([b"", b"\x80\2"])
        data += b"".join(self.filler() for _ in range(self.random.randrange(5))) + self.dangerous_call()
        data += self.random.choice([b"", self.filler()]) + self.random.choice([b".", b"", b"0."])
        return self.mutated(data) if self.random.random() < 0.3 else data


def is_dangerous(data):
    """Whether an unpickler that reads up to three pickles in a row calls a dangerous name."""
    CALLED.clear()
    for file in (io.BytesIO(data), io.BufferedReader(io.BytesIO(data), 64)):  # the one in C looks ahead into the second
        for unpickler in (InC, InPython):
            file.seek(0)
            try:
                for _ in range(3):
                    unpickler(file).load()
            except Exception:
                pass
    return not CALLED.isdisjoint(DANGEROUS)


def missed_of(pickles, folder):
    """Returns those of the pickles in a folder that a scan finds harmless. Writes at most 100 files, as many as a scan names."""
    for i, data in enumerate(pickles):
        (folder / str(i)).write_bytes(data)
    report = json.loads(run("ckpt-inspect", "scan", "--json", folder).stdout)
    found = {problem["file"] for problem in report["problems"]}
    for name in report["names"]:
        if name["verdict"] == "dangerous":
            found |= {place["file"] for place in name["places"]}
    rest = [i for i in range(len(pickles)) if str(folder / str(i)) not in found]
    return [pickles[i] for i in rest if run("ckpt-inspect", "scan", folder / str(i)).returncode != 1]


def main(seed, num_pickles):
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))  # pickles may ask for any amount of memory
    pickles, num_dangerous = Pickles(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(0, num_pickles, 90):
            dangerous = [data for data in (pickles.next() for _ in range(90)) if is_dangerous(data)]
            num_dangerous += len(dangerous)
            for data in missed_of(dangerous, Path(folder)):
                print("missed:", data)
            for file in Path(folder).iterdir():
                file.unlink()
    print(num_dangerous, "dangerous pickles")


def test_what_an_unpickler_calls_is_found():
    """Shows A3, E3."""
    process = subprocess.run([sys.executable, __file__, "1", "3600"], capture_output=True, text=True, timeout=300)
    lines = process.stdout.splitlines()
    assert [line for line in lines if line.startswith("missed")] == [], process.stderr
    assert int(lines[-1].split()[0]) > 1000, process.stderr


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
