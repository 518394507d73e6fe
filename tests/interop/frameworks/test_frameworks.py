"""Checkpoints that other frameworks write, moved, and loaded by them again. Needs their packages (see CMakeLists.txt)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from ckpt_tools import FIXTURES, MAKE, assert_same_state, expectation, listing, reshard, run, succeed  # noqa: E402
from on_ranks import run_program  # noqa: E402

os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """A folder that Megatron wrote with two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("megatron") / "iter_0000007"
    run_program([sys.executable, "-B", HERE / "megatron_ranks.py", "save", folder], 2)
    return folder


@pytest.mark.parametrize("way", [["dcp"], ["native", "dcp"], ["safetensors", "dcp"]], ids="-".join)
@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_loads_what_was_moved(megatron, tmp_path, way, ranks):
    """common.pt and metadata.json are copied beside the tensors; without them, Megatron refuses the folder."""
    source = megatron
    for step, form in enumerate(way):
        source = reshard(source, tmp_path / f"{step}", "--to", form)
    assert (source / "common.pt").read_bytes() == (megatron / "common.pt").read_bytes()
    assert "Megatron's torch_dist" in succeed("ckpt-inspect", "ls", source)
    run_program([sys.executable, "-B", HERE / "megatron_ranks.py", "load", source], ranks)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder that transformers wrote, and its model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("llama") / "model"
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder, model


