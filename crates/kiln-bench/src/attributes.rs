//! Attributes of operators: their defaults, their ranges, and reading them from text.

use std::collections::BTreeMap;

/// What an attribute may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// A finite number.
    Number,
    /// A finite number of at least this.
    AtLeast(f64),
    /// A finite number from one to another, both included.
    Between(f64, f64),
    /// A finite number above this.
    Above(f64),
    /// A finite number, or the default text, which stands for a value that depends on the shapes.
    Optional,
    /// A finite number above this, or the default text.
    OptionalAbove(f64),
    /// An integer of at least this, or the default text.
    OptionalInteger(i64),
    /// An integer.
    Integer,
    /// An integer of at least this.
    IntegerAtLeast(i64),
    /// An integer from one to another, both included.
    IntegerBetween(i64, i64),
    /// `true` or `false`.
    Flag,
    /// One of these words.
    OneOf(&'static [&'static str]),
}

/// An attribute of an operator.
#[derive(Debug, Clone, Copy)]
pub struct Attribute {
    /// Name.
    pub name: &'static str,
    /// Default, as text.
    pub default: &'static str,
    /// What it may be.
    pub kind: Kind,
}

/// The attributes of a call.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Attributes(BTreeMap<&'static str, Option<f64>>, BTreeMap<&'static str, String>);

impl Attributes {
    /// Reads each attribute from `given`, else takes its default.
    ///
    /// # Errors
    ///
    /// One line that names the attribute, its value and what was expected.
    pub fn read(
        op: &str,
        attributes: &'static [Attribute],
        given: &BTreeMap<String, String>,
    ) -> Result<Self, String> {
        let mut read = Self::default();
        for attribute in attributes {
            let text = given.get(attribute.name).map_or(attribute.default, |text| text.trim());
            let number = attribute.parse(text).map_err(|expected| {
                let large = matches!(text.parse::<f64>(), Ok(v) if v.is_finite() && (v as f32).is_infinite());
                let size = if large { ", below 3.4e38 in size" } else { "" };
                format!("{op}: attribute {} = {text}, expected {expected}{size}", attribute.name)
            })?;
            read.0.insert(attribute.name, number);
            read.1.insert(attribute.name, text.to_string());
        }
        Ok(read)
    }

    /// A number; 0 for a flag that is off, 1 for one that is on.
    pub fn number(&self, name: &str) -> f64 {
        self.optional(name).unwrap_or_default()
    }

    /// A number, if one was given.
    pub fn optional(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied().flatten()
    }

    /// An integer.
    pub fn integer(&self, name: &str) -> i64 {
        self.word(name).parse().unwrap_or_default()
    }

    /// Replaces an integer.
    pub fn set_integer(&mut self, name: &'static str, value: i64) {
        self.0.insert(name, Some(value as f64));
        self.1.insert(name, value.to_string());
    }

    /// A flag.
    pub fn flag(&self, name: &str) -> bool {
        self.number(name) != 0.0
    }

    /// A word.
    pub fn word(&self, name: &str) -> &str {
        self.1.get(name).map_or("", String::as_str)
    }
}

impl Attribute {
    /// What it may be, in words.
    pub fn expected(&self) -> String {
        match self.kind {
            Kind::Number => "a number".into(),
            Kind::Optional => format!("a number, or {}", self.default),
            Kind::AtLeast(least) => format!("a number of at least {least}"),
            Kind::Between(low, high) => format!("a number from {low} to {high}"),
            Kind::Above(least) => format!("a number above {least}"),
            Kind::OptionalAbove(least) => format!("a number above {least}, or {}", self.default),
            Kind::Integer => "an integer".into(),
            Kind::IntegerAtLeast(least) => format!("an integer of at least {least}"),
            Kind::IntegerBetween(low, high) => format!("an integer from {low} to {high}"),
            Kind::OptionalInteger(least) => {
                format!("an integer of at least {least}, or {}", self.default)
            }
            Kind::Flag => "true or false".into(),
            Kind::OneOf(words) => words.join(" or "),
        }
    }

