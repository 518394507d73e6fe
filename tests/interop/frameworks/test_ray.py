"""Runs the example of docs/python.md in which Ray tasks share a move, unchanged."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from ckpt_tools import FIXTURES, ROOT, reshard, succeed  # noqa: E402
from python_package import tessera  # noqa: E402


def test_ray_tasks_share_a_move(tmp_path):
    import ray

    [code] = re.findall(r"```python\n(import ray\n.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert code.count('"/shared/') == 2
    source = reshard(FIXTURES / "dcp" / "valid" / "fsdp2_adamw", tmp_path / "step-1000", "--to", "native")
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, _temp_dir=f"/tmp/ray-{tmp_path.name}"[:40])
    try:
        exec(code.replace('"/shared/', f'"{tmp_path}/'), {"tessera": tessera})  # noqa: S102
    finally:
        ray.shutdown()
    assert tessera.verify(tmp_path / "step-1000.64") == []
    succeed("ckpt-inspect", "diff", source, tmp_path / "step-1000.64")
    alone = reshard(source, tmp_path / "alone", "--world-size", 64)
    for file in sorted(alone.iterdir()):
        assert file.read_bytes() == (tmp_path / "step-1000.64" / file.name).read_bytes(), file.name
