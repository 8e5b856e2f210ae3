//! The guests with which whole-system tests repeat an operation.

use crate::{Driftline, SOON, ScratchDir};

/// A guest of 2 vCPUs and 1 GiB that writes into 32 MiB.
#[derive(Clone, Copy, Debug)]
pub struct GuestLoad {
    tracking: &'static str,
    writes: LoadWrites,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LoadWrites {
    /// To random pages, as fast as the guest can.
    Fastest,
    /// 320 MiB/s, in order.
    Paced,
}

impl GuestLoad {
    /// Returns a guest that writes to random pages, as fast as it can.
    pub const fn fastest(tracking: &'static str) -> Self {
        Self { tracking, writes: LoadWrites::Fastest }
    }

    /// Returns a guest that writes 320 MiB/s, in order.
    pub const fn paced(tracking: &'static str) -> Self {
        Self { tracking, writes: LoadWrites::Paced }
    }

    /// Returns whether the guest writes as fast as it can.
    pub fn is_fastest(&self) -> bool {
        self.writes == LoadWrites::Fastest
    }

    /// Starts the guest's process and waits until each vCPU has reported.
    pub fn start(&self, scratch: &ScratchDir, name: &str) -> Driftline {
        let spec = match self.writes {
            LoadWrites::Fastest => "payload,ws=32M,rate=max,pattern=random",
            LoadWrites::Paced => "payload,ws=32M,rate=320M",
        };
        let args = ["--vcpus", "2", "--mem", "1G", "--tracking", self.tracking];
        let vm = Driftline::run(scratch, name, spec, &args);
        vm.console().wait_reports(2, 1, SOON);
        vm
    }
}

/// Defines a test for each load and for both tracking modes. Each calls `$run(load, times)`, where
/// `times` is `$short`, or `$full` with `DRIFTLINE_FULL=1`.
///
/// The short form runs each load and each mode once. With `both_fastest` it also runs the fastest
/// load in the other mode. The others report a skip. Without KVM every test does.
#[macro_export]
macro_rules! under_each_load {
    ($run:path, $short:expr, $full:expr) => {
        $crate::under_each_load! { @loads $run, $short, $full, false }
    };
    ($run:path, $short:expr, $full:expr, both_fastest) => {
        $crate::under_each_load! { @loads $run, $short, $full, true }
    };
    (@loads $run:path, $short:expr, $full:expr, $both_fastest:expr) => {
        $crate::under_each_load! { @each $run, $short, $full;
            ring_as_fast_as_it_can: true, $crate::GuestLoad::fastest("dirty-ring"),
            ring_at_320_megabytes: false, $crate::GuestLoad::paced("dirty-ring"),
            bitmap_as_fast_as_it_can: $both_fastest, $crate::GuestLoad::fastest("dirty-bitmap"),
            bitmap_at_320_megabytes: true, $crate::GuestLoad::paced("dirty-bitmap"),
        }
    };
    (@each $run:path, $short:expr, $full:expr; $($name:ident: $is_short:expr, $load:expr,)*) => {$(
        #[test]
        fn $name() {
            if !$is_short && !driftline_machine::testing::full() {
                let why = "other tests have its load and its tracking: DRIFTLINE_FULL=1";
                driftline_machine::testing::skip(stringify!($name), why);
            } else if driftline_machine::testing::kvm_or_skip(stringify!($name)) {
                let _alone = $crate::one_at_a_time();
                $run($load, $crate::repeats($short, $full));
            }
        }
    )*};
}
