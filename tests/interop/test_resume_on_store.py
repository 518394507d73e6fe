"""A C++ trainer (docs/examples/resume_anywhere) saves to `s3://`, finds its newest checkpoint there, and resumes from it.

The server is moto's, behind the proxy of the other tests.
"""

import subprocess
from pathlib import Path

import pytest
from ckpt_tools import BIN
from faulty_proxy import s3_error
from on_ranks import environments
from test_object_store_destinations import expect_same, keys, names, uploads  # noqa: F401
from test_object_stores import SECRET, TOKEN, bucket, environment, moto, proxy, succeed  # noqa: F401

TEXT = Path(__file__).parents[2] / "LICENSE"


def train(proxy, folder, directory, ranks, *options):  # noqa: F811
    """Runs the trainer on some ranks. Returns their exit codes, what rank 0 printed, and all errors."""
    command = [BIN / "resume_anywhere", directory, TEXT, "--save-every", 3, *options]
    processes = [
        subprocess.Popen([*map(str, command)], env=environment(proxy, TMPDIR=str(folder), **more), cwd=folder,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for more in environments(ranks)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    errors = "".join(error for _, error in said)
    for secret in (SECRET, TOKEN):
        assert secret not in said[0][0] + errors
    assert not list(folder.glob("tessera-spool-*")) and not list(folder.glob("s3:*"))
    return {process.returncode for process in processes}, said[0][0], errors


def test_a_trainer_resumes_from_a_store_on_other_ranks(proxy, keys, tmp_path):  # noqa: F811
    """The objects have the bytes that the same two runs write to a local folder."""
    url, local = "s3://checkpoints/new/trainer", tmp_path / "local"
    for directory in (url, local):
        losses = tmp_path / f"losses-{directory == url}"
        codes, said, errors = train(proxy, tmp_path, directory, 2, "--steps", 6, "--losses", losses)
        assert codes == {0} and "begins at step 1" in said, errors
        codes, said, errors = train(proxy, tmp_path, directory, 1, "--strategy", "NO_SHARD", "--steps", 12, "--losses", losses)
        assert codes == {0} and f"resumes from {directory}/step-6, saved by 2 ranks" in said, errors
    assert (tmp_path / "losses-True").read_text() == (tmp_path / "losses-False").read_text()
    assert {key.split("/")[2] for key in names(keys, "new/trainer")} == {"step-6", "step-9", "step-12"}  # the last three
    for step in (6, 12):
        expect_same(keys(f"new/trainer/step-{step}/"), f"new/trainer/step-{step}", local / f"step-{step}")
    succeed(proxy, "ckpt-inspect", "verify", f"{url}/step-12")
    assert uploads(keys.client) == []


def test_a_save_that_fails_leaves_the_older_checkpoint_to_resume_from(proxy, keys, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/failing"
    assert train(proxy, tmp_path, url, 2, "--steps", 3)[0] == {0}

    def refuse(request):
        return s3_error(503, "SlowDown") if request.method == "PUT" and request.path.endswith("/step-6/index.h5") else None

    proxy.refuse = refuse
    codes, said, errors = train(proxy, tmp_path, url, 2, "--steps", 9)
    assert 0 not in codes and f"{url}/step-6/index.h5" in errors and "503 SlowDown" in errors
    assert "new/failing/step-6/index.h5" not in names(keys, "new/failing")

    proxy.refuse = None
    codes, said, errors = train(proxy, tmp_path, url, 1, "--strategy", "NO_SHARD", "--steps", 6)
    assert codes == {0} and f"resumes from {url}/step-3, saved by 2 ranks" in said, errors
    assert "new/failing/step-6/index.h5" in names(keys, "new/failing")
