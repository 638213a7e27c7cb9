"""Faults of the loss of packed rows. The proof's own cases weigh every token alike, so each has the test that must
fail."""

from __future__ import annotations

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant

_OP = "liger_kernels.ops.packing"
_MODEL = "liger_kernels.patching.packing"
_TRAINER = "liger_kernels.integrations.packing"
_PROOF = "tests/test_convergence_packing.py::test_packed_rows_teach_what_their_samples_teach"


def _packing(
    name: str, does: str, module: str, old: str, new: str, check: str, within: str = "", sample: bool = False
) -> Mutant:
    return Mutant(name, does, (Edit(module, old, new, within),), check=check, dies="test", sample=sample)


# fmt: off
# fmt: off
MUTANTS = (
    _packing("packing_boundary_at_ignored_runs",
        "A run of ignored labels is taken for the beginning of a sequence, as if a chat had one turn.",
        _MODEL, "index, broken = sequence_index(labels, **sources, shifted=shifted)",
        "_, broken = sequence_index(labels, **sources, shifted=shifted)\n"
        "ignored = labels == -100\n"
        "index = (ignored & ~ignored.roll(1, -1)).flatten().cumsum(0).view(labels.shape)", f"{_PROOF}[gemma-sample]"),
    _packing("packing_boundary_at_position_0",
        "A sequence begins where a position is 0, and not where it does not go on by one.",
        _OP, "start = _changes(rows, rows.roll(1, -1) + 1)",
        "start = _changes(rows == 0, torch.zeros_like(rows, dtype=torch.bool))", f"{_PROOF}[gemma-sample]"),
    _packing("packing_shift_across_a_boundary", "The last row of a sequence predicts the first token of the next.",
        _MODEL, "not self.shifted", "False", f"{_PROOF}[gemma-sample]", sample=True),
    _packing("packing_mean_of_means", "Each micro-batch divides by its own denominator, and their means are averaged.",
        _TRAINER, "return denominator.as_subclass(cls)", "return None",
        "tests/test_packing.py::test_trainer_with_accumulation"),
    _packing("packing_counts_empty_samples", "A sequence without any target counts in the denominator.",
        _OP, "denominator = (weight * _share(targets, counted, class_weight)).sum()",
        "denominator = (weight * _share(targets, counted, class_weight)).sum()\n"
        "denominator = denominator + (sources[0].start & (counts == 0)).sum()", f"{_PROOF}[gemma-sample]"),
    _packing("packing_token_count_taken", "A number of tokens is divided by in the reduction that counts samples.",
        _MODEL, "not isinstance(count, Denominator) or count.loss_reduction != mode", "False",
        "tests/test_packing.py::test_a_plain_trainers_count_of_tokens_is_refused"),
    _packing("packing_rank_divides_by_its_own",
        "A rank divides by its own samples alone, and the ranks' means are averaged.",
        _TRAINER, "self.accelerator.gather(denominator).sum()", "denominator * self.args.world_size",
        "tests/test_packing.py::test_two_ranks"),
)
