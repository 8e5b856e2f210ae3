//! Decisions that depend on figures alone: when pre-copy ends, how far vCPUs are throttled, and
//! what a migration would take.

#[cfg(test)]
mod arbitrary;
pub(crate) mod convergence;
pub(crate) mod figures;
pub mod forecast;
pub(crate) mod throttle;
