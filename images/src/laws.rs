//! Tests of the payload's checks. Each law is either an error in memory that the payload must
//! detect, or a property of its writes.

use proptest::prelude::*;

use crate::workload::{
    BodyFill, Mismatch, MismatchKind, PAGE_WORDS, PageHead, PageMemory, Pattern, PayloadSpec,
    STAMP_WORD, SWEEP_EVERY, Share, Workload, generation_after,
};

/// Host memory with a frame number for each page. Accesses outside one share fail the test.
#[derive(Clone, PartialEq)]
struct ShareMemory {
    words: Vec<u64>,
    share: Share,
    writes: Vec<u32>,
    prefetched: std::cell::RefCell<Vec<u64>>,
}

const FIRST_GFN: u64 = 0x1000;

impl ShareMemory {
    fn new(share: Share) -> Self {
        let pages = (share.first + share.pages) as usize;
        ShareMemory {
            words: vec![0; pages * PAGE_WORDS],
            share,
            writes: vec![0; pages],
            prefetched: Default::default(),
        }
    }

    fn at(&self, page: u64, word: usize) -> usize {
        let inside = page >= self.share.first && page < self.share.first + self.share.pages;
        assert!(
            inside && word < PAGE_WORDS,
            "page {page} word {word} is outside of {:?}",
            self.share
        );
        page as usize * PAGE_WORDS + word
    }

    fn copy_of(&self, page: u64) -> Vec<u64> {
        self.words[self.at(page, 0)..][..PAGE_WORDS].to_vec()
    }

    fn put(&mut self, page: u64, copy: &[u64]) {
        let at = self.at(page, 0);
        self.words[at..][..PAGE_WORDS].copy_from_slice(copy);
    }
}

impl PageMemory for ShareMemory {
    fn gfn(&self, page: u64) -> u64 {
        FIRST_GFN + page
    }

    fn read_u64(&self, page: u64, word: usize) -> u64 {
        self.words[self.at(page, word)]
    }

    fn write_u64(&mut self, page: u64, word: usize, value: u64) {
        let at = self.at(page, word);
        self.words[at] = value;
    }

    fn wrote(&mut self, page: u64) {
        self.writes[page as usize] += 1;
    }

    fn prefetch(&self, page: u64) {
        self.at(page, 0);
        self.prefetched.borrow_mut().push(page);
    }
}

/// A workload with its memory and its table.
#[derive(Clone, PartialEq)]
struct WorkloadFixture {
    workload: Workload,
    memory: ShareMemory,
    table: Vec<u32>,
}

impl WorkloadFixture {
    fn new(spec: &PayloadSpec, share: Share) -> Self {
        let workload = Workload::new(spec, share);
        let table = vec![0; workload.table_len()];
        WorkloadFixture { workload, memory: ShareMemory::new(share), table }
    }

    fn steps(&mut self, steps: u64) -> Vec<Mismatch> {
        let mut wrong = Vec::new();
        for _ in 0..steps {
            self.workload.step(&mut self.memory, &mut self.table, &mut |bad| wrong.push(*bad));
        }
        wrong
    }

    /// Runs enough steps for every page to be rewritten or swept.
    fn full_sweep(&mut self) -> Vec<Mismatch> {
        self.steps((self.workload.share().pages + 1) * u64::from(SWEEP_EVERY))
    }

    /// Returns the pages written so far.
    fn written(&self) -> Vec<u64> {
        let share = self.workload.share();
        (share.first..share.first + share.pages)
            .filter(|&page| self.memory.read_u64(page, 1) != 0)
            .collect()
    }
}

/// Returns whether one of the mismatches is of this kind, in this page.
fn is_found(wrong: &[Mismatch], page: u64, kind: MismatchKind) -> bool {
    wrong.iter().any(|wrong| wrong.gfn == FIRST_GFN + page && wrong.kind == kind)
}

