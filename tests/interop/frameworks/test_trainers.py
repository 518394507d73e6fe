"""Tessera in other people's trainers: Lightning, Hugging Face's Trainer, torchtitan. Runs the examples of docs/trainers
unchanged."""

import datetime
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from ckpt_tools import ROOT, succeed  # noqa: E402
from on_ranks import run_function, run_program  # noqa: E402
from python_package import tessera  # noqa: E402

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def example(page):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trainers" / page).read_text(), re.DOTALL)
    return code


def lightning_module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            self.losses = []

        def training_step(self, batch, _):
            [rows] = batch
            loss = self.net(rows).square().mean()
            self.losses.append(loss.item())
            return loss

        def train_dataloader(self):
            rows = torch.arange(64, dtype=torch.float32).reshape(16, 4) / 64
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    torch.manual_seed(1)
    return Module()


def fit(folder, epochs, plugin, ckpt_path=None, **options):
    import lightning

    module = lightning_module()
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
                                enable_model_summary=False, default_root_dir=folder, plugins=[plugin] if plugin else [], **options)
    trainer.fit(module, ckpt_path=ckpt_path)
    return module.losses, trainer.checkpoint_callback.best_model_path


@pytest.mark.parametrize("asynchronous", [False, True])
def test_lightning_resumes_as_if_it_had_not_stopped(asynchronous, tmp_path):
    import tessera.lightning

    whole, _ = fit(tmp_path / "whole", 4, None)
    plugin = tessera.lightning.CheckpointIO(asynchronous=asynchronous)
    begin, path = fit(tmp_path / "run", 2, plugin)
    assert Path(path).is_dir() and tessera.verify(path) == []
    end, _ = fit(tmp_path / "run", 4, tessera.lightning.CheckpointIO(), ckpt_path=path)
    assert begin + end == whole
    assert "state_dict.net.0.weight" in succeed("ckpt-inspect", "ls", path)


def test_lightning_loads_its_own_files_and_old_files_are_replaced(tmp_path):
    import tessera.lightning

    _, path = fit(tmp_path / "run", 2, None)
    assert Path(path).is_file()
    end, _ = fit(tmp_path / "run", 4, tessera.lightning.CheckpointIO(), ckpt_path=path)
    whole, _ = fit(tmp_path / "whole", 4, None)
    assert end == whole[len(whole) // 2:]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("format", ["native", "torch"])
def test_a_failed_save_leaves_lightnings_old_file(format, asynchronous, monkeypatch, tmp_path):
    """Whether the state is refused, or the write fails later."""
    import tessera.lightning

    last = tmp_path / "last.ckpt"
    torch.save({"epoch": 1}, last)
    (tmp_path / "last.ckpt.old").write_text("of the user")
    plugin = tessera.lightning.CheckpointIO(format=format, asynchronous=asynchronous)

    def fail():
        with pytest.raises((tessera.Error, OSError), match="an object of class|on fire"):
            plugin.save_checkpoint({"epoch": object() if is_refused else 2, "w": torch.ones(2)}, last)
            plugin.teardown()
        assert torch.load(last) == {"epoch": 1} and sorted(os.listdir(tmp_path)) == ["last.ckpt", "last.ckpt.old"]

    def write(job):
        raise OSError("the disk is on fire")

    is_refused = True
    fail()
    is_refused = False
    with monkeypatch.context() as patch:
        patch.setattr(tessera._save.SaveSteps, "_write", write)
        fail()
        with pytest.raises((tessera.Error, OSError), match="on fire"):
            plugin.save_checkpoint({"epoch": 2}, tmp_path / "new.ckpt")
            plugin.teardown()
        assert not (tmp_path / "new.ckpt").exists()
    plugin.save_checkpoint({"epoch": 2}, last)
    plugin.teardown()
    assert plugin.load_checkpoint(last) == {"epoch": 2} and sorted(os.listdir(tmp_path)) == ["last.ckpt", "last.ckpt.old"]
    assert (tmp_path / "last.ckpt.old").read_text() == "of the user"


@pytest.mark.parametrize("format", ["native", "torch"])
def test_two_checkpoints_of_one_filename_stay_although_the_first_is_still_written(format, monkeypatch, tmp_path):
    """Before, ModelCheckpoint did not see the first one yet, and gave the second one its name."""
    import lightning
    import tessera.lightning

    write = tessera._save.SaveSteps._write
    monkeypatch.setattr(tessera._save.SaveSteps, "_write", lambda job: (time.sleep(0.3), write(job))[1])
    callback = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path / "run", filename="m", monitor="step", mode="max", save_top_k=2,
                                                           every_n_train_steps=1)
    fit(tmp_path, 1, tessera.lightning.CheckpointIO(asynchronous=True, format=format), callbacks=[callback], limit_train_batches=2)
    assert sorted(os.listdir(tmp_path / "run")) == ["m-v1.ckpt", "m.ckpt"]
    assert {Path(path).name: tessera.open(path)["global_step"] for path in callback.best_k_models} == {"m.ckpt": 1, "m-v1.ckpt": 2}


