//! A Linux guest whose memory a page handler serves, and whose balloon gives memory back.

use std::fs::File;
use std::time::Instant;

use serde_json::{Value, json};
use tests::{
    GuestConsole, HandlerProcess, LinuxImage, SOON, ScratchDir, ServingProcess, assert_clean,
    checker_value, wait_for,
};

use super::served::{BOOT, boot_served, take_snapshot};
use super::{DISK_BYTES, text};

const CHECKERS: &str = "driftline.check=mem,disk driftline.disk=path=/dev/vda,pause=50ms";
/// Pages in the balloon.
const BALLOON: u64 = 24 << 8;
/// Command of the guest's shell that writes to most pages that are free.
const FILL_MEMORY: &str = "head -c 64m /dev/zero >/file; rm /file";

/// Waits until a checker has made progress on `console`. Neither may have found anything wrong.
fn await_progress(console: &GuestConsole, checker: &str, key: &str) {
    let now = || {
        assert_clean(console);
        checker_value(console, checker, key)
    };
    let before = wait_for("line of a checker", BOOT, now);
    wait_for("progress of a checker", BOOT, || now().filter(|now| *now > before));
}

/// Waits until the guest has written to its disk.
fn await_flushed(console: &GuestConsole) {
    await_progress(console, "disk", "flushed");
}

/// Takes a snapshot of a guest with a balloon and a disk.
fn snapshot(linux: &LinuxImage, scratch: &ScratchDir) {
    let disk = scratch.path("disk");
    File::create(&disk).and_then(|file| file.set_len(DISK_BYTES)).expect("a file");
    let drive = json!({ "drive_id": "data", "is_root_device": false, "path_on_host": text(&disk),
        "cache_type": "Writeback" });
    let balloon = json!({ "amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 1 });
    let devices = [("/drives/data", drive), ("/balloon", balloon)];
    let guest = boot_served(linux, scratch, CHECKERS, &devices);
    await_flushed(&guest.console());
    take_snapshot(&guest, scratch);
}

/// Sets the balloon's size, and waits until the guest has given that many pages.
fn resize_balloon(guest: &ServingProcess, pages: u64) {
    guest.done("PATCH", "/balloon", &json!({ "amount_mib": pages >> 8 }));
    wait_for("balloon of that size", BOOT, || {
        let statistics: Value = guest.page("/balloon/statistics");
        (statistics["actual_pages"] == pages).then_some(())
    });
}

#[test]
fn discarded_pages_of_a_page_handler_are_zero() {
    let _alone = tests::one_at_a_time();
    let test = "discarded_pages_of_a_page_handler_are_zero";
    let Some(linux) = LinuxImage::or_skip(test) else { return };
    let scratch = ScratchDir::new();
    snapshot(&linux, &scratch);
    let program = env!("CARGO_BIN_EXE_page_handler");
    let mut handler =
        HandlerProcess::start(program, &scratch, "second", &scratch.path("memory"), &[]);
    let mut guest = ServingProcess::start(&scratch, "second");
    let load = json!({ "snapshot_path": scratch.path("state"), "resume_vm": true,
        "track_dirty_pages": true,
        "mem_backend": { "backend_path": handler.socket(), "backend_type": "Uffd" } });
    guest.done("PUT", "/snapshot/load", &load);
    await_flushed(&guest.console());
    // Most of them were never touched since the load.
    resize_balloon(&guest, BALLOON);
    let counts = handler.counts();
    assert!(counts.discarded >= BALLOON && counts.zeroed == 0, "{counts:?}");
    await_flushed(&guest.console());
    resize_balloon(&guest, 0);
    // The guest uses the pages again: a file in its memory needs more pages than are left besides.
    guest.type_line(FILL_MEMORY);
    wait_for("zeros of the page handler", BOOT, || (handler.counts().zeroed > 0).then_some(()));
    await_flushed(&guest.console());

    // The discarded pages are part of a Diff: they are zero.
    guest.pause();
    let diff = json!({ "snapshot_type": "Diff", "snapshot_path": scratch.path("state-2"),
        "mem_file_path": scratch.path("diff") });
    guest.done("PUT", "/snapshot/create", &diff);
    guest.resume();
    await_flushed(&guest.console());
    // Its memory is right, page for page.
    await_progress(&guest.console(), "mem", "passes");

    // By now all pages may have been served. Those that are discarded may be asked for.
    resize_balloon(&guest, BALLOON);
    guest.must_live();
    let since = Instant::now();
    handler.kill();
    assert_eq!(guest.wait_exit(SOON), 1);
    eprintln!("ended after {} ms", since.elapsed().as_millis());
    let why = format!("the page handler at {} has ended", handler.socket().display());
    assert!(guest.log().contains(&why), "{}", guest.log());
    assert_clean(&guest.console());
}
