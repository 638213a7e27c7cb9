"""A patched model's loss over packed rows: sources, modes, accumulation, ranks and trainers, against single samples."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.nn.parallel import DistributedDataParallel

import liger_kernels
from convergence.arms.float64 import InFloat64
from liger_kernels.patching.logits.packing import Denominator, SampleDenominator
from liger_kernels.patching.logits.running import running
from tests.packing_checks import MODES, boundaries, exact, isolated, packed, patched_copy, samples, truth, weighted
from tests.patching_checks import DEVICE, VOCAB, batch, gradients
from tests.ranks import RANKS, on_ranks

CLOSE = 1e-11  # of the largest element: float64, over the operations of two layers
ONE_FLOAT32 = 2.0**-23  # a loss leaves the model in float32
DOCUMENTS = (9, 4, 5, 2, 7)


@pytest.fixture(autouse=True)
def in_float64():
    with InFloat64():
        yield


def check_against_singles(model, mode, documents, found) -> None:
    """Loss and gradients ``found`` against each sample alone."""
    expected = gradients(model, truth(model, documents, mode))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        close(found[name], value, ONE_FLOAT32 if name == "loss" else CLOSE, f"{mode}: {name}")


def close(found, expected, tolerance, name) -> None:
    """No element is further from ``expected`` than so much of its largest one."""
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    assert error <= tolerance, f"{name} is off by {error:.3g} of its largest element; {tolerance:.3g} is allowed"


@isolated
@pytest.mark.parametrize("kernel", ["linear_cross_entropy", "cross_entropy"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_packed_is_unpacked(family, rows, kernel):
    """One flattened row without padding, and packed rows with some; boundaries by position_ids."""
    model, documents = exact(family), samples(*DOCUMENTS)
    for mode in ("square", "sample"):
        patched = patched_copy(model, mode, kernel)
        loss = patched(**packed(documents, rows, padding=3 * (rows - 1)), use_cache=False).loss
        check_against_singles(model, mode, documents, gradients(patched, loss))
        assert dict(liger_kernels.status(patched).fallbacks) == {}


@pytest.mark.parametrize("source", ["cu_seq_lens_q", "seq_idx", "position_ids", "all", "position_ids from 2"])
def test_each_source(source):
    """Whatever upstream's attention makes of a source, the loss over that forward's logits follows it."""
    model, documents = exact(), samples(*DOCUMENTS)
    row = packed(documents)
    found = {"position_ids": row["position_ids"], **boundaries(documents)}
    chosen = found if source == "all" else {source.split()[0]: found[source.split()[0]]}
    if source == "position_ids from 2":
        chosen["position_ids"] = chosen["position_ids"] + 2
    patched = patched_copy(model, "sample")
    out = patched(input_ids=row["input_ids"], labels=row["labels"], use_cache=False, **chosen)
    logits = model(input_ids=row["input_ids"], use_cache=False, **chosen).logits[0]
    expected = weighted(logits.split([len(ids) for ids, _ in documents]), documents, "sample")
    assert float(out.loss) == pytest.approx(float(expected), rel=ONE_FLOAT32)


@isolated
def test_positional_arguments_are_seen():
    """The third argument of a Llama's forward is position_ids in every version."""
    model, documents = exact(), samples(*DOCUMENTS)
    row = packed(documents)
    patched = patched_copy(model, "sample")
    loss = patched(row["input_ids"], None, row["position_ids"], labels=row["labels"], use_cache=False).loss
    check_against_singles(model, "sample", documents, gradients(patched, loss))


@isolated  # and older than that, transformers knows no shift_labels
def test_shift_labels_are_taken_as_given():
    """Their targets at the ends of sequences count."""
    model, documents = exact(), samples(6, 3, chat=False)
    row = packed(documents)
    targets = torch.randint(3, VOCAB, row["labels"].shape, device=DEVICE)
    patched = patched_copy(model, "sample")
    logits = model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits[0]
    nll = F.cross_entropy(logits, targets[0], reduction="none")
    out = patched(**row, shift_labels=targets, use_cache=False)
    assert float(out.loss) == pytest.approx(float((nll[:6].mean() + nll[6:].mean()) / 2), rel=ONE_FLOAT32)


