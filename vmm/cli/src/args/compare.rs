//! Owns the options of `driftline compare`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use driftline_compare::TrackingWay;
use driftline_machine::config::DEFAULT_RING_ENTRIES;

use super::headings;
use crate::values;

/// The longest interval, and the longest boot.
const MOST_INTERVAL: Duration = Duration::from_hours(1);
/// The longest measurement of one way with one guest.
const MOST_DURATION: Duration = Duration::from_hours(24);

#[derive(Args)]
pub(crate) struct CompareArgs {
    /// Ways of tracking, such as dirty-ring or dirty-ring+list; by default all
    ///
    /// A way is a source, or source+sink. The sink is the structure that stores dirty pages: tree,
    /// list or flat (a bitmap that is scanned). `none`, without tracking, is the baseline of the
    /// guests' speed and is always measured.
    #[arg(long, value_name = "WAY,WAY", value_delimiter = ',', help_heading = headings::TRACKING)]
    pub(crate) modes: Vec<TrackingWay>,
    /// Entries of each vCPU's dirty ring, a power of two
    #[arg(long, value_name = "N", default_value_t = DEFAULT_RING_ENTRIES,
          value_parser = values::ring_entries, help_heading = headings::TRACKING)]
    pub(crate) ring_entries: u32,
    /// Run the embedded guest, such as payload,ws=64M,rate=320M; may be repeated
    ///
    /// By default three guests of 1 GiB run: light, busy and flat out. The light one also runs with
    /// 4, 16 and 64 GiB.
    #[arg(long = "guest", value_name = "SPEC", value_parser = values::guest_spec,
          help_heading = headings::BOOT)]
    pub(crate) guests: Vec<String>,
    /// Run this kernel, too: a static ELF file or a bzImage
    ///
    /// Its writes are not known, so pages that tracking misses are not found.
    #[arg(long, value_name = "FILE", help_heading = headings::BOOT)]
    pub(crate) kernel: Option<PathBuf>,
    /// Time for the kernel to boot before it is measured
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = of_one_epoch,
          requires = "kernel", help_heading = headings::BOOT)]
    pub(crate) boot_time: Duration,
    /// Size of guest memory, or several sizes
    ///
    /// A size may exceed the host's memory if the guest's working set fits.
    #[arg(long, value_name = "SIZE,SIZE", value_delimiter = ',', value_parser = values::memory,
          help_heading = headings::MEMORY)]
    pub(crate) mem: Vec<u64>,
    /// Number of vCPUs of each guest
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::vcpus,
          help_heading = headings::PROCESSORS)]
    pub(crate) vcpus: u8,
    /// Time between two epochs
    #[arg(long, value_name = "TIME", default_value = "10ms", value_parser = of_one_epoch,
          help_heading = headings::TIMING)]
    pub(crate) interval: Duration,
    /// Time of all runs of one way, guest and size together
    ///
    /// The default matrix has 195 guests, each of which takes another 0.2 s. With the default of
    /// this option, it takes two minutes on two processors.
    #[arg(long, value_name = "TIME", default_value = "1500ms", value_parser = of_all_epochs,
          help_heading = headings::TIMING)]
    pub(crate) duration: Duration,
    /// Number of runs, each with a new guest
    ///
    /// The ways take turns.
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u16).range(1..=1000),
          help_heading = headings::TIMING)]
    pub(crate) repeat: u16,
    /// Write a self-contained page with charts and text to this file
    #[arg(long, value_name = "FILE", help_heading = headings::OUTPUT)]
    pub(crate) html: Option<PathBuf>,
    /// Write the chart of epoch time over memory size to this file
    #[arg(long, value_name = "FILE", help_heading = headings::OUTPUT)]
    pub(crate) svg: Option<PathBuf>,
    /// Print all columns of the table, which is then 190 wide
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) wide: bool,
    /// Print one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}

/// `--interval` and `--boot-time`.
fn of_one_epoch(text: &str) -> Result<Duration, String> {
    at_most(text, MOST_INTERVAL)
}

/// `--duration`.
fn of_all_epochs(text: &str) -> Result<Duration, String> {
    at_most(text, MOST_DURATION)
}

fn at_most(text: &str, most: Duration) -> Result<Duration, String> {
    match values::duration(text)? {
        time if time > most => Err(format!("it is at most {} s", most.as_secs())),
        time => Ok(time),
    }
}
