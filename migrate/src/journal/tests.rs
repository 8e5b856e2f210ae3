//! Records of hand-overs: the first decision is final, removals are ordered, dead processes are
//! swept.

use std::fs;
use std::io;
use std::time::UNIX_EPOCH;

use driftline_guest::VmId;
use uuid::Uuid;

use super::boot_and_mount::BootAndMount;
use super::file::{SYNCS, read};
use super::*;
use crate::protocol::decision::Decision;
use crate::protocol::ids::{Secret, Token};

/// Returns the number of syncs that `operation` makes.
fn syncs(operation: impl FnOnce()) -> u32 {
    let before = SYNCS.get();
    operation();
    SYNCS.get() - before
}

/// Opens the directory as a receiver does.
fn swept(dir: &tempfile::TempDir) -> Records {
    let records = Records::open(dir.path()).unwrap();
    records.sweep();
    records
}

fn secret() -> Secret {
    Secret::random().unwrap()
}

#[test]
fn question_needs_the_secret_of_the_record() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let (token, right) = (Token::random(), secret());
    assert!(records.accepts(token, &secret()).unwrap(), "nothing is known of the migration");
    let prepared = records.prepare(token, VmId::random(), right).unwrap();
    let later = Records::open(dir.path()).unwrap();
    assert!(later.accepts(token, &right).unwrap() && !later.accepts(token, &secret()).unwrap());
    records.withdraw(token, prepared);
}

#[test]
fn oversized_site_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let site = format!("{}{}", Uuid::new_v4(), " ".repeat(1 << 16));
    fs::write(dir.path().join("site"), site).unwrap();
    let error = Records::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("it is longer than 65536 bytes"), "{error}");
}

#[test]
fn the_first_decision_is_final() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (Records::open(dir.path()).unwrap(), Records::open(dir.path()).unwrap());
    assert_eq!(a.site(), b.site());
    let (token, vm) = (Token::random(), VmId::random());
    assert_eq!(a.decision(token).unwrap(), None);
    assert_eq!(a.decide(token, None, Decision::Discarded).unwrap(), Decision::Discarded);
    assert_eq!(b.decide(token, Some(vm), Decision::Committed).unwrap(), Decision::Discarded);

    let token = Token::random();
    assert_eq!(b.decide(token, Some(vm), Decision::Committed).unwrap(), Decision::Committed);
    assert_eq!(a.decide(token, None, Decision::Discarded).unwrap(), Decision::Committed);
    b.overturn(token, vm).unwrap();
    assert_eq!(a.decision(token).unwrap(), Some(Decision::Discarded));
    b.forget_decision(token, None).unwrap();
    assert_eq!(a.decision(token).unwrap(), None);
}

#[test]
fn prepared_guest_is_committed_after_a_reboot() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let present = BootAndMount::of(dir.path()).expect("this host has a boot id");
    let kernel = rustix::system::uname();
    let mut version = kernel.release().to_str().unwrap().split('.').map(str::parse);
    let version = (version.next().unwrap().unwrap(), version.next().unwrap().unwrap());
    assert!(present.mount.is_some() || version < (6u32, 8u32), "and mount ids");
    let pretend = |pretended| Records { test_boot_and_mount: Some(pretended), ..records.clone() };
    let later = pretend(Some(BootAndMount { boot: Uuid::new_v4(), ..present }));
    let remounted = pretend(Some(BootAndMount { mount: Some(u64::MAX), ..present }));
    let without_boot_id = pretend(None);
    let vm = VmId::random();
    let token = Token::random();
    let prepared = records.prepare(token, vm, secret()).unwrap();
    let staged = records.stage(token, Some(vm), Decision::Committed).unwrap();
    let recorded = records.decide_prepared(staged, &prepared).unwrap();
    assert_eq!(recorded, Decision::Committed);
    assert_eq!(later.decide_unknown(token).unwrap(), Decision::Committed);
    // The decision was lost with the boot.
    fs::remove_file(records.decision_path(token)).unwrap();
    for after in [&later, &remounted, &without_boot_id] {
        assert_eq!(after.decide_unknown(token).unwrap(), Decision::Committed);
        assert_eq!(after.decision(token).unwrap(), None, "nothing is stored");
    }
    // In the same boot no decision can be lost: the guest did not run, and never will.
    assert_eq!(records.decide_unknown(token).unwrap(), Decision::Discarded);
    let staged = records.stage(token, Some(vm), Decision::Committed).unwrap();
    let recorded = records.decide_prepared(staged, &prepared).unwrap();
    assert_eq!(recorded, Decision::Discarded);
    assert_eq!(later.decide_unknown(token).unwrap(), Decision::Discarded);
    records.forget_decision(token, Some(prepared)).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the site alone");
    // A migration that failed before COMMIT.
    let prepared = records.prepare(token, vm, secret()).unwrap();
    assert!(records.prepare(token, vm, secret()).is_err(), "there is one already");
    assert!(records.prepared_path(token).exists(), "the first one stays");
    records.withdraw(token, prepared);
    assert_eq!(later.decide_unknown(token).unwrap(), Decision::Discarded);
}