def ddp(folder):
    import tessera.lightning

    plugin = tessera.lightning.CheckpointIO(asynchronous=True)
    begin, path = fit(folder, 2, plugin, strategy="ddp", devices=2)
    end, _ = fit(folder, 4, tessera.lightning.CheckpointIO(), ckpt_path=path, strategy="ddp", devices=2)
    whole, _ = fit(folder + "-whole", 4, None, strategy="ddp", devices=2)
    assert begin + end == whole


def test_lightning_passes_urls_on_and_makes_no_folders_of_them(monkeypatch, tmp_path):
    import tessera.lightning

    monkeypatch.chdir(tmp_path)
    saved = []
    monkeypatch.setattr(tessera.lightning, "save", lambda state, path, **_: saved.append(path))
    plugin = tessera.lightning.CheckpointIO()
    plugin.save_checkpoint({"epoch": 1}, "s3://bucket/run/epoch=1.ckpt")
    assert saved == ["s3://bucket/run/epoch=1.ckpt"]
    for call in (lambda path: plugin.save_checkpoint({"epoch": 1}, path), plugin.load_checkpoint, plugin.remove_checkpoint):
        with pytest.raises(ValueError, match="expected a local path, or s3://BUCKET/PREFIX, found 'gs://bucket/last.ckpt'"):
            call("gs://bucket/last.ckpt")
        with pytest.raises(tessera.Error, match="pass it as a str, because pathlib removes one"):
            call(Path("s3://bucket/last.ckpt"))
    tessera.save({"epoch": 1}, tmp_path / "saved")
    opened = []
    monkeypatch.setattr(tessera.lightning, "open_checkpoint", lambda path: opened.append(path) or tessera.open(tmp_path / "saved"))
    assert plugin.load_checkpoint("hf://owner/model") == {"epoch": 1} and opened == ["hf://owner/model"]
    assert os.listdir(tmp_path) == ["saved"]


def test_lightning_with_ddp_on_two_ranks(tmp_path):
    program = f"import sys; sys.path[:0] = {sys.path!r}; import test_trainers; test_trainers.ddp({str(tmp_path / 'run')!r})"
    run_program([sys.executable, "-B", "-c", program], 2)


def save_on_one_rank(folder):
    import torch.distributed as dist

    import tessera.lightning

    dist.init_process_group("gloo")
    plugin = tessera.lightning.CheckpointIO(asynchronous=True)

    def save(value):
        if dist.get_rank() == 0:
            plugin.save_checkpoint({"w": torch.full((2,), value)}, folder / "last.ckpt")
        dist.barrier()  # as Lightning's Trainer does

    save(1.0)
    plugin.teardown()
    dist.new_group([0, 1], timeout=datetime.timedelta(seconds=30))  # hangs if a save makes groups on one rank
    write = tessera._save.SaveSteps._write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tessera._save.SaveSteps, "_write", lambda steps: (time.sleep(1), write(steps)))
        save(2.0)
        assert plugin.load_checkpoint(folder / "last.ckpt")["w"].tolist() == [2, 2]
    dist.destroy_process_group()


def test_lightning_saves_on_one_rank_and_loads_on_all(tmp_path):
    run_function(save_on_one_rank, 2, tmp_path)


