"""Loads a state dict into Megatron's GPTModel, and compares its logits with those of transformers. On the CPU.

Usage: python megatron_logits.py dense|experts STATE_DICT LOGITS
"""

import contextlib
import os
import sys
import warnings

import torch

warnings.simplefilter("ignore")
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY, LENGTH = 3, 32, 4, 2, 16, 48, 64, 24
EXPERTS, CHOSEN_EXPERTS, EXPERT_FEED_FORWARD = 4, 2, 24


def token_ids() -> torch.Tensor:
    return torch.arange(LENGTH)[None] * 5 % VOCABULARY


def config(kind: str):
    from megatron.core.transformer import TransformerConfig

    options = {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
               "num_moe_experts": EXPERTS, "moe_router_topk": CHOSEN_EXPERTS, "moe_ffn_hidden_size": EXPERT_FEED_FORWARD,
               "moe_grouped_gemm": False, "qk_layernorm": True} if kind == "experts" else {}
    return TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=KV_HEADS, kv_channels=HEAD_DIM,
        ffn_hidden_size=FEED_FORWARD, use_cpu_initialization=True, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=1e-6,
        hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False, bias_dropout_fusion=False,
        apply_rope_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False, pipeline_dtype=torch.float32,
        **options)


def gpt(kind: str):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: "cpu"  # where Megatron then puts its tensors
    torch.cuda.synchronize = lambda *_: None
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # TransformerEngine's, which is not installed
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    options = config(kind)
    spec = get_gpt_layer_local_spec(num_experts=options.num_moe_experts, moe_grouped_gemm=False,
                                    qk_layernorm=options.qk_layernorm, normalization="RMSNorm")
    return GPTModel(options, spec, vocab_size=VOCABULARY, max_sequence_length=64, position_embedding_type="rope",
                    rotary_base=10000, share_embeddings_and_output_weights=False, parallel_output=False).eval()


def main(kind: str, state_dict: str, logits: str) -> None:
    model = gpt(kind)
    loaded = model.load_state_dict(torch.load(state_dict), strict=False)
    missing = [name for name in loaded.missing_keys if not name.endswith("_extra_state")]
    assert not missing and not loaded.unexpected_keys, (missing, loaded.unexpected_keys)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        found = model(token_ids(), torch.arange(LENGTH)[None], mask)
    expected = torch.load(logits)
    assert torch.allclose(found, expected, atol=1e-5, rtol=0), (found - expected).abs().max()


if __name__ == "__main__":
    main(*sys.argv[1:])