def assert_is_model(folder, model, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    loaded, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == dtype and torch.equal(tensor, expected[name].to(dtype)), name


def test_transformers_loads_what_was_moved_to_dcp_and_back(llama, tmp_path):
    folder, model = llama
    dcp = reshard(folder, tmp_path / "dcp", "--to", "dcp", "--world-size", "2")
    assert (dcp / "config.json").exists() and (dcp / "generation_config.json").exists()
    assert_is_model(reshard(dcp, tmp_path / "back", "--to", "safetensors"), model)


def test_transformers_loads_what_fsdp_saved_with_the_config_of_another_folder(llama, tmp_path):
    import torch.distributed.checkpoint as dcp

    folder, model = llama
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = ["--to", "safetensors", "--extra-files-from", folder]
    assert_is_model(reshard(tmp_path / "dcp", tmp_path / "back", *options), model)


def test_transformers_reads_the_dtype_of_a_cast(llama, tmp_path):
    folder, model = llama
    cast = reshard(folder, tmp_path / "cast", "--to", "safetensors", "--cast", "bfloat16")
    config = json.loads((cast / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert_is_model(cast, model, torch.bfloat16)


def test_lightning_checkpoint_of_the_live_package_is_read(tmp_path):
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()
            self.up = torch.nn.Linear(width, 2)

        def training_step(self, batch, _):
            return self.up(batch).square().sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.arange(12.0).reshape(4, 3), batch_size=2)

    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)
    net = Net()
    trainer.fit(net)
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    moved = reshard(tmp_path / "net.ckpt", tmp_path / "moved.pt", "--to", "torch")
    again = torch.load(moved, weights_only=True)
    assert torch.equal(again["state_dict"]["up.weight"], net.up.weight)
    assert torch.equal(again["optimizer_states"][0]["state"][0]["exp_avg"],
                       trainer.optimizers[0].state[net.up.weight]["exp_avg"])
    assert again["hyper_parameters"] == {"width": 3}


def test_files_of_deepspeed_are_one_part_of_several(tmp_path):
    """Each file of a ZeRO run holds the part of one rank: a move refuses to take such a file for the whole checkpoint."""
    run_program([sys.executable, "-B", HERE / "deepspeed_ranks.py", tmp_path / "run"], 2)
    files = sorted((tmp_path / "run" / "global_step1").glob("*.pt"))
    assert len(files) >= 3
    for file in files:
        process = run("ckpt-reshard", file, tmp_path / "moved", "--to", "dcp")
        assert process.returncode == 3 and "one rank of 2: DeepSpeed ZeRO stage 1" in process.stderr, process.stderr
        assert not (tmp_path / "moved").exists()


def test_fsdp2_goes_on_from_a_folder_of_trainer(tmp_path):
    """Shows F4. The Trainer numbers AdamW's state: parameters with weight decay come first."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True))
    ids = [torch.arange(i, i + 8) % 64 for i in range(8)]
    arguments = TrainingArguments(tmp_path / "run", max_steps=2, save_steps=2, per_device_train_batch_size=2, use_cpu=True,
                                  report_to=[], disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": each, "labels": each} for each in ids])
    trainer.train()
    state = trainer.optimizer.state_dict()["state"]
    decays = set(trainer.get_decay_parameter_names(model))
    names = [name for name, _ in model.named_parameters()]
    names = [name for name in names if name in decays] + [name for name in names if name not in decays]
    torch.save({"model": model.state_dict(), "optim": {name: state[i] for i, name in enumerate(names)}}, tmp_path / "held.pt")

    saved = tmp_path / "run" / "checkpoint-2"
    (tmp_path / "names.json").write_text(json.dumps(names))
    moved = tmp_path / "dcp"
    succeed("ckpt-reshard", "merge", f"model={saved}", f"optim={saved / 'optimizer.pt'}", moved, "--to", "dcp",
            "--world-size", "2", "--optimizer-params", tmp_path / "names.json")
    assert (moved / "trainer_state.json").read_bytes() == (saved / "trainer_state.json").read_bytes()
    run_program([sys.executable, "-B", HERE / "llama_ranks.py", moved, saved, tmp_path / "held.pt"], 2)


def test_fsdp2_goes_on_from_a_folder_of_accelerate(tmp_path):
    """Shows F4. FSDP2 resumes on another number of ranks, with the losses of an uninterrupted run. The files beside the
    checkpoint are copied."""
    saved, moved = tmp_path / "saved", tmp_path / "dcp"
    said = run_program([sys.executable, "-B", HERE / "accelerate_ranks.py", saved], 2)
    expected = json.loads(said[0].strip().splitlines()[-1])
    succeed("ckpt-reshard", "merge", saved / "pytorch_model_fsdp_0", saved / "optimizer_0", moved, "--to", "dcp",
            "--world-size", "3", "--rename", "optimizer.=optim.", "--extra-files-from", saved)
    for name in ("scheduler.bin", "random_states_0.pkl", "random_states_1.pkl", "custom_checkpoint_0.pkl"):
        assert (moved / name).read_bytes() == (saved / name).read_bytes()
    for each in run_program([sys.executable, "-B", HERE / "checkpointing_ranks.py", "load", moved], 3):
        assert json.loads(each.strip().splitlines()[-1]) == pytest.approx(expected, rel=1e-5)


ACCELERATE = """
import sys, torch
from accelerate import Accelerator
folder, safe = sys.argv[1], sys.argv[2] == "True"
accelerator = Accelerator(cpu=True)
torch.manual_seed(5)
models = [torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)][:int(sys.argv[3])]
optimizer = torch.optim.AdamW(models[0].parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
*models, optimizer, scheduler = accelerator.prepare(*models, optimizer, scheduler)
models[0](torch.ones(2, 3)).sum().backward()
optimizer.step()
accelerator.save_state(folder, safe_serialization=safe)
accelerator.save_model(models[0], folder + "-model", safe_serialization=safe)
torch.save({"model": models[0].state_dict(), "optim": optimizer.state_dict()}, folder + ".pt")
"""


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_a_folder_of_accelerate_without_fsdp_is_a_model_and_an_optimizer(tmp_path, safe):
    """Shows F4. accelerate writes no config.json; `save_model` writes the model's file alone."""
    folder = tmp_path / "checkpoint"
    subprocess.run([sys.executable, "-B", "-c", ACCELERATE, folder, str(safe), "1"], check=True, timeout=120)
    assert (folder / ("model.safetensors" if safe else "pytorch_model.bin")).is_file() and (folder / "optimizer.bin").is_file()
    held = torch.load(tmp_path / "checkpoint.pt")
    merged = tmp_path / "merged.pt"
    succeed("ckpt-reshard", "merge", f"model={folder}", f"optim={folder}/optimizer.bin", merged)
    found = torch.load(merged, weights_only=True)
    assert found["model"].keys() == held["model"].keys()
    assert all(torch.equal(found["model"][name], held["model"][name]) for name in held["model"])
    for number, state in held["optim"]["state"].items():
        assert all(torch.equal(found["optim"]["state"][number][kind], tensor) for kind, tensor in state.items())
    alone = reshard(tmp_path / "checkpoint-model", tmp_path / "alone.pt")
    assert torch.load(alone, weights_only=True).keys() == held["model"].keys()


@pytest.mark.parametrize(
    ("safe", "first", "second"),
    [(True, "model.safetensors", "model_1.safetensors"), (False, "pytorch_model.bin", "pytorch_model_1.bin")],
    ids=["safetensors", "bin"],
)
def test_one_of_several_models_of_accelerate_is_given_by_its_file(tmp_path, safe, first, second):
    folder = tmp_path / "checkpoint"
    subprocess.run([sys.executable, "-B", "-c", ACCELERATE, folder, str(safe), "2"], check=True, timeout=120)
    refused = run("ckpt-inspect", "ls", folder)
    assert refused.returncode == 2 and f"'{first}' and '{second}'" in refused.stderr, refused.stderr
    succeed("ckpt-inspect", "ls", folder / second)


def test_peft_loads_an_adapter_that_was_moved_to_dcp_and_back(llama, tmp_path):
    """Shows F4."""
    import copy

    from peft import LoraConfig, PeftModel, get_peft_model

    _, model = llama
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    dcp = reshard(tmp_path / "adapter", tmp_path / "dcp", "--to", "dcp", "--world-size", "2")
    back = reshard(dcp, tmp_path / "back", "--to", "safetensors")
    loaded = PeftModel.from_pretrained(copy.deepcopy(model), back)
    expected = adapted.state_dict()
    assert any("lora_B" in name for name in expected)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_adapter_is_what_peft_merges(llama, tmp_path, dtype):
    import copy

    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    _, model = llama
    model = copy.deepcopy(model).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "base")
    base = reshard(tmp_path / "base", tmp_path / "sharded", "--world-size", "3")
    config = LoraConfig(r=4, lora_alpha=16, use_rslora=True, target_modules=["q_proj", "down_proj"],
                        alpha_pattern={"layers.0.mlp.down_proj": 2}, init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), config)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = tmp_path / "merged"
    succeed("ckpt-reshard", "combine", merged, "--base", base, "--lora", tmp_path / "adapter", "--to", "safetensors")
    wanted = adapted.merge_and_unload()
    for name, tensor in AutoModelForCausalLM.from_pretrained(merged, torch_dtype="auto").state_dict().items():
        peft = wanted.state_dict()[name]
        assert tensor.dtype == peft.dtype
        torch.testing.assert_close(tensor, peft, rtol=2**-7 if dtype == "bfloat16" else 1e-6, atol=1e-6)
    assert len(load_file(merged / "model.safetensors")) == len(load_file(tmp_path / "base" / "model.safetensors"))


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    """Folders that DeepSpeed writes now, each with what it held."""
    folder = tmp_path_factory.mktemp("zero")
    subprocess.run([sys.executable, "-B", MAKE / "write_deepspeed.py"], check=True, timeout=600,
                   env=os.environ | {"TESSERA_FIXTURES": str(folder)})
    return sorted(path for path in (folder / "deepspeed" / "valid").iterdir() if path.is_dir())


