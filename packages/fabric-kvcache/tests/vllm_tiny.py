"""Makes a folder with a tiny random model: python vllm_tiny.py KIND TOKENIZER_FOLDER FOLDER."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

_COMMON = {
    "vocab_size": 49_152, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


def config(kind: str) -> Any:
    """qwen3: grouped heads; gemma3: sliding windows beside full attention; deepseek: latent vectors, and experts."""
    import transformers

    if kind == "qwen3":
        return transformers.Qwen3Config(**_COMMON, num_hidden_layers=4)
    if kind == "deepseek":
        # vLLM's attention on processors knows latent vectors of 512 and 64 elements only. Its model always has an
        # output layer of its own: without weights for it, it says what that memory happens to hold.
        # Its rotary embedding is the real one's, YaRN: the kernel for the plain one turns other elements than it should
        # where queries and keys are slices, as they are here (0.32).
        untied = {"num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False}
        yarn = {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        }  # fmt: skip
        return transformers.DeepseekV3Config(
            **{**_COMMON, **untied}, rope_parameters=yarn, num_hidden_layers=3, first_k_dense_replace=1,
            kv_lora_rank=512, q_lora_rank=96, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64,
            n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
            moe_intermediate_size=128, topk_method="noaux_tc",
        )  # fmt: skip
    assert kind == "gemma3", kind
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    # With the embeddings as its output layer it would say the last token again, whatever it has read; and with a scalar
    # of its head's size, as ever, it would hardly look at one token more than at another.
    hearing = {"tie_word_embeddings": False, "query_pre_attn_scalar": 4}
    return transformers.Gemma3TextConfig(
        **{**_COMMON, **hearing, "layer_types": kinds, "sliding_window": 64}, num_hidden_layers=6
    )


def make(kind: str, tokenizer: Path, target: Path) -> None:
    """Write it, with a tokenizer that is there already."""
    import torch
    import transformers

    torch.manual_seed(5)
    found = config(kind)
    model = transformers.AutoModelForCausalLM.from_config(found, dtype=torch.bfloat16)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, target / name)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
