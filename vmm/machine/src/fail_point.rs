//! Fail points: places where a test makes an operation fail, to check what the failure leaves
//! behind. Outside this crate's own tests a fail point is an empty inline function.
//!
//! Points are counted on the thread that runs the operation, in the order in which it passes them.

/// Passes the point called `name`, before the step of that name. Fails if a test has chosen it.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn pass(_: impl AsRef<str>) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(crate) use for_tests::{pass, run};

#[cfg(test)]
mod for_tests {
    use std::cell::RefCell;
    use std::io;

    #[derive(Default)]
    struct FailPlan {
        passed: Vec<String>,
        /// Number of the point that fails.
        fails_at: Option<usize>,
    }

    thread_local! {
        static FAIL_PLAN: RefCell<Option<FailPlan>> = const { RefCell::new(None) };
    }

    pub(crate) fn pass(name: impl AsRef<str>) -> io::Result<()> {
        FAIL_PLAN.with_borrow_mut(|plan| {
            let Some(plan) = plan else { return Ok(()) };
            let fails = plan.fails_at == Some(plan.passed.len());
            plan.passed.push(name.as_ref().to_owned());
            if fails {
                Err(io::Error::other(format!("fail point {}", name.as_ref())))
            } else {
                Ok(())
            }
        })
    }

    /// Runs `operation` and makes point number `fails_at` fail, if the operation reaches it.
    /// Returns the result and the names of the points that were passed. A failed point is the last
    /// of them.
    pub(crate) fn run<T>(
        fails_at: Option<usize>,
        operation: impl FnOnce() -> T,
    ) -> (T, Vec<String>) {
        FAIL_PLAN.set(Some(FailPlan { fails_at, ..FailPlan::default() }));
        let result = operation();
        (result, FAIL_PLAN.take().unwrap_or_default().passed)
    }
}
