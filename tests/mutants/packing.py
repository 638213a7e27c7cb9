"""Faults of the loss of packed rows. The proof's own cases weigh every token alike, so each has the test that must
fail."""

from __future__ import annotations

from tests.mutants.mutant import faults

_model = faults("patching.logits.packing", "test_convergence_packing.py")
_op = faults("ops.loss.packing", "test_convergence_packing.py")
_trainer = faults("integrations.packing", "test_packing.py")
_PROOF = "test_packed_rows_teach_what_their_samples_teach[sample]"

# fmt: off
MUTANTS = (
    _model("packing_boundary_at_ignored_runs",
        "A run of ignored labels is taken for the beginning of a sequence, as if a chat had one turn.",
        "index, broken = sequence_index(labels, **sources, shifted=shifted)",
        "_, broken = sequence_index(labels, **sources, shifted=shifted)\n"
            "ignored = labels == -100\n"
            "index = (ignored & ~ignored.roll(1, -1)).flatten().cumsum(0).view(labels.shape)",
        _PROOF),
    _op("packing_boundary_at_position_0",
        "A sequence begins where a position is 0, and not where it does not go on by one.",
        "start = _changes(rows, rows.roll(1, -1) + 1)",
        "start = _changes(rows == 0, torch.zeros_like(rows, dtype=torch.bool))", _PROOF),
    _model("packing_shift_across_a_boundary", "The last row of a sequence predicts the first token of the next.",
        "not self.shifted", "False", _PROOF, sample=True),
    _trainer("packing_mean_of_means", "Each micro-batch divides by its own denominator, and their means are averaged.",
        "return denominator.as_subclass(cls)", "return None", "test_trainer_with_accumulation"),
    _op("packing_counts_empty_samples", "A sequence without any target counts in the denominator.",
        "denominator = (weight * _share(targets, counted, class_weight)).sum()",
        "<old>\ndenominator = denominator + (sources[0].start & (counts == 0)).sum()", _PROOF),
    _model("packing_token_count_taken", "A number of tokens is divided by in the reduction that counts samples.",
        "not isinstance(count, Denominator) or count.loss_reduction != mode", "False",
        "test_packing.py::test_a_plain_trainers_count_of_tokens_is_refused"),
    _trainer("packing_rank_divides_by_its_own",
        "A rank divides by its own samples alone, and the ranks' means are averaged.",
        "self.accelerator.gather(denominator).sum()", "denominator * self.args.world_size", "test_two_ranks"),
)