def test_the_example_for_lightning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example("lightning.md"), "lightning.md", "exec"), {"model": lightning_module()})
    [folder] = (tmp_path / "run" / "checkpoints").iterdir()
    assert tessera.verify(folder) == []


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def forward(self, x, labels):
        return {"loss": (self.net(x) - labels).square().mean()}


def dataset():
    rows = torch.arange(96, dtype=torch.float32).reshape(24, 4) / 96
    return [{"x": row, "labels": row.sum(0, keepdim=True)} for row in rows]


def trainer_of_transformers(folder, steps, callback, **options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=str(folder), save_steps=3, max_steps=steps, report_to=[], disable_tqdm=True,
                                  use_cpu=True, per_device_train_batch_size=2, logging_steps=1, seed=5, learning_rate=0.01,
                                  **options)
    torch.manual_seed(2)
    return Trainer(Regression(), arguments, train_dataset=dataset(), eval_dataset=dataset(), callbacks=[callback] if callback else [])


def losses(trainer):
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


def test_transformers_resumes_as_if_it_had_not_stopped(tmp_path):
    import tessera.transformers

    whole = trainer_of_transformers(tmp_path / "whole", 9, None)
    whole.train()
    folder = tmp_path / "run"
    options = {"save_only_model": True, "save_total_limit": 2}
    first = trainer_of_transformers(folder, 9, tessera.transformers.SaveCallback(), **options)
    first.train()
    assert losses(first) == losses(whole)
    shutil.rmtree(folder / "checkpoint-9")
    second = trainer_of_transformers(folder, 9, tessera.transformers.SaveCallback(), **options)
    assert tessera.transformers.latest(folder) == str(folder / "checkpoint-6")
    second.train(resume_from_checkpoint=tessera.transformers.latest(folder))
    assert losses(second) == losses(whole)
    assert all(torch.equal(one, other) for one, other in zip(second.model.parameters(), whole.model.parameters()))
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-6", "checkpoint-9"]
    assert not (folder / "checkpoint-9" / "optimizer.pt").exists()


def test_transformers_refuses_a_url_as_its_folder(monkeypatch, tmp_path):
    import tessera.transformers

    monkeypatch.chdir(tmp_path)
    for folder in ("s3://bucket/run", "gs://bucket/run"):
        with pytest.raises(ValueError, match=f"output_dir: expected a local path, found '{folder}'"):
            tessera.transformers.latest(folder)
    with pytest.raises(tessera.Error, match="pass it as a str, because pathlib removes one"):
        tessera.transformers.latest(Path("s3://bucket/run"))
    trainer = trainer_of_transformers(tmp_path / "run", 3, tessera.transformers.SaveCallback(), save_only_model=True)
    trainer.args.output_dir = "s3://bucket/run"
    with pytest.raises(ValueError, match="output_dir: expected a local path, found 's3://bucket/run'"):
        trainer.train()