def test_checkpoints_of_zero_hold_what_deepspeed_held(zero):
    """Shows F2. Like the test of the fixtures, but with checkpoints that the installed DeepSpeed writes now."""
    assert len(zero) >= 7
    for path in zero:
        assert_same_state(listing(path), expectation(path))


def test_zero_to_fp32_finds_the_same_weights_but_for_frozen_ones_of_stage_1(zero, tmp_path):
    """Shows F2. zero_to_fp32 silently leaves out the frozen layer of stage 1; a move by Tessera has it."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import load_file

    for path in zero:
        if path.name == "zero1_bf16":  # zero_to_fp32 refuses it; Tessera reads it
            with pytest.raises(ValueError, match="is not a zero checkpoint"):
                get_fp32_state_dict_from_zero_checkpoint(str(path))
            continue
        expected = get_fp32_state_dict_from_zero_checkpoint(str(path))
        found = load_file(reshard(path, tmp_path / f"{path.name}.safetensors", "--only", "model", "--rename", "model.="))
        found["head.weight"] = found["embedding.weight"]
        assert found.keys() - expected.keys() == ({"frozen.weight", "frozen.bias"} if path.name == "zero1" else set())
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor.to(found[name].dtype)), (path.name, name)


def test_folders_of_megatrons_ranks_hold_what_its_models_held(tmp_path):
    """Shows F3. Like the test of the fixtures, but with folders that the installed megatron-core writes now."""
    subprocess.run([sys.executable, "-B", MAKE / "write_megatron.py"], check=True, timeout=600,
                   env=os.environ | {"TESSERA_FIXTURES": str(tmp_path)})
    folders = sorted(path for path in (tmp_path / "megatron" / "valid").iterdir() if path.is_dir())
    assert len(folders) >= 7
    for path in folders:
        assert_same_state(listing(path), expectation(path))


def ranks_of(case):
    return case.get("tensor", 1) * case.get("pipeline", 1) * case.get("data", 1)


@pytest.mark.parametrize("saved, loaded", [
    ("tp2", {"layers": 1}),
    ("tp2_pp2", {"pipeline": 3, "layers": 3, "swiglu": True, "tied": False}),
    ("tp2_pp2", {"tensor": 2, "layers": 3, "swiglu": True, "tied": False}),
    ("tp2_fp16", {"tensor": 2, "layers": 1, "dtype": "float16"}),
    ("pp2_vpp2_bf16", {"tensor": 2, "layers": 4, "dtype": "bfloat16"}),
    ("tp2_ep2_experts", {"data": 2, "expert": 2, "layers": 1, "experts": 4, "swiglu": True}),
    ("dp2_distributed", {"tensor": 2, "layers": 1, "distributed": True}),
    ("tp2_pp2_distributed_bf16", {"data": 2, "distributed": True, "dtype": "bfloat16"}),
    ("pp2_ep2_experts_distributed_bf16", {"data": 4, "expert": 2, "experts": 2, "distributed": True, "dtype": "bfloat16"}),
])
def test_megatron_loads_folders_of_ranks_that_were_moved_to_torch_dist(tmp_path, saved, loaded):
    """Shows F3. Megatron loads them on other ranks, with the weights, moments and steps of the optimizer."""
    source = FIXTURES / "megatron" / "valid" / saved
    moved = reshard(source, tmp_path / "torch_dist", "--to", "megatron")
    held = reshard(source, tmp_path / "held.pt", "--only", "model", "--only", "optim")
    said = run_program([sys.executable, "-B", HERE / "megatron_torch_dist.py", "load", json.dumps(loaded), moved, held],
                       ranks_of(loaded))
    assert " weights; " in said[0]


@pytest.mark.parametrize("form, saved, loaded", [
    ("dp_reshardable", {"tensor": 2, "data": 2}, {"tensor": 2, "data": 2}),
    ("dp_reshardable", {"data": 2, "expert": 2, "experts": 4, "swiglu": True}, {"data": 2, "expert": 2, "experts": 4, "swiglu": True}),
    ("fully_reshardable", {"tensor": 2, "pipeline": 2}, {"data": 2}),
    # With expert parallelism, Megatron saves two optimizers. Without it, Megatron has one optimizer and cannot load the two.
    ("fully_reshardable", {"data": 2, "expert": 2, "experts": 4, "swiglu": True},
     {"pipeline": 2, "data": 2, "expert": 2, "experts": 4, "swiglu": True}),
], ids=["buckets", "buckets-experts", "model", "model-experts"])
def test_torch_dist_keeps_the_forms_of_the_distributed_optimizer(tmp_path, form, saved, loaded):
    """Shows F3. Megatron loads stacked layers and experts from the moved files. The object in which newer versions keep
    the common state is moved too."""
    options = {"distributed": True, "dtype": "bfloat16", "tied": False}  # if embeddings are tied over stages, Megatron saves zeros
    program = [sys.executable, "-B", HERE / "megatron_torch_dist.py"]
    run_program([*program, "save", json.dumps(saved | options), tmp_path / "run", tmp_path / "held.pt", form], ranks_of(saved))
    moved = reshard(tmp_path / "run", tmp_path / "moved", "--to", "dcp", "--world-size", "3")
    run_program([*program, "load", json.dumps(loaded | options), moved, tmp_path / "held.pt"], ranks_of(loaded))
    common = succeed("ckpt-inspect", "ls", moved, "--values", "common_state*")
    assert "common_state/shard_0_1" in common and "'steps': [1, 2]" in common


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("saved", ["torch_dist", "legacy"])
def test_megatron_goes_on_with_other_tensor_and_pipeline_ranks(tmp_path, saved, distributed):
    """Shows F3. A run moves from TP 2 and PP 2 to TP 1 and PP 4, and has the losses of an uninterrupted run."""
    program = [sys.executable, "-B", HERE / "megatron_resume.py"]
    begun = run_program([*program, "begin", 2, 2, distributed, saved, tmp_path / "run"], 4)
    way = ["--to", "megatron"] if saved == "legacy" else ["--to", "dcp", "--world-size", "3"]
    moved = reshard(tmp_path / "run", tmp_path / "moved", *way)
    resumed = run_program([*program, "resume", 1, 4, distributed, moved], 4)
    losses, found = (json.loads(said[0].strip().splitlines()[-1]) for said in (begun, resumed))
    assert losses[0] > losses[2] and found == pytest.approx(losses, rel=0, abs=1e-5)


def test_universal_checkpoints_of_the_live_package(zero, tmp_path):
    """Shows F2. Reads what ds_to_universal makes of stages 1 to 3. Runs that shuffled their parameters are left out,
    because ds_to_universal exchanges their elements."""
    for path in zero:
        if path.name in ("zero1_bf16", "zero2_bf16"):
            continue
        step = next(path.glob("global_step*"))
        universal = tmp_path / path.name / "universal"
        subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
                        "--input_folder", step, "--output_folder", universal], check=True, timeout=300)
        for opened in (universal, universal.parent):
            assert_same_state(listing(opened), expectation(path), values=False)


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    """Folders that DeepSpeed writes now with pipeline and tensor parallelism, each with what the ranks held."""
    folder = tmp_path_factory.mktemp("parallel")
    subprocess.run([sys.executable, "-B", MAKE / "write_deepspeed_parallel.py"], check=True, timeout=600,
                   env=os.environ | {"TESSERA_FIXTURES": str(folder)})
    return sorted(path for path in (folder / "deepspeed" / "valid").iterdir() if path.is_dir())


def test_pipelines_and_tensor_parallelism_hold_what_deepspeed_held(parallel):
    """Shows F2. Like the test of the fixtures, but with checkpoints that the installed DeepSpeed writes now."""
    assert len(parallel) == 8
    for path in parallel:
        assert_same_state(listing(path), expectation(path))


def test_ds_to_universal_joins_the_same_parameters(parallel, tmp_path):
    """Shows F2. Weights, moments and steps of ds_to_universal equal Tessera's bit for bit. ds_to_universal refuses a
    run without ZeRO, so that run is left out."""
    for path in parallel:
        if path.name.endswith("without_zero"):
            continue
        universal = tmp_path / path.name / "universal"
        subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--no_strict",
                        "--input_folder", next(path.glob("global_step*")), "--output_folder", universal], check=True, timeout=300)
        moved = torch.load(reshard(path, tmp_path / f"{path.name}.pt", "--to", "torch"), weights_only=True)
        folders = [folder for folder in (universal / "zero").iterdir() if folder.is_dir()]
        assert {folder.name for folder in folders} == moved["optim"]["state"].keys()
        for folder in folders:
            found = {"fp32": moved["model"][folder.name], **moved["optim"]["state"][folder.name]}
            for kind in ("fp32", "exp_avg", "exp_avg_sq"):
                expected = torch.load(folder / f"{kind}.pt", weights_only=False)["param"]
                # without a recorded cut, ds_to_universal keeps vectors flat
                assert torch.equal(found[kind].reshape(expected.shape), expected), (path.name, folder.name, kind)
            if (folder / "step.pt").exists():  # stage 3 has one step for all parameters
                assert torch.equal(found["step"], torch.load(folder / "step.pt", weights_only=False)), (path.name, folder.name)
        again = torch.load(reshard(universal, tmp_path / f"{path.name}_again.pt", "--to", "torch"), weights_only=True)
        assert again["optim"]["state"].keys() == moved["optim"]["state"].keys()
        for name, state in moved["optim"]["state"].items():
            assert torch.equal(again["model"][name], moved["model"][name]), (path.name, name)
            assert all(torch.equal(again["optim"]["state"][name][kind], each) for kind, each in state.items()), (path.name, name)


def trained_on(*arguments, ranks):
    """Returns the losses that all ranks of universal_ranks.py print."""
    said = run_program([sys.executable, "-B", HERE / "universal_ranks.py", *arguments], ranks)
    losses = [json.loads(out.strip().splitlines()[-1]) for out in said]
    assert all(each == losses[0] for each in losses)
    return losses[0]


@pytest.mark.parametrize("groups, stage, ranks", [(1, 1, 3), (2, 1, 3), (2, 2, 2), (1, 3, 2)])
def test_deepspeed_goes_on_where_fsdp2_stopped(tmp_path, groups, stage, ranks):
    """Shows F2. DeepSpeed holds the same weights and moments bit for bit, and has the losses of an uninterrupted run."""
    expected = trained_on("fsdp2", groups, tmp_path, ranks=2)
    run_folder = reshard(tmp_path / "dcp", tmp_path / "run", "--to", "deepspeed")
    found = trained_on("deepspeed", groups, run_folder, tmp_path / "held.pt", stage, ranks=ranks)
    assert found == pytest.approx(expected, rel=0, abs=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fsdp2_goes_on_where_deepspeed_stopped(tmp_path, stage):
    """Shows F2. A run moves from two ranks of ZeRO to four of FSDP2, and has the losses of an uninterrupted run."""
    expected = trained_on("zero", 1, tmp_path / "run", stage, ranks=2)
    moved = reshard(tmp_path / "run", tmp_path / "dcp", "--to", "dcp", "--world-size", "4")
    assert trained_on("fsdp2_from", 1, moved, ranks=4) == pytest.approx(expected, rel=0, abs=1e-6)


def test_deepspeeds_own_adam_goes_on_where_fsdp2_stopped(tmp_path):
    """Shows F2. DeepSpeedCPUAdam counts steps in a Python number, but loads the step tensor of PyTorch's optimizers."""
    expected = trained_on("fsdp2", 2, tmp_path, ranks=2)
    run_folder = reshard(tmp_path / "dcp", tmp_path / "run", "--to", "deepspeed")
    found = trained_on("deepspeed", 2, run_folder, tmp_path / "held.pt", 1, "cpu_adam", ranks=2)
    assert found == pytest.approx(expected, rel=0, abs=1e-5)


