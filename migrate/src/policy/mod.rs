//! What a migration decides from figures alone: when pre-copy ends, how far vCPUs are throttled,
//! and what to expect of both.

#[cfg(test)]
mod arbitrary;
pub mod convergence;
pub mod forecast;
pub mod throttle;