fn any_pattern() -> impl Strategy<Value = Pattern> {
    prop_oneof![
        Just(Pattern::Seq),
        Just(Pattern::Random),
        Just(Pattern::Zipf),
        (1u32..40).prop_map(Pattern::Stride),
        Just(Pattern::Once),
    ]
}

fn any_spec() -> impl Strategy<Value = PayloadSpec> {
    (any_pattern(), any::<u64>(), any::<bool>()).prop_map(|(pattern, seed, random)| PayloadSpec {
        pattern,
        seed,
        fill: if random { BodyFill::Random } else { BodyFill::Zero },
        ..PayloadSpec::default()
    })
}

fn any_share() -> impl Strategy<Value = Share> {
    (0u32..32, 0u64..20, 2u64..40).prop_map(|(vcpu, first, pages)| Share { vcpu, first, pages })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn correct_memory_raises_no_error(spec in any_spec(), share in any_share()) {
        let mut fixture = WorkloadFixture::new(&spec, share);
        prop_assert_eq!(fixture.full_sweep(), vec![]);
        prop_assert_eq!(fixture.full_sweep(), vec![]);
        prop_assert_eq!(fixture.workload.errors(), 0);
        prop_assert!(fixture.workload.swept() > 0);
    }

    #[test]
    fn the_same_seed_writes_the_same_bytes(
        spec in any_spec(), share in any_share(), steps in 0u64..500
    ) {
        let mut one = WorkloadFixture::new(&spec, share);
        let mut two = WorkloadFixture::new(&spec, share);
        one.steps(steps);
        two.steps(steps);
        prop_assert!(one == two);
        let other = PayloadSpec { seed: spec.seed ^ 1, ..spec };
        let mut three = WorkloadFixture::new(&other, share);
        three.steps(steps);
        prop_assert_eq!(steps == 0, one.memory == three.memory);
    }

    #[test]
    fn saved_workload_continues_unchanged(
        spec in any_spec(), share in any_share(), before in 0u64..300, after in 0u64..300
    ) {
        let mut fixture = WorkloadFixture::new(&spec, share);
        fixture.steps(before);
        let saved = serde_json::to_string(&fixture.workload).unwrap();
        let mut restored = fixture.clone();
        restored.workload = serde_json::from_str(&saved).unwrap();
        fixture.steps(after);
        restored.steps(after);
        prop_assert!(fixture == restored);
    }

    #[test]
    fn lost_write_is_detected(
        spec in any_spec(), share in any_share(), before in 1u64..200, pick: prop::sample::Index
    ) {
        let mut fixture = WorkloadFixture::new(&spec, share);
        let old = fixture.memory.clone();
        fixture.steps(before);
        let page = *pick.get(&fixture.written());
        fixture.memory.put(page, &old.copy_of(page));
        let wrong = fixture.full_sweep();
        prop_assert!(is_found(&wrong, page, MismatchKind::Lost), "{wrong:?}");
    }

    #[test]
    fn stale_page_is_detected(
        spec in any_spec(), share in any_share(), before in 1u64..200, between in 1u64..400,
        pick: prop::sample::Index
    ) {
        let mut fixture = WorkloadFixture::new(&spec, share);
        fixture.steps(before);
        let (old, candidates) = (fixture.memory.clone(), fixture.written());
        fixture.steps(between);
        let page = *pick.get(&candidates);
        prop_assume!(fixture.memory.copy_of(page) != old.copy_of(page));
        let expected = fixture.memory.read_u64(page, 1);
        fixture.memory.put(page, &old.copy_of(page));
        let wrong = fixture.full_sweep();
        let found = wrong.iter().find(|wrong| wrong.gfn == FIRST_GFN + page).expect("detected");
        prop_assert_eq!(found.kind, MismatchKind::Stale);
        prop_assert_eq!(found.expected_generation, expected);
        prop_assert_eq!(found.found_generation, old.read_u64(page, 1));
    }

    #[test]
    fn torn_page_is_detected(
        spec in any_spec(), share in any_share(), before in 1u64..200, between in 1u64..400,
        pick: prop::sample::Index, new_head: bool
    ) {
        let mut fixture = WorkloadFixture::new(&spec, share);
        fixture.steps(before);
        let (old, candidates) = (fixture.memory.clone(), fixture.written());
        fixture.steps(between);
        let page = *pick.get(&candidates);
        let (earlier, mut later) = (old.copy_of(page), fixture.memory.copy_of(page));
        prop_assume!(earlier != later);
        let half = PAGE_WORDS / 2;
        if new_head {
            later[half..].copy_from_slice(&earlier[half..]);
        } else {
            later[..half].copy_from_slice(&earlier[..half]);
        }
        fixture.memory.put(page, &later);
        let wrong = fixture.full_sweep();
        prop_assert!(is_found(&wrong, page, MismatchKind::Torn), "{wrong:?}");
    }

    #[test]
    fn swapped_pages_are_detected(
        spec in any_spec(), share in any_share(), before in 100u64..300,
        a: prop::sample::Index, b: prop::sample::Index
    ) {
        let mut fixture = WorkloadFixture::new(&spec, share);
        fixture.steps(before);
        let written = fixture.written();
        let (a, b) = (*a.get(&written), *b.get(&written));
        prop_assume!(a != b);
        let (copy_a, copy_b) = (fixture.memory.copy_of(a), fixture.memory.copy_of(b));
        fixture.memory.put(a, &copy_b);
        fixture.memory.put(b, &copy_a);
        let wrong = fixture.full_sweep();
        for page in [a, b] {
            prop_assert!(is_found(&wrong, page, MismatchKind::Misplaced), "{wrong:?}");
        }
    }

    #[test]
    fn page_of_another_vcpu_is_detected(
        spec in any_spec(), share in any_share(), before in 1u64..200
    ) {
        let mut fixture = WorkloadFixture::new(&spec, share);
        let mut other = WorkloadFixture::new(&spec, Share { vcpu: share.vcpu + 1, ..share });
        fixture.steps(before);
        other.steps(before);
        let page = fixture.written()[0];
        prop_assume!(other.memory.read_u64(page, 1) != 0);
        fixture.memory.put(page, &other.memory.copy_of(page));
        let wrong = fixture.full_sweep();
        prop_assert!(is_found(&wrong, page, MismatchKind::Misplaced), "{wrong:?}");
    }

    #[test]
    fn sweep_detects_any_flipped_bit(
        spec in any_spec(), share in any_share(), before in 100u64..300, pick: prop::sample::Index,
        word in 0..PAGE_WORDS, bit in 0u32..64
    ) {
        let mut fixture = WorkloadFixture::new(&spec, share);
        fixture.steps(before);
        let page = *pick.get(&fixture.written());
        let value = fixture.memory.read_u64(page, word);
        fixture.memory.write_u64(page, word, value ^ (1 << bit));
        let wrong = fixture.full_sweep();
        let found = wrong.iter().find(|wrong| wrong.gfn == FIRST_GFN + page).expect("detected");
        if (4..STAMP_WORD).contains(&word) {
            prop_assert_eq!((found.kind, found.word), (MismatchKind::Body, word));
        }
        prop_assert!(found.found != found.expected);
    }

    #[test]
    fn bad_head_is_one_error_at_its_rewrite(share in any_share(), at: prop::sample::Index) {
        let mut fixture = WorkloadFixture::new(&PayloadSpec::default(), share);
        fixture.steps(share.pages);
        let page = share.first + at.index(share.pages as usize) as u64;
        fixture.memory.write_u64(page, 3, 0);
        fixture.steps(share.pages);
        let after_one_pass = fixture.workload.errors();
        fixture.full_sweep();
        // The sweep may have read it before the rewrite.
        prop_assert!((1..=2).contains(&after_one_pass));
        prop_assert_eq!(fixture.workload.errors(), after_one_pass);
    }

    #[test]
    fn only_the_writers_write_again(spec in any_spec(), share in any_share(), writers in 1u64..32) {
        let writes = u64::from(share.vcpu) < writers;
        let pattern = if writes { spec.pattern } else { Pattern::Once };
        let same = PayloadSpec { pattern, ..spec.clone() };
        let some = PayloadSpec { writers: Some(writers), ..spec };
        let mut fixture = WorkloadFixture::new(&some, share);
        let mut plain = WorkloadFixture::new(&same, share);
        fixture.steps(share.pages * 3);
        plain.steps(share.pages * 3);
        prop_assert_eq!(fixture.workload.pages(), plain.workload.pages());
        prop_assert_eq!(&fixture.memory.writes, &plain.memory.writes);
    }

    #[test]
    fn once_writes_every_page_exactly_once(spec in any_spec(), share in any_share()) {
        let once = PayloadSpec { pattern: Pattern::Once, ..spec };
        let mut fixture = WorkloadFixture::new(&once, share);
        fixture.steps(share.pages * 5 / 2);
        let writes = &fixture.memory.writes[share.first as usize..];
        prop_assert!(writes.iter().all(|&writes| writes == 1));
        prop_assert_eq!(fixture.workload.pages(), share.pages);
        prop_assert_eq!(fixture.workload.passes(), 2);
    }

    #[test]
    fn stride_writes_only_every_kth_page(
        spec in any_spec(), share in any_share(), step in 1u32..50
    ) {
        let stride = PayloadSpec { pattern: Pattern::Stride(step), ..spec };
        let mut fixture = WorkloadFixture::new(&stride, share);
        fixture.steps(3 * share.pages);
        for (index, &writes) in fixture.memory.writes[share.first as usize..].iter().enumerate() {
            prop_assert_eq!(writes > 0, index % step as usize == 0);
        }
    }

    #[test]
    fn a_pass_of_seq_writes_every_page_once(share in any_share(), passes in 1u32..5) {
        let mut fixture = WorkloadFixture::new(&PayloadSpec::default(), share);
        fixture.steps(share.pages * u64::from(passes));
        let writes = &fixture.memory.writes[share.first as usize..];
        prop_assert!(writes.iter().all(|&writes| writes == passes));
        prop_assert_eq!(fixture.workload.passes(), u64::from(passes));
    }

    #[test]
    fn shares_cover_the_working_set_without_overlap(
        ws_pages in 32u64..100_000, vcpus in 1u32..=32
    ) {
        let mut next = 0;
        for vcpu in 0..vcpus {
            let share = Share::of(ws_pages, vcpus, vcpu);
            prop_assert_eq!((share.vcpu, share.first), (vcpu, next));
            prop_assert!(share.pages.abs_diff(ws_pages / u64::from(vcpus)) <= 1);
            next += share.pages;
        }
        prop_assert_eq!(next, ws_pages);
    }

    #[test]
    fn generations_never_return_to_untouched(writes: u64) {
        prop_assert_eq!(generation_after(writes) == 0, writes == 0);
        if writes > 0 {
            prop_assert!(generation_after(writes) != generation_after(writes - 1));
        }
    }
}

