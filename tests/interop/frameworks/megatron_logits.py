"""Loads a state dict into Megatron's GPTModel, and compares its logits with those of transformers. On the CPU.

Usage: python megatron_logits.py dense|experts|mixtral|deepseek|mtp STATE_DICT LOGITS
       python megatron_logits.py dense|experts|mixtral|deepseek save FOLDER LOGITS
STATE_DICT: a file of torch.save, or a torch_dist checkpoint. `save` writes a new model as torch_dist, and its logits.
"""

import contextlib
import multiprocessing
import os
import sys
import warnings

import torch

warnings.simplefilter("ignore")
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY, LENGTH = 3, 32, 4, 2, 16, 48, 64, 24
EXPERTS, CHOSEN_EXPERTS, EXPERT_FEED_FORWARD = 4, 2, 24
Q_LORA, KV_LORA, NOPE, ROPE, V_HEAD_DIM = 12, 10, 8, 4, 8  # of multi-head latent attention


def token_ids() -> torch.Tensor:
    return torch.arange(LENGTH)[None] * 5 % VOCABULARY


def config(kind: str):
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    options = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": FEED_FORWARD,
               "use_cpu_initialization": True, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
               "add_bias_linear": False, "normalization": "RMSNorm", "layernorm_epsilon": 1e-6, "hidden_dropout": 0.0,
               "attention_dropout": 0.0, "bias_activation_fusion": False, "bias_dropout_fusion": False,
               "apply_rope_fusion": False, "masked_softmax_fusion": False, "persist_layer_norm": False,
               "pipeline_dtype": torch.float32}
    experts = {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
               "num_moe_experts": EXPERTS, "moe_router_topk": CHOSEN_EXPERTS, "moe_ffn_hidden_size": EXPERT_FEED_FORWARD,
               "moe_grouped_gemm": False}
    if kind in ("deepseek", "mtp"):
        return MLATransformerConfig(
            **options, **experts, mtp_num_layers=1 if kind == "mtp" else None, q_lora_rank=Q_LORA, kv_lora_rank=KV_LORA, qk_head_dim=NOPE, qk_pos_emb_head_dim=ROPE,
            v_head_dim=V_HEAD_DIM, rope_type="rope", qk_layernorm=True, moe_layer_freq=[0, 1, 1],
            moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_num_groups=2,
            moe_router_group_topk=1, moe_router_topk_scaling_factor=2.5, moe_shared_expert_intermediate_size=EXPERT_FEED_FORWARD)
    grouped = {"num_query_groups": KV_HEADS, "kv_channels": HEAD_DIM}
    if kind == "dense":
        return TransformerConfig(**options, **grouped)
    return TransformerConfig(**options, **grouped, **experts, qk_layernorm=kind == "experts")


class PlainAttention(torch.nn.Module):
    """Attention that Megatron's local implementation lacks: the heads of V have another size than those of Q and K."""

    def __init__(self, *_, **__):
        super().__init__()

    def forward(self, query, key, value, *_, **__):
        heads = (part.permute(1, 2, 0, 3) for part in (query, key, value))  # from [length, batch, heads, size]
        found = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return found.permute(2, 0, 1, 3).flatten(2)


def gpt(kind: str):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: "cpu"  # Megatron puts its tensors on this device
    torch.cuda.synchronize = lambda *_: None
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    multi_latent_attention.HAVE_TE = False
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # belongs to TransformerEngine, which is not installed
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    options = config(kind)
    spec = get_gpt_decoder_block_spec(options, use_transformer_engine=False, normalization="RMSNorm")
    if kind in ("deepseek", "mtp"):
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
    further = get_gpt_mtp_block_spec(options, spec, use_transformer_engine=False) if kind == "mtp" else None
    return GPTModel(options, spec, mtp_block_spec=further, vocab_size=VOCABULARY, max_sequence_length=64, position_embedding_type="rope",
                    rotary_base=10000, share_embeddings_and_output_weights=False, parallel_output=False).eval()


def further_logits(model, *inputs) -> torch.Tensor:
    """Computes the logits of the layer that predicts a further token (MTP). GPTModel uses this layer for its loss only."""
    class Reached(Exception):
        pass

    def take(_module, _inputs, hidden):
        raise Reached(hidden)

    model.mtp.register_forward_hook(take)
    try:
        model(*inputs)
    except Reached as reached:
        (hidden,) = reached.args
        return model.output_layer(hidden.chunk(2)[1])[0].transpose(0, 1)[:, :-1]
    raise AssertionError("no such layer ran")


def state_from(model, path: str) -> dict:
    if not os.path.isdir(path):
        return torch.load(path)
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(path)
    state = dist_checkpointing.load(model.sharded_state_dict(metadata=metadata), path)
    return {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}


def logits_of(model, kind: str) -> torch.Tensor:
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    inputs = (token_ids(), torch.arange(LENGTH)[None], mask)
    with torch.no_grad():
        return further_logits(model, *inputs) if kind == "mtp" else model(*inputs)


def save(kind: str, folder: str, logits: str) -> None:
    from megatron.core import dist_checkpointing

    torch.manual_seed(3)
    model = gpt(kind)
    with torch.no_grad():
        for parameter in model.parameters():  # so that weights of norms are not all 1
            parameter.add_(torch.randn_like(parameter) * 0.05)
    os.mkdir(folder)
    metadata = {"non_homogeneous_layers": kind == "deepseek"}
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata) | {"iteration": 1}, folder, content_metadata=metadata)
    torch.save(logits_of(model, kind), logits)
    for child in multiprocessing.active_children():  # Megatron started them to save
        child.terminate()
    os._exit(0)  # Gloo's threads may abort at an ordinary exit


def main(kind: str, state_dict: str, logits: str) -> None:
    model = gpt(kind)
    loaded = model.load_state_dict(state_from(model, state_dict), strict=False)
    missing = [name for name in loaded.missing_keys if not name.endswith("_extra_state")]
    assert not missing and not loaded.unexpected_keys, (missing, loaded.unexpected_keys)
    found, expected = logits_of(model, kind), torch.load(logits)
    assert torch.allclose(found, expected, atol=1e-5, rtol=0), (found - expected).abs().max()


if __name__ == "__main__":
    (save if sys.argv[2] == "save" else main)(sys.argv[1], *sys.argv[-2:])
