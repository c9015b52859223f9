"""Wrapped models in what others train with: PEFT, Trainer, DistributedDataParallel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import depthmix as dm
from tests.test_project import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from tests.hf.family_models import mixers_of, some_tokens, tiny_model, wrapped  # noqa: E402

SOME_SITES = pytest.mark.parametrize(
    ("mixer", "kv_mixer"), [("block_attnres", None), ("attnres", "depth_attention"), ("mhc", None)], ids=str
)


def data(rows: int = 16) -> list[dict[str, Any]]:
    """Two texts again and again."""
    return [{"input_ids": row, "labels": row} for row in some_tokens(2, 8).repeat(rows // 2, 1)]


def trainer(model: Any, folder: Path, **options: Any) -> Any:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], max_steps=6, save_steps=3, logging_steps=1, seed=3,
        per_device_train_batch_size=2, learning_rate=0.01, weight_decay=0.1, lr_scheduler_type="constant",
        disable_tqdm=True, gradient_checkpointing_kwargs={"use_reentrant": False}, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=data())


@SOME_SITES
def test_trainer_trains_saves_and_resumes_to_the_same_weights(mixer: str, kv_mixer: Any, tmp_path: Path) -> None:
    def fresh() -> Any:
        return wrapped("qwen3", mixer, torch.float32, kv_mixer=kv_mixer, moved=False)

    whole = trainer(fresh(), tmp_path)
    whole.train()
    losses = [line["loss"] for line in whole.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, q) for p, q in zip(mixers_of(whole.model), mixers_of(fresh()), strict=True))
    resumed = trainer(fresh(), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for (name, one), other in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6), name
    resumed.save_model(str(tmp_path / "saved"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        tokens = some_tokens(2, 5)
        assert torch.allclose(loaded(tokens).logits, resumed.model.eval()(tokens).logits, atol=1e-5)


def test_trainer_with_checkpointing_trains_the_same(tmp_path: Path) -> None:
    models = []
    for recompute in (False, True):
        run = trainer(wrapped("llama", dtype=torch.float32, moved=False), tmp_path, gradient_checkpointing=recompute)
        run.train()
        models.append(run.model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_label_smoothing_shifts_the_labels_of_a_wrapped_model(tmp_path: Path) -> None:
    losses = []
    for model in (tiny_model("llama"), dm.wrap(tiny_model("llama"), "residual")):
        run = trainer(model, tmp_path, label_smoothing_factor=0.1)
        batch = {name: torch.stack([row[name] for row in data(2)]) for name in ("input_ids", "labels")}
        losses.append(run.compute_loss(run.model, batch).item())
    assert losses[0] == losses[1]


@SOME_SITES
def test_peft_trains_saves_and_merges_with_mixers_beside_the_adapters(
    mixer: str, kv_mixer: Any, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="adapters need peft")
    modules = ["depthmix"] if kv_mixer is None else ["depthmix", "depthmix_kv"]
    model = wrapped("qwen3", mixer, torch.float32, kv_mixer=kv_mixer, moved=False)
    tokens = some_tokens(4, 8)
    with torch.no_grad():
        start = model(tokens).logits.clone()
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", modules_to_save=modules, r=4))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert any("lora_A" in name and "q_proj" in name for name in trained)
    assert any("depthmix.modules_to_save" in name for name in trained)
    assert all("lora" in name or "depthmix" in name for name in trained)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(8):
        loss = adapted(tokens, labels=tokens).loss
        loss.backward()
        missing = [n for n, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    adapted.eval()
    with torch.no_grad():
        moved = adapted(tokens).logits
        with adapted.disable_adapter():
            assert torch.allclose(adapted(tokens).logits, start, atol=1e-5)
    trace = dm.trace(adapted, tokens)
    assert trace.M.shape[-1] == 9
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        wrapped("qwen3", mixer, torch.float32, kv_mixer=kv_mixer, moved=False), tmp_path / "adapter"
    ).eval()
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, moved, atol=1e-5)
    merged = again.merge_and_unload()
    with torch.no_grad():
        assert torch.allclose(merged(tokens).logits, moved, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, moved, atol=1e-4)


DDP = """
import torch, sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
from tests.hf.family_models import some_tokens, wrapped
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, kinds = dist.get_rank(), [("qwen3", "block_attnres", None), ("llama", "attnres", "depth_attention"),
                                ("gpt_neox", "mhc", None), ("gpt2", "denseformer", "value_residual")]
for family, mixer, kv_mixer in kinds:
    tokens = some_tokens(4, 8)
    alone, shared = (wrapped(family, mixer, torch.float32, kv_mixer=kv_mixer) for _ in range(2))
    parallel = DistributedDataParallel(shared, find_unused_parameters=False)
    for model, rows in ((alone, tokens), (parallel, tokens[2 * rank : 2 * rank + 2])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # a second pass fails where a parameter was not used
            optimizer.zero_grad()
            model.eval()(rows, labels=rows).loss.backward()
            optimizer.step()
    for (name, one), other in zip(alone.named_parameters(), shared.parameters()):
        assert torch.allclose(one, other, atol=1e-4), (family, name)
    if rank == 0:
        print(family)
dist.destroy_process_group()
"""


def test_two_processes_train_without_unused_parameters(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(script), str(ROOT)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs[0][1][-2000:] + outputs[1][1][-2000:]
    assert outputs[0][0].split() == ["qwen3", "llama", "gpt_neox", "gpt2"]


def test_a_device_map_loads_a_wrapped_model_and_a_distributed_one_is_not_wrapped(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="device maps need accelerate")
    model, tokens = wrapped("qwen3", dtype=torch.float32, kv_mixer="depth_attention"), some_tokens(2, 6)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(tokens).logits
        for device_map in ("cpu", "auto", {"": "cpu"}):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
            assert torch.allclose(loaded(tokens).logits, expected, atol=1e-5)
    plain = tiny_model("qwen3")
    accelerate.dispatch_model(plain, {"": "cpu"}, force_hooks=True)
    with pytest.raises(ValueError, match="accelerate has distributed this model over devices; wrap it before"):
        dm.wrap(plain, "attnres")