#[test]
fn pages_are_prefetched_before_their_visit() {
    for pattern in [Pattern::Seq, Pattern::Random, Pattern::Stride(3)] {
        let share = Share { vcpu: 0, first: 2, pages: 300 };
        let mut fixture =
            WorkloadFixture::new(&PayloadSpec { pattern, ..PayloadSpec::default() }, share);
        fixture.steps(8);
        let prefetched = fixture.memory.prefetched.borrow().clone();
        assert_eq!(prefetched.len(), 8, "{pattern:?}");
        for page in prefetched {
            let before = fixture.memory.writes[page as usize];
            fixture.steps(1);
            assert_eq!(fixture.memory.writes[page as usize], before + 1, "{pattern:?}");
        }
    }
}

#[test]
fn zipf_prefers_few_pages_and_reaches_all() {
    let share = Share { vcpu: 0, first: 0, pages: 1000 };
    let mut fixture = WorkloadFixture::new(
        &PayloadSpec { pattern: Pattern::Zipf, ..PayloadSpec::default() },
        share,
    );
    fixture.steps(200_000);
    let mut writes = fixture.memory.writes.clone();
    writes.sort_unstable_by(|a, b| b.cmp(a));
    // Ten octaves, of which the first three are seven pages: about three tenths of all visits.
    let top: u32 = writes[..7].iter().sum();
    assert!((50_000..75_000).contains(&top), "{top}");
    assert!((15_000..27_000).contains(&writes[0]), "{}", writes[0]);
    assert!(writes[999] > 0);
    // Popular pages are not neighbours.
    let popular: Vec<usize> =
        (0..1000).filter(|&page| fixture.memory.writes[page] > writes[8]).collect();
    assert!(popular.windows(2).all(|pair| pair[1] - pair[0] > 1), "{popular:?}");
}

