"""Shows B4, B3, B12, B13. fully_shard and PyTorch's FSDP1 (use_orig_params=True) train with the same input, and the
results are compared."""

import json
import sys
from pathlib import Path

import fsdp1_peer
import pytest
import torch
from ckpt_tools import BIN
from on_ranks import run_function, run_program
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "bench"))
from peers_train_step import Transformer  # noqa: E402

STEPS, ROWS, SEQUENCE, VOCABULARY, WIDTH = 20, 12, 6, 19, 10


def results(output: Path, ranks: int) -> list[dict]:
    return [json.loads(Path(f"{output}{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=[2, 3])
def runs(request, tmp_path_factory) -> tuple[list[dict], list[dict]]:
    work = tmp_path_factory.mktemp("parity")
    torch.manual_seed(0)
    values = dict(Transformer(VOCABULARY, WIDTH, 3, 2, SEQUENCE).state_dict())
    values["ids"] = torch.randint(VOCABULARY, (STEPS, ROWS, SEQUENCE + 1))
    save_file(values, work / "input.safetensors")
    source = str(work / "input.safetensors")
    ranks = request.param
    run_function(fsdp1_peer.train, ranks, source, str(work / "peer-"))
    run_program([BIN / "fsdp_parity", source, work / "ours-"], ranks)
    return results(work / "peer-", ranks), results(work / "ours-", ranks)


# Shows B3, B13.
def test_flat_parameters_have_the_same_order_offsets_and_padding(runs):
    for peer, ours in zip(*runs):
        assert [unit["name"] for unit in ours["units"]] == [unit["name"] for unit in peer["units"]]
        for of_peer, of_ours in zip(peer["units"], ours["units"]):
            assert of_ours == of_peer


# Shows B13.
def test_every_rank_holds_the_same_elements(runs):
    for peer, ours in zip(*runs):
        assert ours["shards"].keys() == peer["shards"].keys()
        for name, values in peer["shards"].items():
            assert torch.equal(torch.tensor(ours["shards"][name]), torch.tensor(values)), name


# Shows B4.
def test_units_are_gathered_in_the_same_order(runs):
    # The backward of each block reads weights, so Tessera too gathers every block again.
    for peer, ours in zip(*runs):
        gathers = [event.removeprefix("unshard ").replace("the root", "")
                   for event in ours["order"] if event.startswith("unshard ")]
        assert gathers == peer["order"]


# Shows B1.
def test_losses_of_twenty_steps_are_the_same(runs):
    for peer, ours in zip(*runs):
        assert len(ours["losses"]) == STEPS
        assert ours["losses"] == pytest.approx(peer["losses"], rel=1e-5)


# Shows B12.
def test_gradient_norms_are_the_same(runs):
    for peer, ours in zip(*runs):
        assert ours["norms"] == pytest.approx(peer["norms"], rel=1e-4)