#[test]
fn without_boot_id_decisions_are_durable() {
    let dir = tempfile::tempdir().unwrap();
    let with_boot_id = Records::open(dir.path()).unwrap();
    let without_boot_id = Records { test_boot_and_mount: Some(None), ..with_boot_id.clone() };
    let (token, vm) = (Token::random(), VmId::random());
    let prepared = without_boot_id.prepare(token, vm, secret()).unwrap();
    assert!(!prepared.names_boot);
    let text = fs::read_to_string(without_boot_id.prepared_path(token)).unwrap();
    assert!(text.contains("\"boot\": null"), "{text}");
    // No decision can have been lost, even if the host has rebooted since.
    assert_eq!(with_boot_id.decide_unknown(token).unwrap(), Decision::Discarded);
    assert_eq!(without_boot_id.decision(token).unwrap(), Some(Decision::Discarded));
    without_boot_id.forget_decision(token, Some(prepared)).unwrap();
    drop(without_boot_id.prepare(token, vm, secret()).unwrap());
    swept(&dir);
    assert!(!without_boot_id.prepared_path(token).exists(), "its process has died");
}

#[test]
fn question_about_an_unknown_token_stores_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    assert_eq!(records.decide_unknown(Token::random()).unwrap(), Decision::Discarded);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the site alone");
}

#[test]
fn sweep_keeps_prepared_records_that_are_needed() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let now = BootAndMount::of(dir.path());
    let earlier = now.map(|now| BootAndMount { boot: Uuid::new_v4(), ..now });
    let earlier = Records { test_boot_and_mount: Some(earlier), ..records.clone() };
    let [lives, died, decided, rebooted] = [(); 4].map(|()| Token::random());
    let vm = VmId::random();
    let living = records.prepare(lives, vm, secret()).unwrap();
    for (token, records) in [(died, &records), (decided, &records), (rebooted, &earlier)] {
        drop(records.prepare(token, vm, secret()).unwrap());
    }
    records.decide(decided, Some(vm), Decision::Committed).unwrap();
    fs::write(records.prepared_path(Token::random()), "{").unwrap();
    swept(&dir);
    let is_prepared = |token| records.prepared_path(token).exists();
    assert_eq!(
        [lives, died, decided, rebooted].map(is_prepared),
        [true, false, false, true],
        "of a living process, a dead one, one that had decided, and one of another boot"
    );
    assert_eq!(records.decision(decided).unwrap(), Some(Decision::Committed), "the decision stays");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 5, "a file that is no record stays");
    drop(living);
    swept(&dir);
    assert!(!is_prepared(lives));
}