def test_token_mode_is_what_it_was():
    """The same class as a patch without the argument, so the same code; and no source is asked for."""
    model = exact()
    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    liger_kernels.patch(ours, loss_reduction="token")
    liger_kernels.patch(plain)
    assert type(ours) is type(plain)
    data = {**batch(), "num_items_in_batch": 11}
    assert torch.equal(ours(**data).loss, plain(**data).loss)


def test_without_labels_a_forward_is_left_alone():
    """What a preference trainer does: chosen and rejected in one batch, logits and a loss of its own."""
    model = exact()
    ids = batch()["input_ids"]
    assert torch.equal(patched_copy(model, "sample")(input_ids=ids).logits, model(input_ids=ids).logits)


@isolated
def test_evaluation_reports_the_same_loss():
    model, documents = exact(), samples(*DOCUMENTS)
    patched = patched_copy(model, "square").eval()
    with torch.no_grad():
        out = patched(**packed(documents), use_cache=False)
    assert type(out.logits) is torch.Tensor
    assert type(dict(out.items())["logits"]) is torch.Tensor
    assert float(out.loss) == pytest.approx(float(truth(model, documents, "square")), rel=ONE_FLOAT32)


@isolated
def test_a_head_that_must_compute_its_logits_has_the_same_loss():
    model, documents = exact(), samples(*DOCUMENTS)
    patched = patched_copy(model, "sample")
    patched.lm_head.register_forward_hook(lambda *_: None)
    loss = patched(**packed(documents), use_cache=False).loss
    assert sum(liger_kernels.status(patched).fallbacks.values()) == 1
    check_against_singles(model, "sample", documents, gradients(patched, loss))


def test_logits_that_were_computed_before_the_loss_raise():
    model = exact()

    def forward(self, input_ids=None, labels=None, position_ids=None):
        logits = self.lm_head(self.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state) + 1.0
        from transformers.modeling_outputs import CausalLMOutputWithPast

        loss = self.loss_function(logits, labels, vocab_size=VOCAB)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    model.__class__ = type("Shifted", (type(model),), {"forward": forward})
    patched = patched_copy(model, "sample")
    with pytest.raises(RuntimeError, match="__add__"):
        patched(**packed(samples(5, 3)))


def test_a_loss_function_of_the_users_raises():
    model = exact()
    model.__class__ = type("Own", (type(model),), {"loss_function": property(lambda self: lambda *_, **__: 0.0)})
    patched = patched_copy(model, "sample")
    with pytest.raises(ValueError, match="ForCausalLMLoss"):
        patched(**packed(samples(5, 3)))


def test_a_forward_that_was_replaced_raises():
    patched = patched_copy(exact(), "sample")
    upstream = type(patched).__mro__[1].forward  # type: ignore[attr-defined]
    patched.forward = lambda **arguments: upstream(patched, **arguments)
    with pytest.raises(RuntimeError, match="PackingLossMixin"):
        patched(**packed(samples(5, 3)))