def test_transformers_says_which_folder_is_complete(tmp_path):
    import tessera.transformers

    options = {"save_only_model": True}
    trainer_of_transformers(tmp_path, 6, tessera.transformers.SaveCallback(), **options).train()
    shutil.rmtree(tmp_path / "checkpoint-6" / "tessera")
    assert tessera.transformers.latest(tmp_path) == str(tmp_path / "checkpoint-3")
    assert tessera.transformers.latest(tmp_path / "elsewhere") is None
    trainer = trainer_of_transformers(tmp_path, 9, tessera.transformers.SaveCallback(), **options)
    with pytest.raises(tessera.Error, match="expected tessera with the optimizer's state, which SaveCallback writes, found none"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    with pytest.raises(ValueError, match="expected save_only_model=True"):
        trainer_of_transformers(tmp_path / "other", 3, tessera.transformers.SaveCallback()).train()


@pytest.mark.parametrize("options", [{"save_strategy": "epoch"}, {"save_strategy": "best", "metric_for_best_model": "loss",
                                                                   "eval_strategy": "epoch"}])
def test_transformers_removes_no_folder_before_the_next_one_is_complete(options, tmp_path, monkeypatch):
    import transformers

    import tessera.transformers

    write = tessera._save.SaveSteps._write
    monkeypatch.setattr(tessera._save.SaveSteps, "_write", lambda steps: (time.sleep(1), write(steps)))
    rotate = transformers.Trainer._rotate_checkpoints
    newest = []  # the newest complete folder after each removal of old ones

    def remove(trainer, *arguments, **more):
        rotate(trainer, *arguments, **more)
        newest.append(tessera.transformers.latest(tmp_path))

    monkeypatch.setattr(transformers.Trainer, "_rotate_checkpoints", remove)
    trainer_of_transformers(tmp_path, 36, tessera.transformers.SaveCallback(), save_only_model=True, save_total_limit=2, **options).train()
    assert newest == [None, *(str(tmp_path / f"checkpoint-{step}") for step in (12, 24))]


def test_transformers_refuses_to_keep_one_folder(tmp_path):
    import tessera.transformers

    trainer = trainer_of_transformers(tmp_path, 3, tessera.transformers.SaveCallback(), save_only_model=True, save_total_limit=1)
    with pytest.raises(ValueError, match="expected save_total_limit=2 or more, or None, beside tessera's SaveCallback, found 1"):
        trainer.train()


def test_transformers_saves_each_trial_of_a_search_beside_its_model(tmp_path, monkeypatch):
    import transformers.integrations
    from transformers.trainer_utils import HPSearchBackend

    import tessera.transformers

    class Trial:  # as Optuna's
        number = 4
        params: dict = {}

    monkeypatch.setattr(transformers.integrations, "hp_params", lambda trial: trial.params)

    def trainer(hp_name):
        made = trainer_of_transformers(tmp_path, 3, tessera.transformers.SaveCallback(), save_only_model=True)
        # As hyperparameter_search sets them, which needs Optuna.
        made.hp_search_backend, made.hp_name, made._trial = HPSearchBackend.OPTUNA, hp_name, Trial()
        made.hp_space, made.model_init = lambda trial: {}, lambda: made.model
        return made

    with pytest.raises(ValueError, match="hyperparameter_search: expected hp_name"):
        trainer(None).train(trial=Trial())
    assert not list(tmp_path.rglob("checkpoint-*"))
    trainer(lambda trial: f"trial-{trial.number}").train(trial=Trial())
    assert tessera.transformers.latest(tmp_path / "trial-4") == str(tmp_path / "trial-4" / "checkpoint-3")
    assert [path.name for path in tmp_path.iterdir()] == ["trial-4"]


def test_transformers_resumes_with_its_gradient_scaler(tmp_path):
    """Of fp16=True, here on the CPU."""
    import tessera.transformers

    def trainer(folder, steps, scaler=True):
        made = trainer_of_transformers(folder, steps, tessera.transformers.SaveCallback(), save_only_model=True)
        if scaler:
            made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        return made

    whole = trainer(tmp_path / "whole", 7)
    whole.train()
    assert whole.accelerator.scaler.state_dict()["scale"] == 32 and whole.accelerator.scaler.state_dict()["_growth_tracker"] == 1
    folder = tmp_path / "run"
    trainer(folder, 3).train()
    resumed = trainer(folder, 7)
    resumed.train(resume_from_checkpoint=tessera.transformers.latest(folder))
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()

    trainer(folder, 9, scaler=False).train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    with pytest.warns(RuntimeWarning, match="expected the state of the gradient scaler, because fp16=True, found none"):
        trainer(folder, 12).train(resume_from_checkpoint=str(folder / "checkpoint-9"))


def test_the_example_for_transformers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example("hugging-face.md"), "hugging-face.md", "exec"), {"model": Regression(), "dataset": dataset()})
    assert tessera.verify(tmp_path / "run" / "checkpoint-6" / "tessera") == []


class TrainState:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Schedulers:
    """Behaves like torchtitan's container of schedulers."""

    def __init__(self, optimizer):
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def state_dict(self):
        return self.scheduler.state_dict()

    def load_state_dict(self, state):
        self.scheduler.load_state_dict(state)


