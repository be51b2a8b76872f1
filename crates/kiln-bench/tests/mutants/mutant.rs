//! How kernels are broken, and which check is meant for each.

use burn::tensor::DType;
use kiln_bench::gate::Check;

/// How a kernel is broken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mutant {
    /// It is not: the control.
    None,
    /// The last terms are left out where K is no multiple of 4.
    TailDropped,
    /// Terms come in chunks, and the last one takes the place of those before.
    LastChunk,
    /// Results are 1 % too large.
    OnePercent,
    /// The same where nobody wants gradients.
    UntrackedOnePercent,
    /// The gradient of the weight is 2 % too large.
    GradientTwoPercent,
    /// An element of x is overwritten after it was read.
    InputOverwritten,
    /// The same of the cotangent.
    CotangentOverwritten,
    /// The same where autodiff alone calls the backward, and another leaf has the cotangent too.
    SharedCotangentOverwritten,
    /// The same of what the forward has kept for the backward.
    SavedOverwritten,
    /// Rows of x are read as its columns.
    StridesSwapped,
    /// The number of terms is that of the first call.
    PlanOfAnotherShape,
    /// Only the first row is written.
    FirstRow,
    /// The same, in memory that no audit sees, which sees a smaller one instead.
    FirstRowUnseen,
    /// The first one, for the gradient of the weight.
    GradientFirstRow,
    /// Zeros are written.
    Zeros,
    /// A row more than there are is written.
    PastTheEnd,
    /// The same, for the gradient of the weight.
    GradientPastTheEnd,
    /// An element before the first is written.
    BeforeTheFirst,
    /// A term more than there are is read, and multiplied by 0.
    PastTheRow,
    /// The same behind the last row of x.
    PastTheInput,
    /// What is no number, or infinite, is written as 0.
    Swallowed,
    /// What is far from 0 in a cotangent is cut off there, for the gradient of x.
    CotangentCut,
    /// The same for that of the weight.
    WeightsCotangentCut,
    /// The result has another shape.
    Turned,
    /// It is flat.
    Flat,
    /// What has no elements is taken, and should be refused.
    NothingTaken,
    /// The gradient of a weight that no row has gone through is not written.
    NothingWritten,
    /// In the place of another result, the first element is left as it was.
    LeftInPlace,
    /// In the place of another result, a row more than there are is written.
    PastTheEndInPlace,
    /// Nothing is written in the place of anything, though the operator says so.
    NeverInPlace,
    /// What the operator does not say: a result is written in the place of another.
    InPlaceUnsaid,
    /// The control of those: the same, rightly, and said.
    InPlace,
    /// One of a hundred launches is wrong.
    OnceInAHundred,
    /// No element is a number.
    NoNumber,
    /// All elements are off to one side, each by less than it may be.
    Shifted,
    /// Every launch makes something else.
    AnotherEveryTime,
    /// What is between rows of x that are cut out of wider ones is overwritten.
    BesideInput,
    /// What is behind the last row of x is overwritten.
    BehindInput,
    /// The result has another element type.
    OtherType,
    /// The gradient of the weight has, past autodiff.
    GradientOtherType,
    /// The result is on another device.
    OtherDevice,
    /// Not the kernel: the oracle's gradient of the weight is 2 % too large.
    OracleTwoPercent,
}