_NAMES = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
ROWS_TO_KEEP = "logits_to_keep" if "logits_to_keep" in _NAMES else "num_logits_to_keep"  # before 4.49
ROW = packed(samples(5, 3, chat=False))
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no source": ({"position_ids": None}, ValueError, "DataCollatorWithFlattening"),
    "sources that disagree": ({"seq_idx": torch.zeros(1, 8, dtype=torch.int64)}, ValueError, "disagree"),
    "cu_seq_lens_q that descends": ({"cu_seq_lens_q": torch.tensor([0, 5, 3, 8])}, ValueError, "ascend"),
    "cu_seq_lens_q past the row": ({"cu_seq_lens_q": torch.tensor([0, 5, 9])}, ValueError, "at most 8"),
    "a float tensor": ({"seq_idx": torch.zeros(1, 8)}, TypeError, "float32"),
    "mrope's planes": ({"position_ids": ROW["position_ids"].expand(3, 1, -1)}, ValueError, "3 planes"),
    "another length": ({"seq_idx": torch.zeros(1, 7, dtype=torch.int64)}, ValueError, r"\[1, 7\]"),
    "a number of tokens": ({"num_items_in_batch": 6}, ValueError, "PackingLossMixin"),
    "a tensor of tokens": ({"num_items_in_batch": torch.tensor(6)}, ValueError, "packing_denominator"),
    "another mode's denominator": (
        {"num_items_in_batch": liger_kernels.packing_denominator(ROW, "square")},
        ValueError,
        "'square'",
    ),
    "rows that are left out": ({ROWS_TO_KEEP: 4}, ValueError, "logits_to_keep"),
}
SEEN_BY_THE_HOST = {"sources that disagree", "cu_seq_lens_q that descends", "cu_seq_lens_q past the row"}


@pytest.fixture(scope="module")
def patched():
    return patched_copy(exact(), "sample")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_and_leaves_the_model_as_it_was(case, patched):
    changes, error, shown = BAD[case]
    changes = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in changes.items()}
    row = {name: value for name, value in {**ROW, **changes}.items() if value is not None}
    good = patched(**ROW, use_cache=False).loss
    if DEVICE.type == "cuda" and case in SEEN_BY_THE_HOST:  # the host does not look: the loss says so
        assert patched(**row, use_cache=False).loss.isnan()
    else:
        with pytest.raises(error, match=shown):
            patched(**row, use_cache=False)
    assert liger_kernels.status(patched).loss_reduction == "sample"
    assert running.forward is running.request is running.weighted is None
    assert torch.equal(patched(**ROW, use_cache=False).loss, good)


def test_the_patch_itself():
    model = exact()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="'token', 'square', 'sample'"):
        liger_kernels.patch(model, loss_reduction="mean")
    with pytest.raises(ValueError, match="no loss"):
        liger_kernels.patch(model, kernels=["rms_norm"], loss_reduction="sample")
    with pytest.raises(ValueError, match="no loss"):
        liger_kernels.patch(model.model, loss_reduction="sample")
    assert [type(module) for module in model.modules()] == classes
    report = liger_kernels.patch(model, loss_reduction="sample")
    assert "loss_reduction='sample'" in str(report)
    assert liger_kernels.patch(model, loss_reduction="sample") is report
    with pytest.raises(ValueError, match=r"loss_reduction='sample', not 'token'.*unpatch"):
        liger_kernels.patch(model)
    model(**packed(samples(5, 3)))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="DataCollatorWithFlattening"):
            twin(**batch())
    before = vars(exact()).keys()
    liger_kernels.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert vars(model).keys() == before
    with liger_kernels.patched(model, loss_reduction="square") as report:
        assert report.loss_reduction == "square"
    assert liger_kernels.status(model) is None


# Several micro-batches: the denominator is theirs together.


@isolated
@pytest.mark.parametrize("mode", ["square", "sample"])
def test_accumulation_by_hand(mode):
    model, documents = exact(), samples(*DOCUMENTS)
    micro = [packed(documents[:2]), packed(documents[2:3]), packed(documents[3:])]  # the second has no target at all
    patched = patched_copy(model, mode)
    denominator = liger_kernels.packing_denominator(micro, mode)
    losses = [patched(**row, num_items_in_batch=denominator, use_cache=False).loss for row in micro]
    assert all(type(loss) is torch.Tensor for loss in losses)
    found = gradients(patched, torch.stack(losses).sum())
    expected = gradients(model, truth(model, documents, mode))
    for name, value in expected.items():
        close(found[name], value, ONE_FLOAT32, name)  # so is the denominator