class Optimizers:
    """Has a state dict by parameter names, like torchtitan's container of optimizers."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        return get_optimizer_state_dict(self.model, self.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))

    def load_state_dict(self, state):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        set_optimizer_state_dict(self.model, self.optimizer, state,
                                 options=StateDictOptions(flatten_optimizer_state_dict=True))


def titan_job(seed):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(seed)
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return {"model": model, "optimizers": Optimizers(model, optimizer), "lr_schedulers": Schedulers(optimizer),
            "train_state": TrainState(), "optimizer": optimizer}


def titan_steps(job, count):
    found = []
    for _ in range(count):
        loss = job["model"](torch.ones(4, 6)).square().mean()
        loss.backward()
        job["optimizer"].step()
        job["optimizer"].zero_grad()
        job["lr_schedulers"].scheduler.step()
        job["train_state"].step += 1
        found.append(loss.item())
    return found


def titan_manager(job, folder, **options):
    import tessera.torchtitan

    config = tessera.torchtitan.CheckpointManager.Config(enable=True, interval=2, keep_latest_k=2, **options)
    return config.build(dataloader=None, model_parts=[job["model"]], optimizers=job["optimizers"],
                        lr_schedulers=job["lr_schedulers"], states={"train_state": job["train_state"]}, sd_adapter=None,
                        base_folder=str(folder))


def titan_saves(folder, mode, expected):
    job = titan_job(1)
    manager = titan_manager(job, folder, async_mode=mode)
    for step in (2, 4):
        titan_steps(job, 2)
        manager.save(step)
        manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    manager.close()
    torch.save(titan_steps(job, 3), expected)


def titan_loads(folder, expected):
    job = titan_job(2)
    manager = titan_manager(job, folder)
    assert manager.load() and job["train_state"].step == 4
    found, wanted = titan_steps(job, 3), torch.load(expected)
    assert max(abs(one - other) for one, other in zip(found, wanted)) < 1e-6, (found, wanted)
    manager.close()


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_torchtitan_goes_on_at_another_number_of_ranks(mode, tmp_path):
    run_function(titan_saves, 2, tmp_path, mode, tmp_path / "losses")
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-4"]
    assert tessera.verify(tmp_path / "checkpoint" / "step-4") == []
    (tmp_path / "checkpoint" / "step-6").mkdir()  # left by a killed job
    run_function(titan_loads, 1, tmp_path, tmp_path / "losses")


def titan_loads_remarkable_checkpoints(folder):
    files = [ROOT / "fixtures" / "rank_files" / "valid" / "fsdp2_hybrid" / f"model_world_size_4_rank_{rank}.pt" for rank in range(4)]
    job = titan_job(1)
    manager = titan_manager(job, folder)
    manager.states = {}  # so that the manager passes the loaded state to no model

    def load(path):
        with tessera.open(path) as found:
            state = {name: torch.zeros_like(found[name].torch()) for name in found}
        manager.dcp_load(state, str(path), from_hf=False, from_quantized=False)

    with pytest.raises(tessera.Error, match="part: expected a whole checkpoint, found one rank of 4"):
        load(files[0])
    whole = folder / "whole"
    whole.mkdir()
    for file in files:
        shutil.copy(file, whole)
    content = torch.load(whole / files[3].name, weights_only=False)
    content["up.weight"].to_local().add_(1)
    torch.save(content, whole / files[3].name)
    with pytest.warns(RuntimeWarning, match="replicas"):
        load(whole)


def test_torchtitan_is_told_what_a_load_remarks(tmp_path):
    """Before, a part of a checkpoint was loaded as if it were whole."""
    run_function(titan_loads_remarkable_checkpoints, 1, tmp_path)


def titan_refuses_urls():
    with pytest.raises(ValueError, match="folder: expected a local path, found 's3://bucket/run'"):
        titan_manager(titan_job(1), "s3://bucket/run")


def test_torchtitan_refuses_a_url_as_its_folder():
    run_function(titan_refuses_urls, 1)


def titan_example(folder):
    os.chdir(folder)
    exec(compile(example("torchtitan.md"), "torchtitan.md", "exec"), titan_job(1))


def test_the_example_for_torchtitan(tmp_path):
    run_function(titan_example, 2, tmp_path)
    assert tessera.verify(tmp_path / "run" / "checkpoint" / "step-10") == []