impl Mutant {
    /// The broken ones, the check that is meant for each, and what a failure of it has to say, so that none is convicted by
    /// what happens to be wrong, too.
    pub(crate) const BROKEN: [(Self, Check, &[&str]); 39] = [
        (Self::TailDropped, Check::Forward, &["off at row"]),
        (Self::LastChunk, Check::Forward, &["off at row"]),
        (Self::OnePercent, Check::Forward, &["off at row"]),
        (Self::UntrackedOnePercent, Check::Forward, &["no gradient wanted", "off at row"]),
        (Self::GradientTwoPercent, Check::Gradients, &["`grad.w` is", "off at row"]),
        (Self::InputOverwritten, Check::Inputs, &["`x` is not what it was"]),
        (Self::CotangentOverwritten, Check::Inputs, &["the cotangent of `y` is not"]),
        (Self::SharedCotangentOverwritten, Check::Inputs, &["which another leaf has too, is not"]),
        (Self::SavedOverwritten, Check::Inputs, &["of what the forward keeps is not"]),
        (Self::StridesSwapped, Check::Forward, &["off at row"]),
        (Self::PlanOfAnotherShape, Check::Forward, &["off at row"]),
        (Self::FirstRow, Check::Written, &["never written"]),
        (Self::GradientFirstRow, Check::Written, &["grad.w", "never written"]),
        (Self::FirstRowUnseen, Check::Written, &["but the audit saw"]),
        (Self::Zeros, Check::Order, &["in turn", "off at row"]),
        (Self::PastTheEnd, Check::Guards, &["bytes written outside it"]),
        (Self::GradientPastTheEnd, Check::Guards, &["grad.w", "bytes written outside it"]),
        (Self::BeforeTheFirst, Check::Guards, &["bytes written outside it"]),
        (Self::PastTheRow, Check::Forward, &["cut rows", "is NaN off"]),
        (Self::PastTheInput, Check::Forward, &["is NaN off"]),
        (Self::Swallowed, Check::Forward, &[" in `", "off at row"]),
        (
            Self::CotangentCut,
            Check::Gradients,
            &[" in the cotangent of `y`", "`grad.x`", "off at row"],
        ),
        (
            Self::WeightsCotangentCut,
            Check::Gradients,
            &[" in the cotangent of `y`", "`grad.w`", "off at row"],
        ),
        (Self::Turned, Check::Forward, &["has shape"]),
        (Self::Flat, Check::Forward, &["has shape"]),
        (Self::NothingTaken, Check::Forward, &["is 0", "should have been refused"]),
        (Self::NothingWritten, Check::Written, &["0×", "never written"]),
        (Self::LeftInPlace, Check::Forward, &[", in place", "off at row"]),
        (Self::PastTheEndInPlace, Check::Guards, &[", in place", "bytes written outside it"]),
        (Self::NeverInPlace, Check::Written, &["no kernel could write"]),
        (Self::InPlaceUnsaid, Check::Written, &["does not say so"]),
        (Self::Shifted, Check::Bias, &["off at all elements"]),
        (Self::AnotherEveryTime, Check::Repeat, &["two runs on the same data differ"]),
        (Self::BesideInput, Check::Inputs, &["cut rows", "written around it"]),
        (Self::BehindInput, Check::Inputs, &["written around it"]),
        (Self::OtherType, Check::Forward, &["`y` is ", ", not "]),
        (
            Self::GradientOtherType,
            Check::Forward,
            &["`grad.w of the backward kernels` is ", ", not "],
        ),
        (Self::OtherDevice, Check::Forward, &["`y` is on ", ", not on "]),
        (Self::OracleTwoPercent, Check::FiniteDifferences, &["the slope there"]),
    ];

    /// Whether it can be in this element type: what is rounded to 16 bits is off by as much as it may be, and more is wrong.
    pub(crate) fn in_type(self, dtype: DType) -> bool {
        self != Self::Shifted || dtype == DType::F32
    }

    /// Whether a result is written in the place of another where that can be: on CUDA.
    pub(crate) fn in_place(self) -> bool {
        use Mutant::{InPlace, InPlaceUnsaid, LeftInPlace, PastTheEndInPlace};
        matches!(self, LeftInPlace | PastTheEndInPlace | InPlaceUnsaid | InPlace)
    }

    /// Whether the operator says so.
    pub(crate) fn says_in_place(self) -> bool {
        self == Self::NeverInPlace || self.in_place() && self != Self::InPlaceUnsaid
    }

    /// Whether it needs CUDA: WebGPU writes nothing in the place of what it reads, reads and writes nothing outside a binding,
    /// which begins where some 256 bytes do, and has no rule for NaN.
    pub(crate) fn on_cuda(self) -> bool {
        use Mutant::{BeforeTheFirst, BehindInput, NeverInPlace, PastTheInput, Swallowed};
        let others = [PastTheInput, Swallowed, NeverInPlace, BehindInput, BeforeTheFirst];
        others.contains(&self) || self.in_place()
    }

    pub(crate) fn of(number: u32) -> Self {
        let broken = Self::BROKEN.map(|(mutant, ..)| mutant);
        let all = broken.into_iter().chain([Self::OnceInAHundred, Self::NoNumber, Self::InPlace]);
        all.into_iter().find(|mutant| *mutant as u32 == number).unwrap_or(Self::None)
    }
}
