//! Values of requests and options that are refused.

/// A value of a request is outside its limits.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field} is {value}; it must be {allowed}")]
pub(crate) struct LimitError {
    /// The field of the request.
    pub(crate) field: &'static str,
    /// Its value.
    pub(crate) value: u64,
    /// The values that it may have.
    pub(crate) allowed: String,
}

/// Checks that a field is at most `most`.
pub(crate) fn at_most(field: &'static str, value: u64, most: u64) -> Result<(), LimitError> {
    let allowed = || format!("at most {most}");
    if value <= most { Ok(()) } else { Err(LimitError { field, value, allowed: allowed() }) }
}

/// Checks that a field is at least `least`.
pub(crate) fn at_least(field: &'static str, value: u64, least: u64) -> Result<(), LimitError> {
    let allowed = || format!("at least {least}");
    if value >= least { Ok(()) } else { Err(LimitError { field, value, allowed: allowed() }) }
}

/// Checks that a field is from 1 to `most`.
pub(crate) fn one_to(field: &'static str, value: u64, most: u64) -> Result<(), LimitError> {
    let allowed = || format!("1 to {most}");
    match (1..=most).contains(&value) {
        true => Ok(()),
        false => Err(LimitError { field, value, allowed: allowed() }),
    }
}

/// There is nothing of this name on the command line.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown {what} \"{name}\": use {known}")]
pub struct UnknownName {
    /// What was named.
    pub(crate) what: &'static str,
    /// The name.
    pub(crate) name: String,
    /// The names that there are.
    pub(crate) known: &'static str,
}