#[test]
fn random_prefers_no_page() {
    let share = Share { vcpu: 3, first: 7, pages: 100 };
    let mut fixture = WorkloadFixture::new(
        &PayloadSpec { pattern: Pattern::Random, ..PayloadSpec::default() },
        share,
    );
    fixture.steps(100_000);
    assert!(
        fixture.memory.writes[7..].iter().all(|writes| (850..1150).contains(writes)),
        "{:?}",
        fixture.memory.writes
    );
}

#[test]
fn random_bodies_do_not_compress() {
    let share = Share { vcpu: 0, first: 0, pages: 64 };
    let mut fixture = WorkloadFixture::new(
        &PayloadSpec { fill: BodyFill::Random, ..PayloadSpec::default() },
        share,
    );
    fixture.steps(64);
    let mut words: Vec<u64> =
        (0..64).flat_map(|page| fixture.memory.copy_of(page)[4..STAMP_WORD].to_vec()).collect();
    let mut counts = [0u32; 256];
    words.iter().flat_map(|word| word.to_le_bytes()).for_each(|byte| counts[byte as usize] += 1);
    // About 1014 of each are expected.
    assert!(counts.iter().all(|count| (870..1160).contains(count)), "{counts:?}");
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), 64 * 507);
}

#[test]
fn zero_bodies_stay_zero() {
    let share = Share { vcpu: 0, first: 0, pages: 4 };
    let mut fixture = WorkloadFixture::new(&PayloadSpec::default(), share);
    fixture.steps(40);
    assert!(
        (0..4)
            .all(|page| fixture.memory.copy_of(page)[4..STAMP_WORD].iter().all(|&word| word == 0))
    );
}

#[test]
fn nonzero_page_before_first_write_is_detected() {
    let share = Share { vcpu: 0, first: 0, pages: 4 };
    let mut fixture = WorkloadFixture::new(&PayloadSpec::default(), share);
    fixture.memory.write_u64(2, 0, 99);
    let wrong = fixture.steps(4);
    assert_eq!(
        (wrong.len(), wrong[0].gfn, wrong[0].kind),
        (1, FIRST_GFN + 2, MismatchKind::Corrupt)
    );
}

#[test]
fn generations_wrap_past_zero() {
    let most = u64::from(u32::MAX);
    assert_eq!([1, most, most + 1, most + 2].map(generation_after), [1, u32::MAX, 1, 2]);
}

#[test]
fn heads_of_different_pages_never_match() {
    let head = PageHead::expected(1, 5, 9, 0);
    for other in [
        PageHead::expected(2, 5, 9, 0),
        PageHead::expected(1, 6, 9, 0),
        PageHead::expected(1, 5, 10, 0),
        PageHead::expected(1, 5, 9, 1),
    ] {
        assert!(
            !head.matches(&other) && head.checksum != other.checksum && head.stamp != other.stamp
        );
    }
}