def test_a_step_without_any_target_has_loss_zero():
    documents = samples(4, 4, 5)[2:]
    patched = patched_copy(exact(), "sample")
    row = packed(documents)
    for count in (None, liger_kernels.packing_denominator([row, row], "sample")):
        found = gradients(patched, patched(**row, num_items_in_batch=count, use_cache=False).loss)
        assert not any(value.any() for value in found.values())


def test_a_denominator_stays_one():
    row = packed(samples(*DOCUMENTS))
    count = liger_kernels.packing_denominator(row, "sample")
    assert float(count) == 3  # the third sample of five has no targets, and the one of two tokens has none left
    assert type(count.to(DEVICE)) is type(count.to(torch.float64)) is SampleDenominator
    assert type(liger_kernels.packing_denominator(row, "token")) is Denominator
    for wrong in ([], {"labels": row["labels"]}):
        with pytest.raises(ValueError, match=r"packing_denominator|position_ids"):
            liger_kernels.packing_denominator(wrong, "sample")


# Trainers. One step of SGD moves every parameter by the learning rate times its gradient.

RATE = 0.5
ONE_STEP: dict[str, Any] = {
    "max_steps": 1,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "use_cpu": DEVICE.type == "cpu",
    "report_to": "none",
    "save_strategy": "no",
}


def trainer_of(base, model, documents, tmp_path, accumulation=2, per_batch=2, **options):
    from transformers import DataCollatorWithFlattening, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=per_batch,
        gradient_accumulation_steps=accumulation,
        **ONE_STEP,
        **options,
    )
    data = [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in documents]
    return base(model=model, args=arguments, train_dataset=data, data_collator=DataCollatorWithFlattening())


def check_step(trainer, model, documents, mode) -> None:
    """The trainer's step is the truth's.

    accelerate divides every loss by its own number of accumulated steps. That is 1 in a Trainer that divides itself;
    transformers 5.2 leaves it at the number of micro-batches, whatever the loss, and so divides twice.
    """
    expected = gradients(model, truth(model, documents, mode))
    before = dict(model.named_parameters())
    for name, parameter in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        moved = (before[name] - parameter).detach() / RATE * trainer.accelerator.gradient_accumulation_steps
        close(moved, expected[name], ONE_FLOAT32, f"{mode}: {name}")


def packed_trainer():
    from transformers import Trainer

    class PackedTrainer(liger_kernels.PackingLossMixin, Trainer):
        pass

    return PackedTrainer


@isolated
@pytest.mark.parametrize("mode", ["square", "sample"])
def test_trainer_with_accumulation(mode, tmp_path):
    model, documents = exact(), samples(9, 4, 7, 2)
    patched = patched_copy(model, mode)
    trainer = trainer_of(packed_trainer(), patched, documents, tmp_path)
    trainer.train()
    check_step(trainer, model, documents, mode)


def test_trainer_in_token_mode_is_the_plain_one(tmp_path):
    from transformers import Trainer

    model, documents = exact(), samples(9, 4, 7, 2)
    trained = []
    for base in (Trainer, packed_trainer()):
        trained.append(patched_copy(model, "token"))
        trainer_of(base, trained[-1], documents, tmp_path).train()
    for ours, plain in zip(trained[1].parameters(), trained[0].parameters(), strict=True):
        assert torch.equal(ours, plain)


def test_a_plain_trainers_count_of_tokens_is_refused(tmp_path):
    from transformers import Trainer

    trainer = trainer_of(Trainer, patched_copy(exact(), "sample"), samples(9, 4, 7, 2), tmp_path)
    with pytest.raises(ValueError, match="PackingLossMixin"):
        trainer.train()


