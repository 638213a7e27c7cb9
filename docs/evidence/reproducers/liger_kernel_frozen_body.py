"""liger-kernel 0.8.5: where only the LM head trains, its weight gets no gradient."""

import torch
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(config).cuda().requires_grad_(False)
model.lm_head.requires_grad_(True)
ids = torch.randint(256, (2, 32), device="cuda")
for name in ("unpatched", "patched"):
    if name == "patched":
        _apply_liger_kernel_to_instance(model=model)
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()
    print(name, "gradient of the head:", model.lm_head.weight.grad is not None)
