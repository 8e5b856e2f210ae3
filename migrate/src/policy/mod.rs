//! Decisions that depend on figures alone: when pre-copy ends, how far vCPUs are throttled, and
//! what a migration would take.

#[cfg(test)]
mod arbitrary;
pub mod convergence;
pub mod forecast;
pub mod throttle;