def test_what_a_trainer_cannot_weigh_is_refused(tmp_path):
    patched, documents = patched_copy(exact(), "sample"), samples(9, 4, 7, 2)
    trainer = trainer_of(packed_trainer(), patched, documents, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        trainer.train()
    trainer = trainer_of(packed_trainer(), patched, documents, tmp_path)
    trainer.compute_loss_func = lambda *_, **__: 0.0
    with pytest.raises(ValueError, match="compute_loss_func"):
        trainer.train()


def sft(base, model, documents, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w2"
    )
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        packing=True,
        max_length=32,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        bf16=False,
        **ONE_STEP,
        **({"loss_type": "nll"} if hasattr(trl.SFTConfig, "loss_type") else {}),
    )
    data = Dataset.from_list([{"input_ids": ids.tolist()} for ids, _ in documents])
    return base(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)


@isolated
def test_sft_with_packing(tmp_path):
    """trl packs best-fit first: two rows here, one for each micro-batch.

    Before 0.23 its collator hands out position_ids for flash attention alone: without them the model refuses.
    """
    trl: Any = pytest.importorskip("trl", reason="trl is installed in the cells of the matrix only")

    class PackedSFTTrainer(liger_kernels.PackingLossMixin, trl.SFTTrainer):
        pass

    model, documents = exact(), samples(20, 9, 15, 4, 12, chat=False)
    patched = patched_copy(model, "sample")
    trainer = sft(PackedSFTTrainer, patched, documents, tmp_path)
    assert len(trainer.train_dataset) == 2
    if not {"position_ids", "seq_idx", "cu_seq_lens_q"} & trainer.data_collator([trainer.train_dataset[0]]).keys():
        with pytest.raises(ValueError, match="DataCollatorWithFlattening"):
            trainer.train()
        return
    trainer.train()
    check_step(trainer, model, documents, "sample")


@isolated
def test_a_plain_sft_trainer_is_refused(tmp_path):
    trl = pytest.importorskip("trl")
    trainer = sft(trl.SFTTrainer, patched_copy(exact(), "sample"), samples(20, 9, 15, 4, 12, chat=False), tmp_path)
    with pytest.raises((RuntimeError, ValueError), match="PackingLossMixin"):
        trainer.train()


def train_on_rank(rank: int, folder: str) -> None:
    with InFloat64():
        model, documents = exact(), samples(9, 4, 5, 2, 7, 6, 3, 8)  # the third has no targets
        for mode in ("square", "sample"):
            patched = patched_copy(model, mode)
            # Trainer: each rank gets every other batch of two samples, two of them for the step.
            options = {"ddp_backend": "gloo", "average_tokens_across_devices": True}
            trainer = trainer_of(packed_trainer(), patched, documents, folder, **options)
            trainer.train()
            assert trainer.args.world_size == RANKS
            check_step(trainer, model, documents, mode)
            # A loop of one's own.
            patched = patched_copy(model, mode)
            wrapped = DistributedDataParallel(patched)
            row = packed(documents[rank::RANKS])
            denominator = liger_kernels.packing_denominator(row, mode)
            torch.distributed.all_reduce(denominator)
            (wrapped(**row, num_items_in_batch=denominator, use_cache=False).loss * RANKS).backward()
            for name, value in gradients(model, truth(model, documents, mode)).items():
                if name != "loss":
                    close(patched.get_parameter(name).grad, value, ONE_FLOAT32, name)
        options["average_tokens_across_devices"] = False
        trainer = trainer_of(packed_trainer(), patched_copy(model, mode), documents, folder, **options)
        with pytest.raises(ValueError, match="average_tokens_across_devices"):  # a mean of means
            trainer.train()


@pytest.mark.slow
@isolated
def test_two_ranks(tmp_path):
    """The Trainer and a loop of one's own, each rank with other samples."""
    on_ranks(train_on_rank, str(tmp_path))


def test_modes_are_those_of_the_ops():
    from liger_kernels.ops.loss.packing import EXPONENTS
    from tests.packing_checks import EXPONENT

    assert EXPONENTS == EXPONENT
    assert set(MODES) == set(EXPONENTS)
