"""Builds the packages, and tries them: the archive in another folder, the Debian package in a root made for it.

usage: packages_test.py --source DIRECTORY --work DIRECTORY build|archive|debian|clean_root
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

SKIPPED = 77
TOOLS = ("ckpt-inspect", "ckpt-reshard")
FILES = {"bin/ckpt-inspect", "bin/ckpt-reshard", "lib/libtessera_core.a", "include/tessera/formats/checkpoint.h",
         "lib/cmake/tessera/tessera-config.cmake", "share/doc/tessera/copyright", "share/man/man1/ckpt-inspect.1",
         "share/man/man1/ckpt-reshard.1", "share/bash-completion/completions/ckpt-inspect",
         "share/bash-completion/completions/ckpt-reshard",
         "share/zsh/site-functions/_ckpt-inspect", "share/zsh/site-functions/_ckpt-reshard",
         "share/fish/vendor_completions.d/ckpt-inspect.fish", "share/fish/vendor_completions.d/ckpt-reshard.fish"}


def run(*command, **options):
    process = subprocess.run([str(word) for word in command], capture_output=True, text=True, errors="replace",
                             check=False, **options)
    if process.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {process.returncode}\n{process.stdout[-4000:]}{process.stderr[-4000:]}")
    return process.stdout


def require(condition, what):
    if not condition:
        sys.exit(what)


class Packages:
    def __init__(self, source, work):
        self.source, self.work, self.built = source, work, work / "build"

    def one(self, pattern):
        found = list(self.built.glob(pattern))
        require(len(found) == 1, f"{self.built}: expected one {pattern}, found {found}")
        return found[0]

    def build(self):
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        run("cmake", "-S", self.source, "-B", self.built, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DTESSERA_TESTS=OFF")
        run("cmake", "--build", self.built)
        run("cpack", "--config", self.built / "CPackConfig.cmake", cwd=self.built)

    def archive(self):
        unpacked = self.work / "unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(self.one("tessera-*.tar.gz")) as archive:
            archive.extractall(unpacked)
        [prefix] = unpacked.iterdir()
        self.check_files(prefix)
        moved = self.work / "moved anywhere"
        shutil.rmtree(moved, ignore_errors=True)
        prefix.rename(moved)
        for tool in TOOLS:
            require("RUNPATH" not in run("readelf", "-d", moved / "bin" / tool), f"{tool} looks for libraries where it was built")
        self.try_tools(lambda tool, *arguments: run(moved / "bin" / tool, *arguments), self.source, self.work / "out")
        consumer = self.work / "consumer"
        shutil.rmtree(consumer, ignore_errors=True)
        run("cmake", "-S", self.source / "tests/consumer/project", "-B", consumer, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={moved}")
        run("cmake", "--build", consumer)
        require("float32" in run(consumer / "consumer"), "the consumer of the archive read no tensor")

    def debian(self):
        package = self.one("*.deb")
        fields = dict(line.split(": ", 1) for line in run("dpkg-deb", "-f", package).splitlines() if ": " in line)
        version = run(self.built / "bin/ckpt-inspect", "--version").split()[-1]
        require(fields["Package"] == "tessera" and fields["Version"] == version, f"{package}: {fields}")
        depends = fields.get("Depends", "")
        for library in ("libc6", "libzstd1", "libdeflate0", "libhdf5"):
            require(library in depends, f"{package}: Depends: expected {library}, found '{depends}'")
        require("torch" not in depends, f"{package}: Depends: expected no libtorch, found '{depends}'")
        unpacked = self.work / "deb"
        shutil.rmtree(unpacked, ignore_errors=True)
        run("dpkg-deb", "-x", package, unpacked)
        self.check_files(unpacked / "usr")
        owners = {line.split()[1] for line in run("dpkg-deb", "-c", package).splitlines()}
        require(owners == {"root/root"}, f"{package}: expected files of root, found {owners}")

    def clean_root(self):
        """Debian as it is first installed gets the package, by apt, which brings what it depends on."""
        system = platform.freedesktop_os_release()
        if os.geteuid() != 0 or not shutil.which("debootstrap") or system["ID"] != "debian":
            print("skipped: needs Debian, root and debootstrap (apt-get install debootstrap)")
            sys.exit(SKIPPED)
        root = self.work / "root"
        shutil.rmtree(root, ignore_errors=True)
        run("debootstrap", "--variant=minbase", system["VERSION_CODENAME"], root)
        package = self.one("*.deb")
        shutil.copy(package, root / "root")
        shutil.copytree(self.source / "fixtures/dcp/valid/fsdp2_adamw", root / "root/fixtures/dcp/valid/fsdp2_adamw")
        in_root = {"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        in_root |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}

        def chroot(*command):
            return run("chroot", root, *command, env=in_root)

        chroot("apt-get", "install", "--yes", "--no-install-recommends", f"/root/{package.name}")
        self.try_tools(chroot, Path("/root"), Path("/root/out"))
        chroot("apt-get", "remove", "--yes", "tessera")
        require(not (root / "usr/bin/ckpt-inspect").exists(), "the package left its tools behind")
        shutil.rmtree(root)

    def check_files(self, prefix):
        missing = [name for name in sorted(FILES) if not ((prefix / name).exists() or (prefix / f"{name}.gz").exists())]
        require(not missing, f"{prefix}: expected {missing}, found {sorted(p.name for p in prefix.rglob('*'))}")
        require(not list(prefix.glob("**/runtime")), f"{prefix}: expected the core alone, found the runtime")
        for path in prefix.rglob("*.cmake"):
            require(str(self.built) not in path.read_text(), f"{path} points to where it was built")

    @staticmethod
    def try_tools(call, source, out):
        fixture = source / "fixtures/dcp/valid/fsdp2_adamw"
        require("model.emb.weight" in call("ckpt-inspect", "ls", fixture), "ckpt-inspect found no tensor")
        call("ckpt-reshard", fixture, out, "--overwrite", "--world-size", "3", "--compress", "zstd")
        call("ckpt-inspect", "verify", out)
        call("ckpt-inspect", "diff", fixture, out)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("step", choices=["build", "archive", "debian", "clean_root"])
    arguments = parser.parse_args()
    getattr(Packages(arguments.source, arguments.work), arguments.step)()


if __name__ == "__main__":
    main()