@pytest.mark.parametrize("groups, stage, ranks", [(2, 1, 2), (1, 3, 2)])
def test_deepspeed_begins_with_weights_alone(tmp_path, groups, stage, ranks):
    """Shows F2. The losses are those of a run whose model had these weights from the start."""
    from safetensors.torch import save_file
    from universal_ranks import Model

    torch.manual_seed(3)
    weights = tmp_path / "model.safetensors"
    save_file(Model().state_dict(), weights)
    run_folder = reshard(weights, tmp_path / "run", "--to", "deepspeed")
    expected = trained_on("deepspeed", groups, weights, "", stage, ranks=ranks)
    assert trained_on("deepspeed", groups, run_folder, "", stage, ranks=ranks) == expected


def test_objects_of_deepspeed_are_objects_again(zero, tmp_path):
    """Shows F2. The written file has a loss scaler of DeepSpeed's class, with the attributes of the saved one."""
    for path in zero:
        moved = reshard(path, tmp_path / path.name, "--to", "deepspeed")
        assert_same_state(listing(moved), expectation(path))
        found = torch.load(next(moved.glob("*/zero/optimizer_state.pt")), weights_only=False)
        file = next(path.glob("*/*zero_pp_rank_0_mp_rank_00_optim_states.pt"))
        expected = torch.load(file, weights_only=False)["optimizer_state_dict"].get("loss_scaler")
        assert ("loss_scaler" in found) == (expected is not None)
        if expected is not None:
            assert type(found["loss_scaler"]) is type(expected) and vars(found["loss_scaler"]) == vars(expected)