#[test]
fn sweep_removes_discarded_of_dead_processes() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let now = BootAndMount::of(dir.path());
    let earlier = now.map(|now| BootAndMount { boot: Uuid::new_v4(), ..now });
    let earlier = Records { test_boot_and_mount: Some(earlier), ..records.clone() };
    let [lives, died, rebooted, alone, committed] = [(); 5].map(|()| Token::random());
    let vm = VmId::random();
    let living = records.prepare(lives, vm, secret()).unwrap();
    for (token, records) in [(died, &records), (rebooted, &earlier)] {
        drop(records.prepare(token, vm, secret()).unwrap());
    }
    for token in [lives, died, rebooted, alone] {
        records.decide(token, Some(vm), Decision::Discarded).unwrap();
    }
    records.decide(committed, Some(vm), Decision::Committed).unwrap();
    let again = swept(&dir);
    let left = [lives, died, rebooted, alone, committed].map(|t| records.decision(t).unwrap());
    let (discarded, ran) = (Some(Decision::Discarded), Some(Decision::Committed));
    assert_eq!(left, [discarded, None, None, None, ran]);
    assert!(records.prepared_path(lives).exists());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 4, "the site and these");
    for token in [lives, died, rebooted, alone] {
        assert_eq!(again.decide_unknown(token).unwrap(), Decision::Discarded);
    }
    assert_eq!(again.decide_unknown(committed).unwrap(), Decision::Committed);
    drop(living);
    swept(&dir);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn answer_about_a_discarded_guest_survives_a_sweep() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let now = BootAndMount::of(dir.path());
    let earlier = now.map(|now| BootAndMount { boot: Uuid::new_v4(), ..now });
    let earlier = Records { test_boot_and_mount: Some(earlier), ..records.clone() };
    for decision in [Decision::Discarded, Decision::Committed] {
        let (token, vm) = (Token::random(), VmId::random());
        drop(earlier.prepare(token, vm, secret()).unwrap());
        // It is read, then another process decides, and a third one sweeps.
        let prepared = read(&records.prepared_path(token), token).unwrap();
        assert!(prepared.is_some());
        records.decide(token, Some(vm), decision).unwrap();
        swept(&dir);
        assert!(!records.prepared_path(token).exists());
        assert_eq!(records.decide_after_reading(token, prepared).unwrap(), decision);
    }
}

#[test]
fn prepared_record_is_removed_before_its_decision() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    for removed_by_another in [false, true] {
        let (token, vm) = (Token::random(), VmId::random());
        let prepared = records.prepare(token, vm, secret()).unwrap();
        records.decide(token, Some(vm), Decision::Discarded).unwrap();
        if removed_by_another {
            fs::remove_file(records.prepared_path(token)).unwrap();
        }
        let forget = || records.forget_decision(token, Some(prepared)).unwrap();
        assert_eq!(syncs(forget), 2, "one after each: {removed_by_another}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the site alone");
    }
}

#[test]
fn sweep_costs_two_syncs_and_opening_none() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let vm = VmId::random();
    for _ in 0..5 {
        for decision in [None, Some(Decision::Committed), Some(Decision::Discarded)] {
            let token = Token::random();
            drop(records.prepare(token, vm, secret()).unwrap());
            if let Some(decision) = decision {
                records.decide(token, Some(vm), decision).unwrap();
            }
        }
    }
    let files = || fs::read_dir(dir.path()).unwrap().count();
    let before = files();
    assert_eq!(syncs(|| drop(Records::open(dir.path()).unwrap())), 0);
    assert_eq!(files(), before, "opening removes nothing");
    assert_eq!(syncs(|| records.sweep()), 2);
    assert_eq!(files(), 1 + 5, "the site, and what was committed");
    assert_eq!(syncs(|| records.sweep()), 0);
}

#[test]
fn unsynced_committed_is_removed_and_discarded_stays() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    for (decision, stays) in [(Decision::Committed, false), (Decision::Discarded, true)] {
        let token = Token::random();
        records.decide(token, None, decision).unwrap();
        let path = records.decision_path(token);
        let e =
            records.keep_decision(&path, decision, Err(io::ErrorKind::Other.into())).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::Other);
        let left = records.decision(token).unwrap();
        assert_eq!(left, stays.then_some(decision));
    }
}

