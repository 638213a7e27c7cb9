"""Faults of the log-probabilities of chosen classes, and of the divergence of two heads."""

from __future__ import annotations

from tests.mutants.edit import Edit
from tests.mutants.mutant import faults

_ids = faults("ops.loss.id_kernels", "test_ops_linear_log_probs_ids.py")
_divergence = faults("ops.divergence.kernels", "test_ops_linear_divergence.py")
_slabs = faults("ops.loss.schedules.vocabulary_slabs", "test_ops_linear_divergence.py")

_gathered = faults("patching.logits.gathered", "test_patching_gathered.py")

# fmt: off
MUTANTS = (
    _gathered("gathered_scale_forgotten", "Log-probabilities gathered from logits forget what these were divided by.",
        "logits._scale", "1.0",
        "test_equal_and_without_logits[by_logsumexp-llama-torch.float32]", within="_of"),
    _gathered("gathered_rows_in_another_order", "Rows that are gathered one by one and stacked are in reversed order.",
        "torch.stack([m.index for m in found if m.index is not None])",
        "torch.stack([m.index for m in found if m.index is not None][::-1])",
        "test_equal_and_without_logits[by_rows-llama-torch.float32]", within="Gathering.stack"),
    _gathered("gathered_from_logits_that_somebody_changed",
        "Log-probabilities come from hidden states although somebody has changed the real logits.",
        "step is None or self.source.is_used()", "step is None", "test_anything_else_gets_real_logits[in_place]"),
    _gathered("gathered_in_another_dtype", "Under autocast, a log-softmax of lazy logits is float32 on every device.",
        "_dtype_of(function, self.logits)", "torch.promote_types(self.logits.dtype, torch.float32)",
        "test_under_autocast[by_log_softmax]", within="Gathering._as"),
    _ids("ids_of_the_neighbour_row", "Chosen classes are those of the row before.",
        "ids_ptr + offset", "ids_ptr + tl.maximum(offset - n_ids, 0)",
        "test_every_schedule[fast-torch.float32-plain]", within="_id_columns"),
    _ids("repeated_ids_counted_once", "Of equal ids in a row the last one's gradient counts alone.",
        "summed += tl.where(chosen == one[:, None], grad[:, None], 0.0)",
        "summed = tl.where(chosen == one[:, None], grad[:, None], summed)", "test_equal_ids_and_no_class[fast]"),
    faults("ops.loss.gradient")("id_next_to_the_target_loses_the_label",
        "An id that is the target overwrites what the label has there.",
        "id_here & ((id_column != column[:, None]) | (here == 0)[:, None])", "id_here",
        "test_ops_linear_log_probs_ids.py::test_every_schedule[fast-torch.float32-plain]"),
    faults("ops.loss.linear_log_probs")("no_class_is_the_last_class", "An id of -1 is the last class.",
        "taken.take(ids.contiguous())", "taken.take((ids % len(weight)).contiguous())",
        "test_ops_linear_log_probs_ids.py::test_equal_ids_and_no_class[fast]", within="linear_log_probs"),
    _slabs("ids_of_one_rank", "Chosen classes of other ranks have the log-probability of a logit of 0.",
        "shard.add(rows.ids)", "pass", "test_ops_vocab_parallel.py::test_on_ranks[2-ids-fast]"),
    faults("ops.divergence.rows")("teachers_temperature_forgotten", "The teacher's logits have a temperature of 1.",
        "scaling_of(teacher.options(options.temperature))", "scaling_of(teacher.options(1.0))",
        "test_ops_linear_divergence.py::test_every_option[0.0-fast-torch.float32-all]"),
    faults("ops.divergence.rows")("beta_on_the_wrong_side", "The mixture has the student's share of the teacher.",
        "return beta, math.log1p(-beta) if beta < 1.0 else 0.0, math.log(beta) if beta > 0.0 else 0.0",
        "return 1.0 - beta, math.log(beta) if beta > 0.0 else 0.0, math.log1p(-beta) if beta < 1.0 else 0.0",
        "test_ops_linear_divergence.py::test_every_option[0.3-fast-torch.float32-plain]", within="_shares"),
    faults("ops.divergence.rows")("divergences_exchanged", "beta 0 is the divergence of the student from the teacher.",
        "{0.0: Mode.OF_TEACHER, 1.0: Mode.OF_STUDENT}", "{1.0: Mode.OF_TEACHER, 0.0: Mode.OF_STUDENT}",
        "test_ops_linear_divergence.py::test_every_option[0.0-fast-torch.float32-plain]"),
    _divergence("mixture_of_unnormalised_terms", "The teacher's terms of the mixture are not normalised.",
        "log_q = (u - u_max[:, None]) - log_u[:, None]", "log_q = u - u_max[:, None]",
        "test_every_option[0.3-fast-torch.float32-plain]", within="_mixture_block"),
    _divergence("students_own_divergence_missing", "The gradient of a mixture omits what the student's own terms add.",
        "of_student - student_kl[:, None]", "of_student", "test_every_option[0.3-fast-torch.float32-plain]"),
    _divergence("reverse_divergence_missing_in_its_gradient", "The gradient of the reverse divergence omits it.",
        "log_p - log_q - student_kl[:, None]", "log_p - log_q", "test_every_option[1.0-fast-torch.float32-plain]"),
    faults("ops.divergence.linear_divergence")("gradient_into_the_teacher", "The reference's teacher has a gradient.",
        "as_autocast(t.detach(), hidden.device)", "as_autocast(t, hidden.device)",
        "test_ops_linear_divergence.py::test_the_reference_teacher_has_no_gradient",
        also=Edit("liger_kernels.ops.divergence.linear_divergence", "torch.no_grad()", "torch.enable_grad()")),
    _divergence("slabs_forget_the_students_maximum", "The divergence's sum stays relative to an old maximum.",
        "(u_moved - z_moved) * u_total", "u_moved * u_total", "test_every_option[0.0-small-torch.float32-plain]",
        within="_scan_both_block"),
    _slabs("mixture_overwrites_the_logits_that_stay",
        "The second pass of a mixture computes logits again where those of the last classes wait for the backward.",
        "place = SlabPlace.SHARED", "pass",
        "test_ops_linear_divergence.py::test_every_option[0.3-held slabs-torch.bfloat16-plain]",
        within="_logits_of_parts"),
    _slabs("teachers_logits_of_another_slab", "The teacher's logits that are kept lie in the place of the first ones.",
        "tokens * part.first if not part.first else len(kept) - tokens * columns", "0",
        "test_ops_linear_divergence.py::test_in_two_kept_slabs[0.0-8]"),
    faults("ops.divergence.rows")("divergence_of_one_rank", "The sum of the divergence leaves out the other ranks.",
        "result[S.GAP] = terms.sum(0)", "result[S.GAP] = terms[0]",
        "test_ops_vocab_parallel.py::test_on_ranks[2-divergence-small-0.0]"),
)
# fmt: on
