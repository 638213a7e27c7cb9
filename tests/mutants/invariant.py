"""Faults of products whose rows have the same bits in any batch."""

from __future__ import annotations

from tests.mutants.edit import Edit
from tests.mutants.mutant import faults

_blocks = faults("ops._row_blocks", "test_ops_invariant.py")
_chunks = faults("ops.loss.schedules.token_chunks", "test_ops_invariant.py")
_of_log_probs = faults("ops.loss.schedules.token_chunks", "test_ops_linear_log_probs.py")
_plan = faults("ops.loss.schedules.slab_plan", "test_ops_invariant.py")

# fmt: off
MUTANTS = (
    _blocks("padded_row_leaks", "The last rows of a product are those of the padding.",
        "last[: len(out) - whole]", "last[whole - len(out) :]", "test_right[blocks and a part-fast]"),
    _blocks("invariant_without_blocks", "An invariant product has as many rows as there are.",
        "in_blocks(product, out, *operands)", "product(out, *operands)",
        "test_in_any_batch[fast-torch.float32-plain]", within="by_rows"),
    _blocks("last_block_not_padded", "The last block has the rows that are left.",
        "_padded(t[whole:], size)", "t[whole:]", "test_in_any_batch[balanced-torch.float32-plain]",
        also=Edit("liger_kernels.ops._row_blocks", "_padded(out[whole:], size)", "out[whole:].clone()")),
    _blocks("sums_of_the_last_block_begin_anew", "What is added to the rows of the last block starts from zero.",
        "_padded(out[whole:], size)", "_padded(out[whole:].mul(0).nan_to_num(), size)",
        "test_right[blocks and a part-small]"),
    _chunks("invariant_gradients_in_units_of_the_batch", "Gradients of rows are in units of the batch's largest one.",
        "not self.invariant or call.hidden.dtype == torch.float16", "True",
        "test_in_any_batch[balanced-torch.float32-plain]"),
    _of_log_probs("held_logits_computed_again", "The backward computes logits that it has.",
        "start or held is None", "True", "test_the_first_chunk_of_tokens_is_multiplied_once"),
    _of_log_probs("held_logits_of_another_chunk", "The last chunk overwrites the logits that are held of the first.",
        "[*chunks[1:], *chunks[:1]] if holds else chunks", "chunks",
        "test_every_option[token chunks-torch.float16-plain]"),
    faults("ops.loss.linear_cross_entropy", "test_ops_linear_log_probs.py")("held_logits_read_twice",
        "A second backward takes what the first one left of the logits.",
        "ctx.buffers = None", "pass", "test_the_first_chunk_of_tokens_is_multiplied_once"),
    _plan("invariant_slabs_follow_the_rows", "How wide slabs are depends on the number of rows.",
        "slabs.invariant", "False", "test_slabs_do_not_follow_the_rows", within="_parts_in_grad_weight"),
    faults("patching.recipes.linear", "test_patching_invariant.py")("linear_layers_not_in_blocks",
        "A linear layer multiplies as many rows as there are.",
        "invariant_linear(*given, linear.weight, linear.bias)",
        "torch.nn.functional.linear(*given, linear.weight, linear.bias)", "test_a_sequence_among_others[llama]"),
    faults("ops._grouped", "test_patching_invariant.py")("rows_of_an_expert_not_in_blocks",
        "The product of an expert has as many rows as it was given.",
        "multiply_rows(out[start:end], rows[start:end], matrices[group], invariant)",
        "multiply_rows(out[start:end], rows[start:end], matrices[group], False)",
        "test_experts_of_a_token[torch.float32]"),
    faults("ops.lora.products")("parts_of_an_adapters_sum_follow_the_rows",
        "In how many parts an adapter's sum is cut depends on the number of rows.",
        "rows_of_block() if invariant else n_rows", "n_rows",
        "test_ops_invariant.py::test_adapters[fast-torch.float32]"),
)
# fmt: on
