"""liger-kernel 0.8.5: where only the LM head trains, its weight gets no gradient."""

import torch
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from transformers import LlamaConfig, LlamaForCausalLM

device = "cuda" if torch.cuda.is_available() else "cpu"  # there with TRITON_INTERPRET=1
only_the_loss = {"rms_norm": False, "rope": False, "swiglu": False}
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(config).to(device).requires_grad_(False)
model.lm_head.requires_grad_(True)
ids = torch.randint(256, (2, 32), device=device)
for name in ("unpatched", "patched"):
    if name == "patched":
        _apply_liger_kernel_to_instance(model=model, **only_the_loss)
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()
    print(name, "gradient of the head:", model.lm_head.weight.grad is not None)
