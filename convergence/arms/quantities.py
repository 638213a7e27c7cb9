"""Names for observations: what is observed, when, and how it is judged. Records, reports and failures show their
text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

INITIAL, SGD, ADAMW = "initial", "SGD", "AdamW"
# These are no steps of an optimizer. They are decoding with a cache at the initial weights, and the end of a phase.
DECODING, WITHOUT_GRADIENTS, EVALUATION, END = "decoding", "without gradients", "evaluation", "end"


class Moment(NamedTuple):
    """A step of a phase, or one micro-batch of a step if ``batch`` is given (from 1): "initial: accumulated, batch
    2"."""

    phase: str
    step: str
    batch: int | None = None

    def __str__(self) -> str:
        return f"{self.phase}: {self.step}" + ("" if self.batch is None else f", batch {self.batch}")

    @classmethod
    def parse(cls, text: str) -> Moment:
        """The moment with this text. A text of another form becomes a phase of that name."""
        phase, _, rest = text.partition(": ")
        step, _, batch = rest.partition(", batch ")
        return cls(phase, step, int(batch) if re.fullmatch("[0-9]{1,9}", batch) else None)

    def whole(self) -> Moment:
        """The moment of the whole step, with all of its micro-batches."""
        return self._replace(batch=None)


class Quantity(NamedTuple):
    """An observed quantity. ``name`` is the name of a parameter, a module or a logged value. It is empty for a quantity
    of the whole model."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind

    @classmethod
    def parse(cls, text: str) -> Quantity:
        """The quantity with this text. A text with no known beginning is a quantity of the whole model."""
        if cls(text) not in HEAD:
            for kind in (*INSIDE, GRADIENT, PARAMETER, DISPLACEMENT, LOGGED):
                if text.startswith(f"{kind} "):
                    return cls(kind, text.removeprefix(f"{kind} "))
        return cls(text)


GRADIENT, PARAMETER, DISPLACEMENT, LOGGED = "gradient of", "parameter", "displacement of", "logged"
# The ways to compute the log-probabilities of a text, in addition to decoding, and the profile that compares them.
TRAINING_FORWARD, PREFILL = "training forward", "prefill"
CONSISTENCY = "consistency"
# For each layer, for the norm after the last layer (named by the module), and for the head.
HIDDEN_STATES, HIDDEN_GRADIENT = "hidden states entering", "gradient of the hidden states entering"
# Of a model of the user's own, each tensor that it returns (the name is its key or index).
OUTPUT, OUTPUT_GRADIENT = "output", "gradient of the output"
INSIDE = (HIDDEN_GRADIENT, HIDDEN_STATES, OUTPUT_GRADIENT, OUTPUT)
LOSS = Quantity("loss")
GRADIENT_NORM = Quantity("gradient norm")
EVALUATION_LOGITS = Quantity("logits")
TRAINING_LOGITS = Quantity("logits that the caller reads in training")
CALLERS_LOGITS = Quantity("logits of the caller")
LOG_PROBS, COMPARED = Quantity("log-probabilities"), "log-probabilities of"
GENERATED, SCORES = Quantity("generated tokens"), Quantity("scores of the generated tokens")
LOGITS = Quantity("gradient of the logits")
# The same, but each element is measured by its own size, without targets. The gradient at the target would hide a fault
# among small probabilities.
BY_ELEMENT = Quantity("relative gradient of the logits")
TARGET_LOGIT = Quantity("gradient of the logits, at the target")
HIDDEN = Quantity(HIDDEN_GRADIENT, "the head")
HEAD = (LOGITS, BY_ELEMENT, TARGET_LOGIT, HIDDEN)  # in the order of a backward pass
FORWARD = (LOSS, EVALUATION_LOGITS, TRAINING_LOGITS, CALLERS_LOGITS, GENERATED)  # computed by a forward pass alone


class Remark(NamedTuple):
    """A problem at some moment, or an output that the caller did not get then, in words."""

    at: Moment
    what: str

    def __str__(self) -> str:
        return f"{self.at}: {self.what}"


class Finding(str, Enum):
    """The kind of a failure. It equals its text, which records and reports show."""

    # A judged number is beyond its bound.
    ERROR_RATIO = "error ratio"
    LARGEST_ERROR_RATIO = "largest error ratio"
    ROW_ERROR_RATIO = "row error ratio"
    GAIN = "gain"
    GAIN_AGAINST_THE_OTHERS = "gain against the others"
    LARGEST_DIFFERENCE = "largest difference"
    MEAN_DIFFERENCE = "mean difference"
    KL_PER_TOKEN = "KL per token"
    SHARE_OUTSIDE = "share outside 1 ± 0.01"
    DISTANCE_FROM_THE_BAND = "distance from the band"
    NOT_ZERO_BY_ROUNDING = "not 0 by rounding"
    CANNOT_JUDGE = "cannot judge"  # the bound itself says nothing
    # What was observed is not comparable, or is not what it was.
    MISSING = "missing"
    UNEXPECTED = "unexpected"
    SHAPE = "shape"
    DTYPE = "dtype"
    FINITE = "finite"
    ZERO = "zero"
    NON_ZERO = "non-zero"
    LOGITS_GAP = "gap of the logits"
    ROUNDED_VALUE = "rounded value"
    BIT_FOR_BIT = "bit for bit"  # an earlier run had another value
    # The candidate did what the baseline does not do.
    OVERWRITTEN = "overwritten"
    KEPT_ALIVE = "kept alive"
    NEW_WARNING = "warning that the baseline does not give"
    CHANGED = "changed"
    PATCHED_TOO = "patched too"
    # It did not run, or not as a patched model.
    CANNOT_RUN = "cannot run"  # the patch itself raised
    RAISED = "raised"
    DIED = "died"
    NOT_PATCHED = "not patched"
    NOT_LAUNCHED = "not launched"
    NOT_ITS_OWN = "not its own"
    HEAD_NOT_REPLACED = "trl's head not replaced"
    # What it is judged against is not what it should be.
    NOT_PRISTINE = "not pristine"
    CHANGED_WHERE_KEPT = "changed where it is kept"
    DID_NOT_TRAIN = "did not train"

    __str__ = str.__str__


# The judged statistics of a quantity.
STATISTICS = ("error ratio", "largest error ratio", "row error ratio", "gain", "gain against the others")
# The judged statistics of log-probabilities.
DIFFERENCES = ("largest difference", "mean difference", "KL per token", "share outside 1 ± 0.01")


@dataclass(frozen=True)
class Statistic:
    """One judged number: ``value`` may be at most ``bound``."""

    quantity: str
    step: str
    statistic: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.value <= self.bound  # a NaN fails

    @property
    def share(self) -> float:
        """Value divided by bound; above 1 is a failure. A value that is not a number counts as infinite."""
        return share(self.value, self.bound)

    def __str__(self) -> str:
        return f"{self.value:.2g} / {self.bound:.2g}"


class Failure(NamedTuple):
    """One failure of a candidate, in words."""

    quantity: str
    step: str
    finding: Finding
    value: str
    bound: str = ""

    @classmethod
    def of(cls, quantity: Quantity | str, step: Moment | str, finding: Finding, value: str, bound: str = "") -> Failure:
        """The failure of ``quantity`` at ``step``, which it holds as text."""
        return cls(str(quantity), str(step), finding, value, bound)

    @property
    def key(self) -> tuple[str, str]:
        """The failure without its step: quantity and finding."""
        return self.quantity, self.finding

    def __str__(self) -> str:
        return " ".join(filter(None, self))


def share(value: float, bound: float) -> float:
    if not bound:
        return 0.0 if value <= bound else math.inf
    return math.inf if math.isnan(value / bound) else value / bound


def worst(statistics: Iterable[Statistic], kind: str) -> Statistic | None:
    """The judged number of this kind that is nearest to its bound or farthest beyond it."""
    return max((s for s in statistics if s.statistic == kind), key=lambda s: s.share, default=None)
