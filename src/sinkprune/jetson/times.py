"""Times of a request on a board: a bound from its datasheet, and a range by measured shares of the peak."""

from __future__ import annotations

from dataclasses import dataclass

from sinkprune.contract.precision import WeightsName


@dataclass(frozen=True)
class PeakUtilisation:
    """The share of a processor's peak that was reached elsewhere."""

    least: float
    most: float
    measured: str
    """The measurement, and where it is documented."""


_PRODUCTS = PeakUtilisation(
    0.45,
    0.9,
    "share of the peak FLOPs in prefill: on two cores 0.48 of llava-1.5-7b in int4 on ort-cpu+openvino, where int8 "
    "products count four times the 430 GFLOP/s of fp32, and 0.89 of llava-1.1b in fp32 at retain-32 (README.md, "
    "docs/savings.md)",
)
_READS = "share of a plain memory read in decode, {} on two cores (docs/measurements/peers-llava-1.1b.md)"
_SIXTEEN_BITS = PeakUtilisation(0.83, 0.89, _READS.format("bf16"))
_INT8 = PeakUtilisation(0.68, 0.8, _READS.format("int8"))
_INT4 = PeakUtilisation(0.41, 0.79, _READS.format("int4"))
COMPUTE = "prefill"
"""The key of the share of FLOPs in `SHARES`. All other keys are forms of weights."""
SHARES: dict[str, PeakUtilisation] = {
    COMPUTE: _PRODUCTS,
    "fp32": _SIXTEEN_BITS,
    "fp16": _SIXTEEN_BITS,
    "bf16": _SIXTEEN_BITS,
    "int8": _INT8,
    "int4": _INT4,
    "uint4": _INT4,
}
"""Measured on CPUs, because no board has run this. A datasheet's peak is above what a plain read or a product
reaches, so expect the slow end of each range, or slower."""


@dataclass(frozen=True)
class TimeBounds:
    """The least milliseconds by a board's datasheet."""

    encoder_flops_ms: float
    """Vision tower and projector, at the dense fp16 peak."""
    prefill_flops_ms: float
    """The decoder's prefill, at the dense fp16 peak."""
    prefill_weights_ms: float
    """The decoder's prefill, by reading its weights once."""
    token_ms: float
    """A token of the answer, by reading weights and cache."""

    @property
    def prefill_ms(self) -> float:
        """The larger of the two bounds of a prefill."""
        return max(self.prefill_flops_ms, self.prefill_weights_ms)

    @property
    def by_weights(self) -> bool:
        """Whether reading the weights bounds the prefill, not FLOPs."""
        return self.prefill_weights_ms > self.prefill_flops_ms

    def at(self, computing: float, reading: float) -> TimeBounds:
        """Return the milliseconds at these shares of the peak FLOPs and of the memory's peak bandwidth."""
        return TimeBounds(
            self.encoder_flops_ms / computing,
            self.prefill_flops_ms / computing,
            self.prefill_weights_ms / reading,
            self.token_ms / reading,
        )


@dataclass(frozen=True)
class TimeRange:
    """The bound of a time, and its expected range."""

    bound: float
    least: float
    most: float

    @property
    def range(self) -> str:
        """The range for tables, as in "44-85"."""
        return f"{rounded(self.least)}-{rounded(self.most)}"

    @property
    def rounded_bound(self) -> str:
        """The bound for tables."""
        return rounded(self.bound)


def rounded(milliseconds: float) -> str:
    """Return milliseconds for tables, with two digits at least."""
    return f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.2g}"


@dataclass(frozen=True)
class ExpectedTimes:
    """The times of a request's parts, without preparing the picture."""

    ttft: TimeRange
    """Vision tower, projector and prefill: the first token."""
    token: TimeRange
    """Each later token."""
    answer: TimeRange
    """The whole answer of a typical request."""


def expected_times(bounds: TimeBounds, form: WeightsName, new_tokens: int) -> ExpectedTimes:
    """Return the bounds and ranges for decoder weights stored in `form` and an answer of `new_tokens`."""
    computing, reading = SHARES[COMPUTE], SHARES[form]
    cases = (bounds, bounds.at(computing.most, reading.most), bounds.at(computing.least, reading.least))
    ttft = [case.encoder_flops_ms + case.prefill_ms for case in cases]
    token = [case.token_ms for case in cases]
    answer = [first + (new_tokens - 1) * later for first, later in zip(ttft, token, strict=True)]
    return ExpectedTimes(TimeRange(*ttft), TimeRange(*token), TimeRange(*answer))