#[test]
fn only_old_staged_files_are_swept() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let staged = records.stage(Token::random(), None, Decision::Discarded).unwrap();
    let old = records.stage(Token::random(), None, Decision::Discarded).unwrap();
    old.file.as_file().set_modified(UNIX_EPOCH).unwrap();
    let decided = Token::random();
    records.decide(decided, None, Decision::Committed).unwrap();
    let record = fs::File::options().write(true).open(records.decision_path(decided)).unwrap();
    record.set_modified(UNIX_EPOCH).unwrap();
    let again = Records::open(dir.path()).unwrap();
    assert!(staged.file.path().exists() && !old.file.path().exists());
    assert_eq!(again.decision(decided).unwrap(), Some(Decision::Committed));
}

#[test]
fn source_record_is_pending_until_removed() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let (token, vm, site) = (Token::random(), VmId::random(), Uuid::new_v4());
    let mark = records.stage_source(token, vm, "tcp:host:1", site).unwrap();
    assert!(records.pending().unwrap().records.is_empty(), "it is only staged");
    let mark = records.place_source(mark).unwrap();
    let found = Records::open(dir.path()).unwrap().pending().unwrap();
    assert_eq!(found.records, [mark.record().clone()]);
    records.remove_source(token).unwrap();
    assert!(records.pending().unwrap().records.is_empty());
}

#[test]
fn records_directory_is_created_with_its_parents() {
    let dir = tempfile::tempdir().unwrap();
    let deep = dir.path().join("a/b/c");
    let site = Records::open(&deep).unwrap().site();
    assert_eq!(Records::open(&deep).unwrap().site(), site);
    fs::write(dir.path().join("file"), "").unwrap();
    let e = Records::open(dir.path().join("file/b")).unwrap_err().to_string();
    assert!(e.contains("file/b"), "{e}");
}

#[test]
fn invalid_records_are_listed_and_hide_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let token = Token::random();
    let vm = VmId::random();
    let good = records.stage_source(token, vm, "tcp:host:1", Uuid::new_v4()).unwrap();
    let good = records.place_source(good).unwrap();
    let path = |name: &str| dir.path().join(format!("{name}.source.json"));
    let text = fs::read_to_string(path(&token.to_string())).unwrap();
    // Another migration's name, a later version, half a file, a long file, and a name without a
    // token.
    let names = [(); 4].map(|()| Token::random().to_string());
    fs::write(path(&names[0]), &text).unwrap();
    let later = text.replace("\"version\": 1", "\"version\": 2");
    fs::write(path(&names[1]), later.replace(&token.to_string(), &names[1])).unwrap();
    fs::write(path(&names[2]), &text[..20]).unwrap();
    fs::write(path(&names[3]), text.replace("{", &format!("{{{}", " ".repeat(1 << 16)))).unwrap();
    fs::write(path("mine"), &text).unwrap();
    let found = records.pending().unwrap();
    assert_eq!(found.records, [good.record().clone()]);
    let mut message: Vec<String> = found.unreadable.iter().map(ToString::to_string).collect();
    let mut because = |name: &str, why: &str| {
        let at = message.iter().position(|s| s.contains(name)).expect(name);
        let e = message.remove(at);
        assert!(e.contains(why), "{e}");
    };
    because(&names[0], &format!("its token is {token}, not that in its name"));
    because(&names[1], "its version is 2, and this program reads 1");
    because(&names[2], "EOF while parsing");
    because(&names[3], "it is longer than 65536 bytes");
    because("mine", "its name does not begin with a token");
    assert!(message.is_empty(), "{message:?}");
}

#[test]
fn decision_under_another_token_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let (token, other) = (Token::random(), Token::random());
    records.decide(token, None, Decision::Committed).unwrap();
    fs::copy(records.decision_path(token), records.decision_path(other)).unwrap();
    let e = records.decision(other).unwrap_err().to_string();
    assert!(e.contains(&other.to_string()) && e.contains("not that in its name"), "{e}");
}

#[test]
fn invalid_decision_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let token = Token::random();
    fs::write(dir.path().join(format!("{token}.destination.json")), "{}").unwrap();
    let e = records.decision(token).unwrap_err().to_string();
    assert!(e.contains("destination.json") && e.contains("missing field"), "{e}");
}