    /// The value as a number (words have none), or what was expected.
    fn parse(&self, text: &str) -> Result<Option<f64>, String> {
        // Kernels take attributes in f32.
        let finite = text.parse::<f64>().ok().filter(|v| (*v as f32).is_finite());
        let integer = text.parse::<i64>().ok();
        let value = match self.kind {
            Kind::Optional | Kind::OptionalAbove(_) | Kind::OptionalInteger(_)
                if text == self.default || text == "none" =>
            {
                return Ok(None);
            }
            Kind::OneOf(words) if words.contains(&text) => return Ok(None),
            Kind::OneOf(_) => None,
            Kind::Number | Kind::Optional => finite,
            Kind::AtLeast(least) => finite.filter(|v| *v >= least),
            Kind::Between(low, high) => finite.filter(|v| (low..=high).contains(v)),
            Kind::Above(least) | Kind::OptionalAbove(least) => finite.filter(|v| *v > least),
            Kind::Integer => integer.map(|v| v as f64),
            Kind::IntegerAtLeast(least) | Kind::OptionalInteger(least) => {
                integer.filter(|v| *v >= least).map(|v| v as f64)
            }
            Kind::IntegerBetween(low, high) => {
                integer.filter(|v| (low..=high).contains(v)).map(|v| v as f64)
            }
            Kind::Flag => text.parse::<bool>().ok().map(|on| f64::from(u8::from(on))),
        };
        value.map(Some).ok_or_else(|| self.expected())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTRIBUTES: &[Attribute] = &[
        Attribute { name: "eps", default: "1e-5", kind: Kind::AtLeast(0.0) },
        Attribute { name: "layout", default: "half", kind: Kind::OneOf(&["half", "interleaved"]) },
        Attribute { name: "causal", default: "true", kind: Kind::Flag },
        Attribute { name: "scale", default: "D^-½", kind: Kind::Optional },
        Attribute { name: "steps", default: "5", kind: Kind::IntegerAtLeast(1) },
        Attribute { name: "share", default: "0", kind: Kind::Between(0.0, 1.0) },
        Attribute { name: "repeats", default: "0", kind: Kind::IntegerBetween(0, 32) },
    ];

    fn read(name: &str, text: &str) -> Result<Attributes, String> {
        Attributes::read("op", ATTRIBUTES, &BTreeMap::from([(name.into(), text.into())]))
    }

    #[test]
    fn defaults_and_given_values() {
        let read = read("eps", "0.5").unwrap();
        assert_eq!(
            (read.number("eps"), read.word("layout"), read.flag("causal")),
            (0.5, "half", true)
        );
        assert_eq!((read.optional("scale"), read.integer("steps")), (None, 5));
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (name, text, expected) in [
            ("eps", "-1", "op: attribute eps = -1, expected a number of at least 0"),
            ("eps", "NaN", "op: attribute eps = NaN, expected a number of at least 0"),
            ("layout", "x", "op: attribute layout = x, expected half or interleaved"),
            ("causal", "1", "op: attribute causal = 1, expected true or false"),
            ("scale", "inf", "op: attribute scale = inf, expected a number, or D^-½"),
            (
                "eps",
                "1e39",
                "op: attribute eps = 1e39, expected a number of at least 0, below 3.4e38 in size",
            ),
            ("steps", "0", "op: attribute steps = 0, expected an integer of at least 1"),
            ("share", "-0.1", "op: attribute share = -0.1, expected a number from 0 to 1"),
            ("share", "1.1", "op: attribute share = 1.1, expected a number from 0 to 1"),
            ("repeats", "33", "op: attribute repeats = 33, expected an integer from 0 to 32"),
            ("repeats", "-1", "op: attribute repeats = -1, expected an integer from 0 to 32"),
            ("steps", "1.5", "op: attribute steps = 1.5, expected an integer of at least 1"),
        ] {
            assert_eq!(read(name, text).unwrap_err(), expected);
        }
    }
}
